"""Recorded traffic through the whole scheduler, in virtual time.

The scheduler is the one that serves; only its world is made: cards that hold one model each,
loads that take as long as they are drawn to, requests that run as long as they were recorded
to, callers who come back when told. So a change to a rule can be tried on a month of traffic
in half a minute, and two runs differ by that rule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rota.core.types import Eviction, Model, ModelName, Rules, Scaling
from rota.sim.stage import Stage
from rota.sim.traffic import Ask, names_of

CARD_MIB = 1_024
ENDLESS_MS = 10**12
ALL_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms requests are served.

    Args:
        slots: requests that a replica takes at once.
        hold_ms: how long a model is kept for its caller's next request.
        patience_ms: when a demand may close busy replicas.
        activation_wait_ms: how long a request waits for a load before it is told to come back.
        idle_timeout_ms: when an idle replica steps down; 0 = never.
        stop_ms: how long a stop takes.
    """

    slots: int = 4
    hold_ms: int = 1_000
    patience_ms: int = 300_000
    activation_wait_ms: int = 45_000
    idle_timeout_ms: int = 600_000
    stop_ms: int = 1_000
    rules: Rules = ALL_RULES


IN_SERVICE = Terms()
"""What a file that says nothing has; answers call no tools."""
BARE = Terms(
    hold_ms=0,
    activation_wait_ms=ENDLESS_MS,
    idle_timeout_ms=0,
    stop_ms=0,
    rules=Rules(residence=False),
)
"""Nobody is sent away, nothing is held, and stops take no time: only victims and order count."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it.

    Args:
        requests: how many there were.
        starts: loads, the first ones included.
        waits_ms: from first arrival to grant, of each request, in no order.
    """

    requests: int
    starts: int
    waits_ms: list[int]


def replay(
    traffic: Sequence[Ask],
    cards: int,
    load_ms: Callable[[ModelName], int],
    eviction: Eviction,
    terms: Terms = IN_SERVICE,
) -> Replayed:
    """Serve all of it on so many cards that hold one model each.

    Args:
        load_ms: how long a load of a model takes; asked at each.
    """
    models = [_model(name, terms) for name in names_of(traffic)]
    stage = Stage(
        [CARD_MIB] * cards,
        models,
        load_ms,
        terms.rules,
        eviction=eviction,
        stop_ms=terms.stop_ms,
        is_checked=False,
    )
    for ask in traffic:
        stage.caller(ask.model, ask.serve_ms, first_ms=ask.at_ms, times=1)
    stage.run_until(traffic[-1].at_ms + ENDLESS_MS)
    waits_ms = [wait_ms for waits in stage.waited_ms.values() for wait_ms in waits]
    return Replayed(len(traffic), stage.starts.total(), waits_ms)


def _model(name: ModelName, terms: Terms) -> Model:
    return Model(
        name=name,
        scaling=Scaling(0, 1, terms.idle_timeout_ms),
        memory_mib=CARD_MIB,
        slots=terms.slots,
        queue_max=10**6,
        activation_wait_ms=terms.activation_wait_ms,
        queue_wait_ms=max(terms.activation_wait_ms, 600_000),
        patience_ms=terms.patience_ms,
        hold_ms=terms.hold_ms,
        hold_finished_ms=terms.hold_ms,
    )
