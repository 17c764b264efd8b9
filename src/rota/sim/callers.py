"""Callers in virtual time: those who come back when told, who give up, who leave.

Each has a wish at a time (a request it wants answered) and a temper. A wish begins with the
caller's first arrival and ends with a grant, with a refusal that says not to come back, or
with the caller's giving up; the time from first arrival to grant is what a user feels, so
that is what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rota.core.effects import Grant, Refuse
from rota.core.events import Event, GrantEnded, Outcome, RequestArrived, RequestCancelled
from rota.core.types import ModelName, ReplicaId, RequestId
from rota.sim.timeline import Timeline

RETURN_MS_MAX = 1_000
"""A caller who was told to come back is back this long after the announced time at most."""


@dataclass(frozen=True, slots=True)
class Temper:
    """How a caller behaves.

    Args:
        returns: the share of times it comes back when told.
        leaves: the share of its requests from which it walks away at a random moment.
        serve_ms_max: how long its requests take at most.
        think_ms_max: how long it thinks between one wish and the next, at most.
        wishes: how many wishes it has.
        own_wait_ms: its own bound on waiting, if it states one.
        hold_ms: how long it wants its model kept for its next request, if it says.
        patience_ms: how long it honours the holds of others, if it says.
    """

    returns: float
    leaves: float
    serve_ms_max: int
    think_ms_max: int
    wishes: int
    own_wait_ms: int | None = None
    hold_ms: int | None = None
    patience_ms: int | None = None


@dataclass(slots=True)
class Caller:
    """Who asks for one model, one wish after the other."""

    name: str
    model: ModelName
    temper: Temper
    wishes_left: int
    since_ms: int = 0  # its wish's first arrival
    request: RequestId | None = None
    replica: ReplicaId | None = None  # where its request is being served
    is_back: bool = False  # whether it was told to come back, and has


@dataclass(slots=True)
class Counts:
    """What became of the wishes."""

    arrivals: int = 0
    grants: int = 0
    told: int = 0
    refused: int = 0
    left: int = 0
    gave_up: int = 0
    returned: int = 0
    returned_to_slot: int = 0  # of those, granted at once
    longest_wait_ms: int = 0  # from first arrival to grant


class Callers:
    """All callers, the answers they get and what they do next.

    Args:
        report: where facts go.

    Attributes:
        are_all_patient: from now on everyone returns when told, and nobody leaves.
        are_new_wishes_made: whether a caller whose wish has ended makes another.
    """

    def __init__(self, random: Random, timeline: Timeline, report: Callable[[Event], None]) -> None:
        self._random = random
        self._timeline = timeline
        self._report = report
        self._count = 0
        self._by_request: dict[RequestId, Caller] = {}
        self.counts = Counts()
        self.everyone: list[Caller] = []
        self.are_all_patient = False
        self.are_new_wishes_made = True

    def add(self, name: str, model: ModelName, temper: Temper, first_in_ms: int) -> None:
        """Let a caller make its first wish in a while."""
        caller = Caller(name, model, temper, temper.wishes)
        self.everyone.append(caller)
        self._timeline.post(first_in_ms, lambda: self._wish(caller))

    def pending(self) -> list[Caller]:
        """Who has a wish that is not fulfilled."""
        return [caller for caller in self.everyone if caller.since_ms and not caller.replica]

    # ── answers ──────────────────────────────────────────────────────────────────────────

    def granted(self, grant: Grant) -> None:
        caller = self._by_request[grant.request]
        caller.replica = grant.replica
        waited_ms = self._timeline.now_ms - caller.since_ms
        self.counts.grants += 1
        self.counts.longest_wait_ms = max(self.counts.longest_wait_ms, waited_ms)
        self.counts.returned_to_slot += caller.is_back and grant.waited_ms == 0
        in_ms = self._random.randint(1, caller.temper.serve_ms_max)
        self._timeline.post(in_ms, lambda: self._end(caller, grant.request, Outcome.OK))

    def refused(self, refuse: Refuse) -> None:
        caller = self._by_request.pop(refuse.request)
        caller.request = None
        retry_ms = refuse.refusal.retry_after_ms
        if retry_ms is None:
            self.counts.refused += 1
            self._next_wish(caller)
        elif self.are_all_patient or self._random.random() < caller.temper.returns:
            self.counts.told += 1
            late_ms = self._random.randint(0, RETURN_MS_MAX)
            self._timeline.post(retry_ms + late_ms, lambda: self._ask(caller, is_back=True))
        else:
            self.counts.gave_up += 1
            self._next_wish(caller)

    def died(self, replica: ReplicaId) -> None:
        """A replica is gone: those it served notice at once."""
        for caller in self.everyone:
            if caller.replica == replica and caller.request is not None:
                outcome = self._random.choice((Outcome.FAILED, Outcome.UNREACHABLE))
                self._end(caller, caller.request, outcome)

    # ── deeds ────────────────────────────────────────────────────────────────────────────

    def _wish(self, caller: Caller) -> None:
        if caller.wishes_left == 0 or not self.are_new_wishes_made:
            return
        caller.wishes_left -= 1
        caller.since_ms = self._timeline.now_ms
        self._ask(caller, is_back=False)

    def _ask(self, caller: Caller, *, is_back: bool) -> None:
        self._count += 1
        request = f"q{self._count}"
        caller.request, caller.is_back = request, is_back
        self._by_request[request] = caller
        self.counts.arrivals += 1
        self.counts.returned += is_back
        if not self.are_all_patient and self._random.random() < caller.temper.leaves:
            in_ms = self._random.randint(0, 60_000)
            self._timeline.post(in_ms, lambda: self._leave(caller, request))
        own_ms = caller.temper.own_wait_ms
        size = self._random.randint(0, 10_000)
        self._report(
            RequestArrived(
                request=request,
                model=caller.model,
                caller=caller.name,
                body_bytes=size,
                activation_wait_ms=own_ms,
                queue_wait_ms=own_ms,
                hold_ms=caller.temper.hold_ms,
                patience_ms=caller.temper.patience_ms,
            )
        )

    def _leave(self, caller: Caller, request: RequestId) -> None:
        """Walk away, whether waiting or being served."""
        if caller.request != request or self.are_all_patient:
            return
        del self._by_request[request]
        caller.request = caller.replica = None
        self.counts.left += 1
        self._report(RequestCancelled(request))
        if self._random.random() < caller.temper.returns:
            self._timeline.post(self._random.randint(0, 5_000), lambda: self._ask_again(caller))
        else:
            self._next_wish(caller)

    def _ask_again(self, caller: Caller) -> None:
        if caller.request is None:
            self._ask(caller, is_back=False)

    def _end(self, caller: Caller, request: RequestId, outcome: Outcome) -> None:
        if caller.request != request:
            return
        del self._by_request[request]
        caller.request = caller.replica = None
        self._next_wish(caller)
        is_tool_call = self._random.random() < 0.3
        self._report(GrantEnded(request, outcome, is_tool_call))

    def _next_wish(self, caller: Caller) -> None:
        caller.since_ms = 0
        in_ms = self._random.randint(1, caller.temper.think_ms_max)
        self._timeline.post(in_ms, lambda: self._wish(caller))
