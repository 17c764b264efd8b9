"""Equal slots and no waiting: what is left of scheduling when only the victim is to be chosen.

Every model fits every slot, a load takes no time, and a request whose model is in no slot makes
one leave: the share of requests that need such a swap is what a policy is worth. `Ours` asks
`eviction.value` and `worth`, which decide in service; the others are there for comparison, the
last of them clairvoyant: no policy can need fewer swaps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from rota.core.eviction import Candidate, value
from rota.core.types import ModelName
from rota.core.worth import History, loss_ms
from rota.sim.traffic import Ask

LOAD_MS = 10_000
"""All loads cost the same here: a swap is a swap."""
SLOT_MIB = 1_024


class Policy(Protocol):
    """Who leaves. Made for one run over some traffic."""

    def note(self, ask: Ask) -> None:
        """A request has come; its model is in a slot."""

    def victim(self, slots: Sequence[ModelName], now_ms: int) -> ModelName:
        """Which of these leaves."""


def swaps(traffic: Sequence[Ask], slot_count: int, policy: Policy) -> Iterator[bool]:
    """For each request in turn whether it needed a swap, the first loads included."""
    slots: dict[ModelName, None] = {}
    for ask in traffic:
        is_swap = ask.model not in slots
        if is_swap:
            if len(slots) == slot_count:
                del slots[policy.victim(list(slots), ask.at_ms)]
            slots[ask.model] = None
        policy.note(ask)
        yield is_swap


class Recency:
    """The least recently used leaves."""

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[ModelName, int] = {}

    def note(self, ask: Ask) -> None:
        self._count += 1
        self._last[ask.model] = self._count

    def victim(self, slots: Sequence[ModelName], now_ms: int) -> ModelName:
        return min(slots, key=self._last.__getitem__)


class GreedyDual:
    """GreedyDual with frequencies: all uses so far, on a clock that each victim puts forward to its
    own worth, so that what was used much and long ago ages out."""

    def __init__(self) -> None:
        self._clock = 0
        self._uses: defaultdict[ModelName, int] = defaultdict(int)
        self._worth: dict[ModelName, tuple[int, int]] = {}

    def note(self, ask: Ask) -> None:
        self._uses[ask.model] += 1
        self._worth[ask.model] = (self._clock + self._uses[ask.model], ask.at_ms)

    def victim(self, slots: Sequence[ModelName], now_ms: int) -> ModelName:
        found = min(slots, key=self._worth.__getitem__)
        self._clock, _ = self._worth[found]
        return found


class OneRate:
    """The least of the rates that fade with one half-life."""

    def __init__(self, half_ms: int = 300_000) -> None:
        self._half_ms = half_ms
        self._last: dict[ModelName, int] = {}
        self._count: defaultdict[ModelName, float] = defaultdict(float)

    def note(self, ask: Ask) -> None:
        self._count[ask.model] = self._at(ask.model, ask.at_ms) + 1
        self._last[ask.model] = ask.at_ms

    def victim(self, slots: Sequence[ModelName], now_ms: int) -> ModelName:
        return min(slots, key=lambda model: self._at(model, now_ms))

    def _at(self, model: ModelName, now_ms: int) -> float:
        past_ms = now_ms - self._last.get(model, now_ms)
        return float(self._count[model] * 0.5 ** (past_ms / self._half_ms))


class Ours:
    """Who is least likely to be missed, as in service."""

    def __init__(self) -> None:
        self._history: defaultdict[ModelName, History] = defaultdict(History)

    def note(self, ask: Ask) -> None:
        self._history[ask.model].note(ask.at_ms)

    def victim(self, slots: Sequence[ModelName], now_ms: int) -> ModelName:
        def as_candidate(model: ModelName) -> Candidate:
            history = self._history[model]
            loss = loss_ms(history, LOAD_MS, now_ms)
            return Candidate(model, {"slot": SLOT_MIB}, history.noted_ms, loss_ms=loss)

        return min(map(as_candidate, slots), key=value).replica


class Clairvoyant:
    """The one whose next request is furthest away leaves (Belady's rule)."""

    def __init__(self, traffic: Sequence[Ask]) -> None:
        self._next: defaultdict[ModelName, deque[int]] = defaultdict(deque)
        for place, ask in enumerate(traffic):
            self._next[ask.model].append(place)
        self._end = len(traffic)

    def note(self, ask: Ask) -> None:
        self._next[ask.model].popleft()

    def victim(self, slots: Sequence[ModelName], now_ms: int) -> ModelName:
        return max(slots, key=lambda model: next(iter(self._next[model]), self._end))
