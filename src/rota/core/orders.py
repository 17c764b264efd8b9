"""The scheduler's hands: each change of the state that comes with an order, or with a wake-up.

What is decided is in `scheduler` and `clearing`; here a decision becomes an effect and the books
that go with it, in one place each, so that no order leaves without its entry. What another
model must look at again is noted on the way (`touch`, `is_room_stale`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from rota.core import words
from rota.core.effects import (
    Effect,
    Grant,
    Leased,
    LeaseEnded,
    Refusal,
    RefusalCode,
    Refuse,
    Start,
    Stop,
)
from rota.core.room import Outlook
from rota.core.state import (
    Barrier,
    Demand,
    Entry,
    EntryKind,
    Granted,
    Lease,
    Presence,
    Replica,
    State,
)
from rota.core.types import LeaseClaim, ModelName, Phase, Placement, RequestId

FORGET_MS = 30_000
"""An absent caller keeps its place this long after it left, or should have been back."""
NEVER_MS = 2**62

ALARMS_PER_MODEL = 8
"""So many kept alarms per model are swept: callers with little time leave one each."""


@dataclass(slots=True, eq=False)
class Orders:
    """The state, the orders of the step under way, and what is to be looked at again.

    Args:
        lease_ms_max: how long a lease may last, renewals included.
        replica_count: replicas ever started; their ids are counted by it.
        order_count: parts of demands so far; what came first has the lower number.
        touched: the models that something has changed for.
        is_room_stale: whether something has changed about who gets which memory.
        alarms: a heap of when to look at which model; some are out of date.
    """

    state: State
    lease_ms_max: int
    replica_count: int = 0
    order_count: int = 0
    effects: list[Effect] = field(default_factory=list)
    touched: dict[ModelName, None] = field(default_factory=dict)
    is_room_stale: bool = True
    alarms: list[tuple[int, ModelName]] = field(default_factory=list)

    # ── what is to be looked at ──────────────────────────────────────────────────────────

    def touch(self, demand: Demand) -> None:
        self.touched[demand.model.name] = None

    def review(self, demand: Demand) -> None:
        """What entries wait for has changed, and with it when each is due."""
        demand.review_ms = 0
        self.touch(demand)

    def wake_at(self, demand: Demand, wake_ms: int) -> None:
        """Look at a model then, though nothing may have happened. A later time is left to the
        earlier alarm: it looks, and sets the next. So the heap does not grow with every grant."""
        if demand.wake_ms is not None and demand.wake_ms <= wake_ms:
            return
        demand.wake_ms = wake_ms
        heapq.heappush(self.alarms, (wake_ms, demand.model.name))
        if len(self.alarms) > ALARMS_PER_MODEL * len(self.state.demands):
            self._sweep_alarms()

    def touch_due(self) -> None:
        """Take the alarms whose time has come."""
        while self.alarms and self.alarms[0][0] <= self.state.now_ms:
            due_ms, name = heapq.heappop(self.alarms)
            demand = self.state.demands.get(name)
            if demand is not None and demand.wake_ms == due_ms:
                demand.wake_ms = None
                self.is_room_stale = True  # patience or a pause may have ended
                self.touch(demand)

    def next_wake_ms(self) -> int | None:
        while self.alarms:
            due_ms, name = self.alarms[0]
            demand = self.state.demands.get(name)
            if demand is not None and demand.wake_ms == due_ms:
                return due_ms
            heapq.heappop(self.alarms)
        return None

    def _sweep_alarms(self) -> None:
        """Let go of alarms that an earlier one has overtaken."""
        demands = self.state.demands.items()
        self.alarms = [(d.wake_ms, name) for name, d in demands if d.wake_ms is not None]
        heapq.heapify(self.alarms)

    # ── replicas ─────────────────────────────────────────────────────────────────────────

    def start(self, demand: Demand, placement: Placement) -> None:
        self.replica_count += 1
        replica = Replica(
            id=f"r{self.replica_count}",
            model=demand.model,
            placement=placement,
            phase=Phase.STARTING,
            phase_since_ms=self.state.now_ms,
            last_use_ms=self.state.now_ms,
            why=words.start_reason(demand),
            has_displaced_load=demand.promise is not None and demand.promise.calls_off,
        )
        demand.promise = None  # what it was promised it has
        demand.barrier = Barrier()
        demand.is_crowded = False
        self.add_replica(replica)
        demand.loads += 1
        self.note_missing(demand)
        self.effects.append(Start(replica.id, demand.model.name, placement, replica.why))

    def add_replica(self, replica: Replica) -> None:
        """Book a replica that is started, or that a node says it has."""
        demand = self.state.demand_of(replica)
        self.state.replicas[replica.id] = replica
        demand.replicas[replica.id] = replica
        if demand.model.is_exclusive_while_busy:
            self.state.exclusive[replica.id] = replica
        self.state.ledger.book(replica.id, replica.placement)
        self.state.note_use(replica)
        self.touch(demand)

    def remove_replica(self, replica: Replica, why: str) -> None:
        """Forget a replica that is gone, with all that ran on it; its later `GrantEnded` finds
        nothing: a grant ends once."""
        demand = self.state.demand_of(replica)
        self.owes_no_more(replica)
        del self.state.replicas[replica.id]
        del demand.replicas[replica.id]
        self.state.loose.pop(replica.id, None)
        self.state.exclusive.pop(replica.id, None)
        self.state.closed.discard(replica.id)
        self.state.ledger.release(replica.id, replica.placement)
        for request in replica.grants:
            del self.state.granted[request]
        for lease in list(replica.leases.values()):
            self._forget_lease(replica, lease, why)
        if replica.phase is Phase.READY and not demand.is_served:
            self.turn_cold(demand)
        self.note_missing(demand)
        self.is_room_stale = True
        self.touch(demand)

    def stop(self, replica: Replica, why: str, rival: ModelName | None = None) -> None:
        demand = self.state.demand_of(replica)
        replica.stop_why = why
        self.enter(replica, Phase.STOPPING)
        self.state.ledger.leave(replica.id, replica.placement)
        grace_ms = replica.model.stop_grace_ms
        self.effects.append(Stop(replica.id, replica.model.name, grace_ms, why, rival))
        self.note_missing(demand)
        if not demand.is_served:
            self.turn_cold(demand)
        self.touch(demand)

    def let_end(self, replica: Replica, why: str, stop_by_ms: int | None = None) -> None:
        """Send nobody to a replica any more; what still runs on it may end, until then."""
        demand = self.state.demand_of(replica)
        if not replica.is_busy:
            self.stop(replica, why)
        else:
            replica.stop_why = why
            self.enter(replica, Phase.DRAINING)
            replica.stop_by_ms = stop_by_ms
            self.note_missing(demand)
            if not demand.is_served:
                self.turn_cold(demand)
        self.is_room_stale = True
        self.touch(demand)

    def enter(self, replica: Replica, phase: Phase) -> None:
        replica.phase = phase
        replica.phase_since_ms = self.state.now_ms
        replica.closed_for = None
        self.state.closed.discard(replica.id)
        if phase is not Phase.READY:
            self.owes_no_more(replica)
        self.state.note_use(replica)

    def note_missing(self, demand: Demand) -> None:
        """A `min` that is not met is a demand from the moment it went missing."""
        is_met = sum(1 for _ in demand.live()) >= demand.model.scaling.min
        if is_met or demand.is_held_down or self.state.is_shutting_down:
            demand.missing = None
        elif demand.missing is None:
            demand.missing = (
                max(self.state.now_ms, demand.cooldown_until_ms),
                self.next_order(),
            )

    def next_order(self) -> int:
        self.order_count += 1
        return self.order_count

    def turn_cold(self, demand: Demand) -> None:
        """Those queued on a replica now wait for a load: their wait for it begins here."""
        demand.cold_since_ms = self.state.now_ms
        for entry in demand.waiting:
            entry.met_load = True
        self.review(demand)

    def owes_no_more(self, replica: Replica) -> None:
        """It is not there any more for those it stood for."""
        for entry in self.state.demand_of(replica).told:
            if entry.owed_by == replica.id:
                entry.owed_by = None

    def drop_promise(self, demand: Demand) -> None:
        """Void a promise; what stood closed for it is opened when room is next looked at."""
        self.is_room_stale |= demand.promise is not None
        demand.promise = None
        demand.barrier = Barrier()

    # ── grants and leases ────────────────────────────────────────────────────────────────

    def grant(self, entry: Entry, replica: Replica) -> None:
        self.dequeue(entry)
        replica.grants.add(entry.request)
        self.state.note_use(replica)
        self.state.granted[entry.request] = Granted(
            replica, self.state.now_ms, entry.caller, entry.hold_ms, entry.default_holds_ms
        )
        waited_ms = self.state.now_ms - entry.arrived_ms
        why = "every slot was taken" if waited_ms else ""
        if entry.met_load:
            is_new = entry.arrived_ms <= replica.phase_since_ms
            why = replica.why if is_new else "it stood back for a demand that had waited longer"
        self.effects.append(Grant(entry.request, replica.id, waited_ms, entry.met_load, why))

    def lease(self, replica: Replica, claim: LeaseClaim, caller: str, waited_ms: int = 0) -> None:
        """Claim a replica. An id that is in use changes nothing."""
        if claim.lease in self.state.leases:
            return
        now_ms = self.state.now_ms
        until_ms = now_ms + min(claim.ttl_ms, self.lease_ms_max)
        lease = Lease(
            id=claim.lease,
            replica=replica.id,
            caller=caller,
            reason=claim.reason,
            taken_ms=now_ms,
            until_ms=until_ms,
            last_ms=now_ms + self.lease_ms_max,
        )
        replica.leases[lease.id] = lease
        self.state.leases[lease.id] = lease
        self.state.note_use(replica)
        name = replica.model.name
        self.effects.append(Leased(lease.id, name, replica.id, until_ms, waited_ms))

    def end_lease(self, lease: Lease, why: str) -> None:
        """A claim is over, and with it perhaps the use of its replica."""
        replica = self.state.replicas[lease.replica]
        self._forget_lease(replica, lease, why)
        hold_ms = self.state.demand_of(replica).model.hold_finished_ms
        self.use_ended(replica, lease.caller, hold_ms)

    def _forget_lease(self, replica: Replica, lease: Lease, why: str) -> None:
        del replica.leases[lease.id]
        del self.state.leases[lease.id]
        self.effects.append(LeaseEnded(lease.id, replica.model.name, replica.id, why))

    def use_ended(self, replica: Replica, caller: str, hold_ms: int) -> None:
        """Something that ran on a replica has ended: hold it for who used it, or let it go."""
        demand, now_ms = self.state.demand_of(replica), self.state.now_ms
        replica.last_use_ms = now_ms
        demand.hold_for(caller, now_ms + hold_ms, now_ms)
        self.state.note_use(replica)
        if replica.phase is Phase.DRAINING and not replica.is_busy:
            self.stop(replica, replica.stop_why)
            self.is_room_stale = True
        self.is_room_stale |= not replica.is_busy
        self.touch(demand)

    # ── answers ──────────────────────────────────────────────────────────────────────────

    def refuse(self, request: RequestId, demand: Demand, code: RefusalCode) -> Refusal:
        refusal = words.refusal(self.state, demand, code, request)
        self.effects.append(Refuse(request, refusal))
        return refusal

    def answer_waiting(self, demand: Demand, code: RefusalCode) -> None:
        for entry in list(demand.waiting):
            self.dequeue(entry)
            self.refuse(entry.request, demand, code)

    def give_up(self, demand: Demand, code: RefusalCode) -> None:
        """Answer everyone who wants this model and forget that it was wanted."""
        self.answer_waiting(demand, code)
        demand.told.clear()
        demand.left.clear()
        self.drop_promise(demand)
        self.review(demand)

    def tell(self, demand: Demand, outlook: Outlook | None = None) -> None:
        """Say what a model's callers wait for, when it has changed. Who waits for room is told by
        the walk that changed something about it."""
        if not demand.waiting and demand.missing is None:
            demand.telling = None
            return
        waits_for_room = demand.model.name in self.state.wanting
        if waits_for_room and outlook is None and demand.telling is not None:
            return
        tell = words.reason(self.state, demand, outlook)
        known = demand.telling
        if known is None or (known.kind, known.text) != (tell.kind, tell.text):
            demand.telling = tell
            self.effects.append(tell)

    # ── entries ──────────────────────────────────────────────────────────────────────────

    def enqueue(self, demand: Demand, entry: Entry) -> None:
        entry.presence = Presence.WAITING
        self.is_room_stale |= entry.owed_by is not None  # who was kept for it may leave after it
        entry.owed_by = None
        demand.add(entry)
        demand.slotless += entry.kind is not EntryKind.REQUEST
        demand.review_ms = min(demand.review_ms, self.deadline_ms(demand, entry))
        self.state.waiting[entry.request] = (demand, entry)
        self.state.queue_bytes += entry.body_bytes
        self.touch(demand)

    def dequeue(self, entry: Entry) -> None:
        demand, _ = self.state.waiting.pop(entry.request)
        demand.remove(entry)
        demand.slotless -= entry.kind is not EntryKind.REQUEST
        self.state.queue_bytes -= entry.body_bytes

    def make_absent(self, demand: Demand, entry: Entry, presence: Presence, forget_ms: int) -> None:
        """Keep the place of a caller whose request is not here, for a while."""
        entry.presence = presence
        entry.forget_ms = forget_ms
        self.is_room_stale |= entry.owed_by is not None
        entry.owed_by = None
        self.touch(demand)
        # Bounded like the queue: the latest to go loses its place.
        if len(demand.line(presence)) < demand.model.queue_max:
            demand.add(entry)
            demand.review_ms = min(demand.review_ms, forget_ms)

    def await_return(self, demand: Demand, entry: Entry, refusal: Refusal) -> None:
        """Keep the place of a caller who was told to come back."""
        assert refusal.retry_after_ms is not None, refusal
        entry.back_ms = self.state.now_ms + refusal.retry_after_ms
        self.make_absent(demand, entry, Presence.TOLD, entry.back_ms + FORGET_MS)

    # ── bounds ───────────────────────────────────────────────────────────────────────────

    def serves(self, demand: Demand, entry: Entry) -> bool:
        """Whether a ready replica will take it once a slot is free."""
        ready = [replica for replica in demand.ready() if replica.closed_for is not None]
        if len(ready) < sum(1 for _ in demand.ready()):
            return True
        rank = self.state.entry_rank(demand, entry)
        return any(replica.takes(rank) for replica in ready)

    def deadline_ms(self, demand: Demand, entry: Entry) -> int:
        """Until when a waiting request holds its connection."""
        if self.serves(demand, entry):
            return entry.arrived_ms + entry.queue_wait_ms
        # Both waits may follow one another, but not beyond what the caller can stand.
        last_ms = entry.arrived_ms + max(entry.queue_wait_ms, entry.activation_wait_ms)
        cold_ms = max(entry.arrived_ms, demand.cold_since_ms)
        return min(cold_ms + entry.activation_wait_ms, last_ms)
