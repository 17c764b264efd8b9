"""Callers in virtual time: those who come back when told, who give up, who leave.

Each has a wish at a time (a request it wants answered, or a lease) and a temper. A wish begins
with the caller's first arrival and ends with a grant, with a refusal that says not to come back,
or with the caller's giving up; the time from first arrival to grant is what a user feels, so
that is what is kept. Some answers go on as a job: the caller has its answer, the replica a lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rota.core.effects import Grant, Leased, LeaseEnded, Refuse
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LeaseReleased,
    LeaseRenewed,
    Outcome,
    RequestArrived,
    RequestCancelled,
)
from rota.core.types import LeaseClaim, LeaseId, ModelName, ReplicaId, RequestId
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
        priority: of its requests, if it says.
        leases: the share of its wishes that are leases.
        loads: whether its leases may bring the model up.
        jobs: the share of its answers that go on as a job.
        lease_ms_max: how long its leases and jobs last at most.
        leaves_ms_max: how long it stays before it walks away, at most.
    """

    returns: float
    leaves: float
    serve_ms_max: int
    think_ms_max: int
    wishes: int
    own_wait_ms: int | None = None
    hold_ms: int | None = None
    patience_ms: int | None = None
    priority: int | None = None
    leases: float = 0.0
    loads: bool = True
    jobs: float = 0.0
    lease_ms_max: int = 60_000
    leaves_ms_max: int = 60_000


@dataclass(slots=True)
class Caller:
    """Who asks for one model, one wish after the other."""

    name: str
    model: ModelName
    temper: Temper
    wishes_left: int
    since_ms: int = 0  # its wish's first arrival
    request: RequestId | None = None
    replica: ReplicaId | None = None  # where its request is being served, or its lease is
    is_back: bool = False  # whether it was told to come back, and has
    wants_lease: bool = False


