"""What would happen if a model were asked for now: the scheduler's own answer, from a copy of it.

The copy hears of a request and is let go of, so asking changes nothing, and the answer cannot
differ from what the scheduler does. A second planner that only explains was refused: it would be
right until the first one changes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum

from rota.core import words
from rota.core.effects import Grant, Refuse, Start, Stop
from rota.core.events import RequestArrived
from rota.core.state import Replica, State
from rota.core.types import Model, ModelName, NodeId, Placement, ReplicaId
from rota.journal.graph import Rows, thaw


class Meets(Enum):
    """What a request would meet first."""

    SERVED = "served"
    LOADS = "loads"  # in memory that is free
    EVICTS = "evicts"
    WAITS = "waits"  # for a load, a slot, or room that nobody can be made to leave yet
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Leaver:
    """A replica that would be made to leave.

    Args:
        load_s: what loading its model again is expected to take; None = not known.
    """

    replica: ReplicaId
    model: ModelName
    why: str
    load_s: float | None


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What would happen.

    Args:
        text: in a sentence.
        node, devices: where it would be loaded; None and empty where it would not.
        rule: which group or set says who may not be there beside it; None = memory decides.
        eta_s: when it would be served; None = not known.
        code: of a refusal.
    """

    model: ModelName
    outcome: Meets
    text: str
    leavers: tuple[Leaver, ...] = ()
    node: str | None = None
    devices: tuple[str, ...] = ()
    rule: str | None = None
    eta_s: float | None = None
    code: str | None = None

    def as_plain(self) -> dict[str, object]:
        """As JSON can say it."""
        plain = asdict(self)
        plain["outcome"] = self.outcome.value
        plain["leaves"] = [asdict(leaver) for leaver in self.leavers]
        del plain["leavers"]
        return plain


def rehearse(rows: Rows, request: RequestArrived, now_ms: int) -> Rehearsal:
    """What such a request would meet, in a state of which these are the rows.

    Args:
        request: of an id that nobody there has, for a model that is there.
        now_ms: when, not before the state's own time.
    """
    scheduler = thaw(rows)
    effects = scheduler.step(request, now_ms)
    state, name = scheduler.state, request.model
    for effect in effects:
        match effect:
            case Grant(request.request, replica):
                return Rehearsal(name, Meets.SERVED, f"{replica} of {name} would serve it", eta_s=0)
            case Refuse(request.request, refusal):
                code = refusal.code.value
                return Rehearsal(name, Meets.REFUSED, refusal.message, code=code)
            case Start(model=model, placement=placement) if model == name:
                text = f"{name} would be loaded; nobody leaves for it"
                return _placed(state, Rehearsal(name, Meets.LOADS, text), placement)
            case _:
                pass
    demand = state.demands[name]
    leavers = tuple(
        Leaver(stop.replica, stop.model, stop.why, _seconds(state.demands[stop.model].load_ms))
        for stop in effects
        if isinstance(stop, Stop) and stop.rival == name
    )
    if leavers and demand.promise is not None:
        models = ", ".join(dict.fromkeys(leaver.model for leaver in leavers))
        text = f"{name} would be loaded once {models} has left"
        option, placement = demand.promise.rule, demand.promise.placement
        rule = None if option is None else option.rule
        return _placed(state, Rehearsal(name, Meets.EVICTS, text, leavers, rule=rule), placement)
    waiting = words.reason(state, demand)
    return Rehearsal(
        name,
        Meets.WAITS,
        waiting.text,
        rule=None if demand.is_up else _rule_in_the_way(state, demand.model),
        eta_s=_seconds(waiting.eta_ms),
    )


def _placed(state: State, told: Rehearsal, placement: Placement) -> Rehearsal:
    return replace(
        told,
        node=placement.node,
        devices=placement.devices,
        eta_s=_seconds(words.eta_ms(state, state.demands[told.model])),
    )


def _rule_in_the_way(state: State, model: Model) -> str | None:
    """What the rules have against its coming to any node, as they say it of the first."""
    if model.is_external:
        return None
    said: list[str] = []
    for node in state.ledger.totals:
        there = {r.model.name for r in state.replicas.values() if _is_on(r, node)} - {model.name}
        best = state.coexistence.options(model.name, frozenset(there))[0]
        if not best.leaving:
            return None
        said.append(best.rule)
    return next(iter(said), None)


def _is_on(replica: Replica, node: NodeId) -> bool:
    return replica.placement.node == node and bool(replica.placement.devices)


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1_000