@dataclass(slots=True)
class Counts:
    """What became of the wishes."""

    arrivals: int = 0
    grants: int = 0
    leases: int = 0
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
        answers: whether a replica answers at all.

    Attributes:
        are_all_patient: from now on everyone returns when told, and nobody leaves.
        are_new_wishes_made: whether a caller whose wish has ended makes another.
    """

    def __init__(
        self,
        random: Random,
        timeline: Timeline,
        report: Callable[[Event], None],
        answers: Callable[[ReplicaId], bool],
    ) -> None:
        self._random = random
        self._timeline = timeline
        self._report = report
        self._answers = answers
        self._count = 0
        self._by_request: dict[RequestId, Caller] = {}
        self._jobs: dict[LeaseId, Caller] = {}
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

    def served_by(self, replica: ReplicaId) -> tuple[RequestId, ...]:
        """The requests that run on a replica."""
        return tuple(
            caller.request
            for caller in self.everyone
            if caller.replica == replica and caller.request and not caller.wants_lease
        )

    # ── answers ──────────────────────────────────────────────────────────────────────────

    def granted(self, grant: Grant) -> None:
        caller = self._by_request[grant.request]
        self.counts.grants += 1
        self._is_served(caller, grant.replica, grant.waited_ms)
        in_ms = self._random.randint(1, caller.temper.serve_ms_max)
        self._timeline.post(in_ms, lambda: self._answered(caller, grant.request))

    def leased(self, leased: Leased) -> None:
        caller = self._by_request.get(leased.lease)
        self.counts.leases += 1
        if caller is not None:
            self._is_served(caller, leased.replica, leased.waited_ms)
        else:
            caller = self._jobs[leased.lease]
        self._use(leased.lease, caller.temper, self._random.randint(0, 3))

    def lease_ended(self, ended: LeaseEnded) -> None:
        self._jobs.pop(ended.lease, None)
        caller = self._by_request.pop(ended.lease, None)
        if caller is not None:
            caller.request = caller.replica = None
            self._next_wish(caller)

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
        """A replica is gone: those it served notice at once. Of leases the scheduler says so."""
        for caller in self.everyone:
            if caller.replica == replica and caller.request and not caller.wants_lease:
                outcome = self._random.choice((Outcome.FAILED, Outcome.UNREACHABLE))
                self._end(caller, caller.request, outcome)

    def _is_served(self, caller: Caller, replica: ReplicaId, waited_ms: int) -> None:
        caller.replica = replica
        total_ms = self._timeline.now_ms - caller.since_ms
        self.counts.longest_wait_ms = max(self.counts.longest_wait_ms, total_ms)
        self.counts.returned_to_slot += caller.is_back and waited_ms == 0

    # ── deeds ────────────────────────────────────────────────────────────────────────────

    def _wish(self, caller: Caller) -> None:
        if caller.wishes_left == 0 or not self.are_new_wishes_made:
            return
        caller.wishes_left -= 1
        caller.since_ms = self._timeline.now_ms
        caller.wants_lease = self._random.random() < caller.temper.leases
        self._ask(caller, is_back=False)

    def _ask(self, caller: Caller, *, is_back: bool) -> None:
        temper = caller.temper
        request = self._new_id("l" if caller.wants_lease else "q")
        caller.request, caller.is_back = request, is_back
        self._by_request[request] = caller
        self.counts.arrivals += 1
        self.counts.returned += is_back
        if not self.are_all_patient and self._random.random() < temper.leaves:
            in_ms = self._random.randint(0, temper.leaves_ms_max)
            self._timeline.post(in_ms, lambda: self._leave(caller, request))
        self._report(self._lease(caller) if caller.wants_lease else self._request(caller))

    def _request(self, caller: Caller) -> Event:
        assert caller.request is not None, caller
        temper = caller.temper
        return RequestArrived(
            request=caller.request,
            model=caller.model,
            caller=caller.name,
            body_bytes=self._random.randint(0, 10_000),
            activation_wait_ms=temper.own_wait_ms,
            queue_wait_ms=temper.own_wait_ms,
            hold_ms=temper.hold_ms,
            patience_ms=temper.patience_ms,
            priority=temper.priority,
        )

    def _lease(self, caller: Caller) -> Event:
        assert caller.request is not None, caller
        temper = caller.temper
        return LeaseAsked(
            lease=caller.request,
            model=caller.model,
            caller=caller.name,
            ttl_ms=self._random.randint(1, temper.lease_ms_max),
            load=temper.loads,
            activation_wait_ms=temper.own_wait_ms,
            priority=temper.priority,
        )

    def _use(self, lease: LeaseId, temper: Temper, renewals: int) -> None:
        """Renew a lease a few times; then release it, once or twice, or let it expire."""
        in_ms = self._random.randint(0, temper.lease_ms_max)
        if renewals > 0 and not self.are_all_patient:
            self._timeline.post(in_ms, lambda: self._renew(lease, temper, renewals))
        elif self._random.random() < 0.7:
            for _ in range(self._random.choice((1, 2))):
                self._timeline.post(in_ms, lambda: self._report(LeaseReleased(lease)))

    def _renew(self, lease: LeaseId, temper: Temper, renewals: int) -> None:
        self._report(LeaseRenewed(lease, self._random.randint(1, temper.lease_ms_max)))
        self._use(lease, temper, renewals - 1)

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

    def _answered(self, caller: Caller, request: RequestId) -> None:
        """Its time is over; but what answers nothing does not end either."""
        if caller.replica is not None and self._answers(caller.replica):
            self._end(caller, request, Outcome.OK)

    def _end(self, caller: Caller, request: RequestId, outcome: Outcome) -> None:
        if caller.request != request:
            return
        del self._by_request[request]
        caller.request = caller.replica = None
        self._next_wish(caller)
        is_tool_call = self._random.random() < 0.3
        self._report(GrantEnded(request, outcome, is_tool_call, self._job(caller, outcome)))

    def _job(self, caller: Caller, outcome: Outcome) -> LeaseClaim | None:
        """What goes on behind an answer, if anything does."""
        if outcome is not Outcome.OK or self._random.random() >= caller.temper.jobs:
            return None
        lease = self._new_id("j")
        self._jobs[lease] = caller
        return LeaseClaim(lease, self._random.randint(1, caller.temper.lease_ms_max), "a job")

    def _next_wish(self, caller: Caller) -> None:
        caller.since_ms = 0
        in_ms = self._random.randint(1, caller.temper.think_ms_max)
        self._timeline.post(in_ms, lambda: self._wish(caller))

    def _new_id(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"
