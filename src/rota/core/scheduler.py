"""The one state machine that decides everything: facts in, orders out.

`step(event, now_ms)` applies the fact, then settles: it looks at the models the fact touched
and at the demands that want room until nothing changes. It knows no clock, socket, process
or log, so the same events at the same times give the same effects, and every decision can be
replayed and explained. It is total: an event about an id no longer known changes nothing.
A poll loop that compares desired and actual state was refused: it cannot say why.

Order of decision. Written once, here and in `clearing`; the same numbers mark the branches.

    1   unknown                     refuse model_not_found
    2   off                         refuse model_off
    3   failed for good             tried again, refused model_failed when it fails again
    4   failed for now              refuse model_cooling until the cooldown has passed
    5   ready, a slot, no barrier   grant
    6   ready, full                 queue, bounded; past its bound model_busy
    7   starting                    join: one load serves all who wait
    8   room can be had             8a free memory: start
                                    8b idle replicas, least value first: promise, stop them
                                    8c past patience, replicas at work too: barrier
    9   room later                  wait; what for is told
    10  no room whatever ends       refuse no_room
    11  someone else's, silent      refuse no_endpoint

Demands are taken by rank (`state.Rank`): who is past its patience first, then by priority, then
by age. Serving (5) is done for all before room is made (8) for any. Memory promised to a demand
goes to no later one: each decision sees the books less what earlier demands were promised.

This file hears facts and settles; `clearing` makes room; `orders` writes down what is ordered.
What is so is asked elsewhere: who is evicted at `eviction.value`, where a replica goes in
`placement`, who may leave in `room`, the words that users read in `words`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from rota.core import room, words
from rota.core.changes import (
    change_models,
    forget_removed,
    new_demand,
    retire,
    unknown_model,
)
from rota.core.clearing import COOLDOWN_MS_MAX, COOLDOWN_MS_MIN, Clearing
from rota.core.coexistence import FREE, Coexistence
from rota.core.describe import snapshot
from rota.core.effects import Effect, Loaded, RefusalCode, Refuse
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LeaseReleased,
    LeaseRenewed,
    LoadAsked,
    ModelsChanged,
    NodeJoined,
    NodeLost,
    Outcome,
    PinAsked,
    ReplicaReady,
    ReplicaSilent,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    Running,
    ShutdownAsked,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.orders import FORGET_MS, NEVER_MS, Orders
from rota.core.state import (
    Demand,
    Entry,
    EntryKind,
    Failure,
    Granted,
    Presence,
    Rank,
    Replica,
    State,
)
from rota.core.types import Eviction, LeaseClaim, Model, Phase, ReplicaId, RequestId, Rules

OWED_MS = 10_000
"""A ready replica stands for a caller this long after it should have been back."""
HOLD_MS_MAX = 300_000
"""A caller may keep a model for its next request no longer than this at a time."""
UNREACHABLE_MS = 60_000
"""What still runs on a replica that takes no connection has this long to end."""
LEASE_MS_MAX = 3_600_000
"""A lease lasts no longer than this, renewals included."""

Ask = RequestArrived | LoadAsked | LeaseAsked
"""What is answered under its own id."""


class Scheduler:
    """Decides who is loaded, who leaves, who is served and who is told to come back.

    Args:
        models: the catalog, in the order of the file.
        queue_bytes_max: request bodies held in memory while they wait, over all models.
        hold_ms_max: the longest hold that a caller can ask for.
        lease_ms_max: how long a lease may last, renewals included.
        replica_count: how many replicas an earlier scheduler of this run has started: no id is
            used again.
        coexistence: which models may stand together.
        rules: for simulations, which switch one off to show what it is for.
        eviction: what decides who makes room, among those who may.
    """

    def __init__(
        self,
        models: Iterable[Model],
        *,
        queue_bytes_max: int = 512 * 1024 * 1024,
        hold_ms_max: int = HOLD_MS_MAX,
        lease_ms_max: int = LEASE_MS_MAX,
        replica_count: int = 0,
        coexistence: Coexistence = FREE,
        rules: Rules | None = None,
        eviction: Eviction = Eviction.VALUE,
    ) -> None:
        demands = [new_demand(model) for model in models]
        by_name = {demand.model.name: demand for demand in demands}
        assert len(by_name) == len(demands), "two models of one name"
        self.state = State(by_name, rules or Rules(), coexistence, eviction)
        for demand in demands:
            self.state.note_kept(demand)
        self.queue_bytes_max = queue_bytes_max
        self.hold_ms_max = hold_ms_max
        self.orders = Orders(self.state, lease_ms_max, replica_count)
        self._clearing = Clearing(self.orders)

    # ── the surface ──────────────────────────────────────────────────────────────────────

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Take a fact in, give the orders that follow from it.

        Args:
            now_ms: when it happened; never earlier than the last one.
        """
        assert now_ms >= self.state.now_ms, (now_ms, self.state.now_ms)
        self.state.now_ms = now_ms
        self.orders.effects = []
        self._apply(event)
        self._settle()
        return self.orders.effects

    def next_wake_ms(self) -> int | None:
        """When to send `TimePassed` if nothing else happens; None = no need."""
        return self.orders.next_wake_ms()

    def snapshot(self) -> dict[str, object]:
        """Everything users may see of the state, as plain values for JSON."""
        return snapshot(self.state)

    # ── facts ────────────────────────────────────────────────────────────────────────────

    def _apply(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._arrived(event)
            case RequestCancelled():
                self._cancelled(event.request)
            case GrantEnded():
                self._grant_ended(event)
            case LeaseAsked():
                self._lease_asked(event)
            case LeaseRenewed() | LeaseReleased():
                self._lease_changed(event)
            case ReplicaReady():
                self._ready(event.replica)
            case ReplicaStopped():
                self._stopped(event)
            case ReplicaSilent():
                self._silent(event)
            case NodeJoined():
                self._joined(event)
            case NodeLost():
                self._lost(event)
            case LoadAsked():
                self._load_asked(event)
            case PinAsked():
                self._pin_asked(event)
            case UnloadAsked():
                self._unload_asked(event)
            case ModelsChanged():
                self._models_changed(event)
            case ShutdownAsked():
                self.state.is_shutting_down = True
                for demand in self.state.demands.values():
                    self._take_down(demand, RefusalCode.SHUTTING_DOWN, event.grace_ms)
            case TimePassed():
                pass
            case _:
                assert_never(event)

    # requests

    def _arrived(self, event: RequestArrived) -> None:
        demand = self._admit(event)
        if demand is None:
            return
        returning = demand.take_returning(event.caller, event.mark)
        entry = returning or self._new_entry(event, demand)
        code = self._has_no_place(demand, entry, event)
        if code is not None:  # 6
            refusal = self.orders.refuse(event.request, demand, code)
            if returning is not None:  # it keeps its place in line
                self.orders.await_return(demand, returning, refusal)
            return
        self._take_in(demand, entry, event)
        entry.body_bytes = event.body_bytes
        entry.queue_wait_ms = _own_or(event.queue_wait_ms, demand.model.queue_wait_ms)
        entry.hold_ms = event.hold_ms
        entry.default_holds_ms = event.default_holds_ms
        entry.patience_ms = event.patience_ms
        self.orders.enqueue(demand, entry)

    def _load_asked(self, event: LoadAsked) -> None:
        demand = self._admit(event)
        if demand is None:
            return
        if demand.slotless >= words.SLOTLESS_MAX:
            self.orders.refuse(event.request, demand, RefusalCode.QUEUE_FULL)
            return
        entry = self._new_entry(event, demand)
        entry.activation_wait_ms = entry.queue_wait_ms = NEVER_MS
        self.orders.enqueue(demand, entry)

    def _take_in(self, demand: Demand, entry: Entry, event: RequestArrived | LeaseAsked) -> None:
        """What is said of every arrival, also of one that finds its old place again."""
        entry.kind = _kind(event)
        entry.claim, entry.on_replica, entry.starts = None, None, True
        entry.request = event.request
        if event.priority is not None:
            entry.priority = event.priority
        entry.arrived_ms = self.state.now_ms
        entry.activation_wait_ms = _own_or(
            event.activation_wait_ms, demand.model.activation_wait_ms
        )
        entry.met_load = not self.orders.serves(demand, entry)

    def _admit(self, event: Ask) -> Demand | None:
        """Answer at once what can be answered at once (1, 2, 3, 4).

        What failed for good is looked at again, in case it was mended (3); so is an endpoint,
        where a try costs nothing (11), and whatever a person asks for.
        """
        state, request, name = self.state, event.request, event.model
        is_by_hand = isinstance(event, LoadAsked)
        if request in state.waiting or request in state.granted or request in state.leases:
            return None  # a repeated event changes nothing
        demand = state.demands.get(name)
        if demand is None or demand.is_removed:  # 1
            self.orders.effects.append(Refuse(request, words.not_found(name)))
            return None
        code: RefusalCode | None = None
        if state.is_shutting_down:
            code = RefusalCode.SHUTTING_DOWN
        elif demand.model.scaling.is_off:  # 2
            code = RefusalCode.MODEL_OFF
        elif isinstance(event, LeaseAsked) and not self._may_lease(demand, event):
            code = RefusalCode.NOT_LOADED
        elif event.obstacle and not demand.is_up:  # 3: nobody is evicted for a hopeless load
            demand.failure = Failure(StopCause.REFUSED, event.obstacle, is_permanent=True)
            code = RefusalCode.MODEL_FAILED
        elif demand.is_cooling(state.now_ms) and (is_by_hand or not demand.is_up):
            assert demand.failure is not None, name
            if is_by_hand or demand.failure.is_permanent or demand.model.is_external:
                demand.cooldown_until_ms = state.now_ms
            else:  # 4
                code = RefusalCode.MODEL_COOLING
        if code is not None:
            self.orders.refuse(request, demand, code)
            return None
        if is_by_hand:
            demand.failures = 0  # a person thinks that it will do now
        demand.is_held_down = False
        self.orders.note_missing(demand)
        self.orders.touch(demand)
        return demand

    def _has_no_place(
        self, demand: Demand, entry: Entry, event: RequestArrived
    ) -> RefusalCode | None:
        """6: whether it can neither be served now nor wait."""
        if self._slot_for(demand, entry) is not None:
            return None
        if demand.model.rejects_when_full and self.orders.serves(demand, entry):
            return RefusalCode.MODEL_BUSY
        held_bytes = self.state.queue_bytes + event.body_bytes
        is_full = len(demand.waiting) - demand.slotless >= demand.model.queue_max
        return RefusalCode.QUEUE_FULL if is_full or held_bytes > self.queue_bytes_max else None

    def _new_entry(self, event: Ask, demand: Demand) -> Entry:
        demand.history.note(self.state.now_ms)  # who comes back wants nothing new
        return Entry(
            kind=_kind(event),
            caller="" if isinstance(event, LoadAsked) else event.caller,
            since_ms=self.state.now_ms,
            order=self.orders.next_order(),
            request=event.request,
            arrived_ms=self.state.now_ms,
            mark=0 if isinstance(event, LoadAsked) else event.mark,
            priority=demand.model.priority,
        )

    def _cancelled(self, request: RequestId) -> None:
        if request in self.state.granted:
            self._grant_ended(GrantEnded(request, Outcome.CANCELLED))
        elif request in self.state.leases:
            self.orders.end_lease(self.state.leases[request], "its caller left")
        elif request in self.state.waiting:
            demand, entry = self.state.waiting[request]
            self.orders.dequeue(entry)
            self.orders.touch(demand)
            if entry.kind is EntryKind.REQUEST:
                forget_ms = self.state.now_ms + FORGET_MS
                self.orders.make_absent(demand, entry, Presence.LEFT, forget_ms)

    def _grant_ended(self, event: GrantEnded) -> None:
        granted, outcome = self.state.granted.pop(event.request, None), event.outcome
        if granted is None:
            return
        replica = granted.replica
        demand = self.state.demand_of(replica)
        replica.grants.discard(event.request)
        if event.lease is not None and not replica.is_leaving:
            self.orders.lease(replica, event.lease, granted.caller)
        if outcome is Outcome.OK:
            replica.has_served = True
            demand.failures = 0
            demand.serve_ms = _smooth(demand.serve_ms, self.state.now_ms - granted.since_ms)
        hold_ms = min(_hold_ms(demand.model, granted, event), self.hold_ms_max)
        self.orders.use_ended(replica, granted.caller, hold_ms)
        if outcome is Outcome.UNREACHABLE and replica.phase is Phase.READY:
            # Alive perhaps, and of no use to anyone new.
            stop_by_ms = self.state.now_ms + UNREACHABLE_MS
            self.orders.let_end(replica, "it cannot be reached", stop_by_ms)

    # leases

    def _lease_asked(self, event: LeaseAsked) -> None:
        demand = self._admit(event)
        if demand is None:
            return
        if demand.slotless >= words.SLOTLESS_MAX:
            self.orders.refuse(event.lease, demand, RefusalCode.QUEUE_FULL)
            return
        entry = demand.take_returning(event.caller, event.mark) or self._new_entry(event, demand)
        self._take_in(demand, entry, event)
        entry.body_bytes, entry.queue_wait_ms = 0, entry.activation_wait_ms
        entry.claim = LeaseClaim(event.lease, event.ttl_ms, event.reason)
        entry.on_replica = event.replica
        entry.starts = event.load and event.replica is None
        self.orders.enqueue(demand, entry)

    def _may_lease(self, demand: Demand, event: LeaseAsked) -> bool:
        """Whether there is a replica to claim, or one may be brought up for it."""
        if event.replica is not None:
            return self._is_ready(event.replica)
        return event.load or demand.is_served

    def _lease_changed(self, event: LeaseRenewed | LeaseReleased) -> None:
        lease = self.state.leases.get(event.lease)
        if lease is None:
            return
        if isinstance(event, LeaseReleased):
            self.orders.end_lease(lease, "released")
        else:
            lease.until_ms = min(self.state.now_ms + event.ttl_ms, lease.last_ms)
            self.orders.touch(self.state.demand_of(self.state.replicas[lease.replica]))

    def _expire_leases(self, demand: Demand) -> None:
        now_ms = self.state.now_ms
        for replica in list(demand.replicas.values()):
            for lease in [lease for lease in replica.leases.values() if lease.until_ms <= now_ms]:
                self.orders.end_lease(lease, "expired")

    # replicas and nodes

    def _ready(self, replica_id: ReplicaId) -> None:
        replica = self.state.replicas.get(replica_id)
        if replica is None or replica.phase is not Phase.STARTING:
            return
        demand = self.state.demand_of(replica)
        demand.load_ms = _smooth(demand.load_ms, self.state.now_ms - replica.phase_since_ms)
        self.orders.enter(replica, Phase.READY)
        replica.last_use_ms = self.state.now_ms
        if not demand.is_cooling(self.state.now_ms):
            demand.failure = None  # it came up: what went wrong before is over
        if self.state.rules.residence:
            residence_ms = min(demand.load_ms, demand.model.patience_ms // 2)
            replica.resident_until_ms = self.state.now_ms + residence_ms
        self._came_up(replica)

    def _came_up(self, replica: Replica) -> None:
        """A replica serves from now on: it stands for those who were told to come back, and who
        waits for a load now waits for a slot."""
        demand = self.state.demand_of(replica)
        demand.has_been_up = True
        for entry in demand.told:
            if entry.owed_by is None and self.state.rules.owed:
                entry.owed_by = replica.id
        self.orders.review(demand)
        self.orders.is_room_stale = True

    def _stopped(self, event: ReplicaStopped) -> None:
        replica = self.state.replicas.get(event.replica)
        if replica is None:
            return
        demand = self.state.demand_of(replica)
        self.orders.remove_replica(replica, f"its replica is gone ({event.cause.value})")
        is_unloaded = replica.phase is Phase.DRAINING and demand.is_held_down
        was_asked = replica.phase is Phase.STOPPING or is_unloaded
        if not was_asked and event.cause is not StopCause.ASKED:
            self._failed(demand, replica, Failure(event.cause, event.detail, event.permanent))

    def _silent(self, event: ReplicaSilent) -> None:
        """One that answers nothing is ended and replaced; what runs on it would never end."""
        replica = self.state.replicas.get(event.replica)
        if replica is None or replica.phase not in (Phase.READY, Phase.DRAINING):
            return
        is_replaced = replica.phase is Phase.READY
        self._end(replica, "it runs and answers nothing")
        if is_replaced:
            failure = Failure(StopCause.SILENT, event.detail, is_permanent=False)
            self._failed(self.state.demand_of(replica), replica, failure)

    def _end(self, replica: Replica, why: str) -> None:
        """End a replica for a reason of its own."""
        self.orders.stop(replica, why)
        self.orders.is_room_stale = True

    def _failed(self, demand: Demand, replica: Replica, failure: Failure) -> None:
        """Cool down after a failure, and answer those who waited for it (3, 4, 11).

        One that has served well and dies is brought up again at once: only an end before
        any good answer says that the next try is likely to fail too.
        """
        demand.failure = failure
        if replica.has_served:
            return
        demand.failures += 1
        pause_ms = min(COOLDOWN_MS_MIN * 2 ** min(demand.failures - 1, 10), COOLDOWN_MS_MAX)
        demand.cooldown_until_ms = self.state.now_ms + pause_ms
        if demand.missing is not None:
            demand.missing = (demand.cooldown_until_ms, demand.missing[1])
        if demand.is_up:
            return
        if demand.model.is_external:  # 11
            self.orders.give_up(demand, RefusalCode.NO_ENDPOINT)
        elif failure.is_permanent:
            self.orders.give_up(demand, RefusalCode.MODEL_FAILED)
        else:
            self.orders.answer_waiting(demand, RefusalCode.MODEL_COOLING)
            for absent in (demand.told, demand.left):  # a crash loop grows no older than its rivals
                for entry in list(absent):
                    absent.remove(entry)
                    entry.since_ms = max(entry.since_ms, demand.cooldown_until_ms)
                    absent.add(entry)
        self.orders.review(demand)

    def _joined(self, event: NodeJoined) -> None:
        self.state.ledger.join(event.node, event.devices)
        self.state.lost.discard(event.node)
        for running in event.running:
            self._adopt(running)
        for name, demand in self.state.demands.items():
            if demand.model.scaling.is_always:
                self.orders.note_missing(demand)
            is_wanting = name in self.state.wanting or name in self.state.preloads
            if demand.missing is not None or is_wanting:
                self.orders.touch(demand)
        self.orders.is_room_stale = True

    def _adopt(self, running: Running) -> None:
        """Take over a replica that a node says it has; what is too many there leaves again."""
        if running.replica in self.state.replicas:
            return
        demand = self.state.demands.get(running.model)
        if demand is None:
            demand = new_demand(unknown_model(running.model))
            demand.is_removed = True
            self.state.demands[running.model] = demand
        replica = Replica(
            id=running.replica,
            model=demand.model,
            placement=running.placement,
            phase=running.phase,
            phase_since_ms=self.state.now_ms,
            last_use_ms=self.state.now_ms,
            why=f"{demand.model.name} was running already",
            has_served=running.phase is Phase.READY,
        )
        self.orders.add_replica(replica)
        if running.phase is Phase.STOPPING:
            self.state.ledger.leave(replica.id, replica.placement)
        for request in running.grants:
            replica.grants.add(request)
            self.state.granted[request] = Granted(replica, self.state.now_ms, "")
        for claim in running.leases:
            self.orders.lease(replica, claim, "")
        self.state.note_use(replica)
        if replica.phase is Phase.READY:
            self._came_up(replica)
        retire(self.orders, demand)
        if self.state.is_shutting_down and replica.is_live:
            self._end(replica, "rota is ending")

    def _lost(self, event: NodeLost) -> None:
        """What ran on a machine that is gone serves nobody; that is no failure of its models."""
        if event.node not in self.state.ledger.totals:
            return
        for replica in list(self.state.replicas.values()):
            if replica.placement.node == event.node:
                self.orders.remove_replica(replica, f"node {event.node} was lost")
        for demand in self.state.demands.values():
            if demand.promise is not None and demand.promise.placement.node == event.node:
                self.orders.drop_promise(demand)
        self.state.ledger.leave_node(event.node)
        self.state.lost.add(event.node)
        self.orders.is_room_stale = True

    # by hand

    def _models_changed(self, event: ModelsChanged) -> None:
        change_models(self.orders, event)
        self.queue_bytes_max = _own_or(event.queue_bytes_max, self.queue_bytes_max)
        self.hold_ms_max = _own_or(event.hold_ms_max, self.hold_ms_max)
        self.orders.lease_ms_max = _own_or(event.lease_ms_max, self.orders.lease_ms_max)

    def _pin_asked(self, event: PinAsked) -> None:
        demand = self.state.demands.get(event.model)
        if demand is None or demand.is_removed:
            return
        if demand.is_pinned != event.is_pinned:
            demand.is_pinned = event.is_pinned
            self.state.note_kept(demand)
            self.orders.is_room_stale = True
            self.orders.touch(demand)

    def _unload_asked(self, event: UnloadAsked) -> None:
        names = list(self.state.demands) if event.model is None else [event.model]
        for name in names:
            if name in self.state.demands:
                demand = self.state.demands[name]
                self._take_down(demand, RefusalCode.MODEL_UNLOADED, event.grace_ms)

    def _take_down(self, demand: Demand, code: RefusalCode, grace_ms: int) -> None:
        """Answer a model's waiting, let its running end within the grace, and stop it."""
        self.orders.give_up(demand, code)
        demand.is_held_down = True
        demand.missing = None
        self.orders.is_room_stale = True  # what `min` kept is on its way out
        is_by_hand = code is RefusalCode.MODEL_UNLOADED
        for replica in [r for r in demand.replicas.values() if not r.is_leaving]:
            replica.stop_why = "unloaded by hand" if is_by_hand else "rota is ending"
            if replica.is_busy and grace_ms > 0:
                stop_by_ms = self.state.now_ms + grace_ms
                if replica.phase is Phase.DRAINING and replica.stop_by_ms is not None:
                    stop_by_ms = min(stop_by_ms, replica.stop_by_ms)
                self.orders.enter(replica, Phase.DRAINING)
                replica.stop_by_ms = stop_by_ms
            else:
                self.orders.stop(replica, replica.stop_why)

    # ── settling ─────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Look at what was touched or is due until nothing changes."""
        orders = self.orders
        orders.touch_due()
        while orders.touched:
            touched, orders.touched = orders.touched, {}
            demands = [self.state.demands[name] for name in touched]
            for demand in demands:
                self._serve(demand)
            for demand in demands:
                self._look(demand)
            if orders.is_room_stale:
                orders.is_room_stale = False
                self._clearing.walk()
            for demand in demands:
                self._answer_late(demand)
                orders.tell(demand)
                self._set_wake(demand)
        forget_removed(self.orders)

    def _serve(self, demand: Demand) -> None:
        """5, 7: serve those who wait, by rank, as long as there are slots."""
        if not demand.waiting:
            return
        if demand.slotless:
            self._serve_slotless(demand)
        if not demand.is_served:
            return
        while (entry := self.state.next_waiting(demand)) is not None:
            replica = self._slot_for(demand, entry)
            if replica is None:
                break
            self.orders.grant(entry, replica)

    def _serve_slotless(self, demand: Demand) -> None:
        """Answer loads that were asked for by hand, and leases; neither takes a slot."""
        for entry in [e for e in demand.waiting if e.kind is not EntryKind.REQUEST]:
            open_to = [r for r in demand.ready() if self._takes(demand, r, entry)]
            if entry.kind is EntryKind.LOAD:
                ready = next(demand.ready(), None)
                if ready is not None:
                    self.orders.dequeue(entry)
                    self.orders.effects.append(Loaded(entry.request, ready.id))
            elif open_to:
                assert entry.claim is not None, entry
                self.orders.dequeue(entry)
                waited_ms = self.state.now_ms - entry.arrived_ms
                least_busy = min(open_to, key=lambda replica: len(replica.grants))
                self.orders.lease(least_busy, entry.claim, entry.caller, waited_ms)
            elif not entry.starts and not self._may_become_open(demand, entry):
                self.orders.dequeue(entry)
                self.orders.refuse(entry.request, demand, RefusalCode.NOT_LOADED)

    def _takes(self, demand: Demand, replica: Replica, entry: Entry) -> bool:
        is_its_own = entry.on_replica in (None, replica.id)
        return is_its_own and replica.takes(self.state.entry_rank(demand, entry))

    def _may_become_open(self, demand: Demand, entry: Entry) -> bool:
        """Whether what a lease claims is ready, only behind a barrier now."""
        if entry.on_replica is None:
            return demand.is_served
        return self._is_ready(entry.on_replica)

    def _is_ready(self, replica_id: ReplicaId) -> bool:
        replica = self.state.replicas.get(replica_id)
        return replica is not None and replica.phase is Phase.READY

    def _slot_for(self, demand: Demand, entry: Entry) -> Replica | None:
        """The replica that would serve this entry now: the least busy, then the oldest."""
        able = [r for r in demand.replicas.values() if r.has_slot]
        if any(replica.closed_for is not None for replica in able):
            rank = self.state.entry_rank(demand, entry)
            able = [replica for replica in able if replica.takes(rank)]
        return min(able, key=lambda replica: len(replica.grants), default=None)

    def _look(self, demand: Demand) -> None:
        """Do what is due at one model, and see whether it wants a replica."""
        if demand.review_ms <= self.state.now_ms:
            self._forget(demand)
        if self.state.leases:
            self._expire_leases(demand)
        self._step_down(demand)
        if demand.is_loading and demand.is_loaded_for_nobody:
            self.orders.is_room_stale = True  # it may be called off
        state, name = self.state, demand.model.name
        more_ms = demand.crowded_from_ms()
        demand.is_crowded = more_ms is not None and more_ms <= state.now_ms
        wants = demand.replicas_wanted() > 0 and not demand.is_cooling(state.now_ms)
        rank: Rank | None = state.rank(demand) if wants else None
        if rank is not None:
            self.orders.is_room_stale |= state.wanting.get(name) != rank
            state.wanting[name] = rank
        elif name in state.wanting:
            del state.wanting[name]
            self.orders.drop_promise(demand)
            self.orders.is_room_stale |= bool(state.preloads)  # nobody may be waiting any more

    def _forget(self, demand: Demand) -> None:
        """Let go of absent callers whose time is over."""
        now_ms = self.state.now_ms
        for entry in [e for e in demand.told if e.owed_by and e.back_ms + OWED_MS <= now_ms]:
            demand.remove(entry)  # its turn came and it was not there: it starts nothing more
            self.orders.make_absent(demand, entry, Presence.LEFT, entry.forget_ms)
        for line in (demand.told, demand.left):
            for entry in [entry for entry in line if entry.forget_ms <= now_ms]:
                line.remove(entry)

    def _answer_late(self, demand: Demand) -> None:
        """Answer those who have waited as long as they may, after all was done for them."""
        now_ms, deadline_ms = self.state.now_ms, self.orders.deadline_ms
        if demand.review_ms > now_ms:
            return
        for entry in [e for e in demand.waiting if deadline_ms(demand, e) <= now_ms]:
            self._tell_to_return(demand, entry)
        times = [deadline_ms(demand, entry) for entry in demand.waiting]
        times += [entry.back_ms + OWED_MS for entry in demand.told if entry.owed_by]
        times += [entry.forget_ms for entry in (*demand.told, *demand.left)]
        demand.review_ms = min(times, default=NEVER_MS)

    def _tell_to_return(self, demand: Demand, entry: Entry) -> None:
        """Past its wait: the connection is let go, the demand stands."""
        if self.orders.serves(demand, entry):
            code = RefusalCode.MODEL_BUSY
        elif demand.is_loading:
            code = RefusalCode.MODEL_LOADING
        else:
            code = RefusalCode.MODEL_WAITING
        refusal = self.orders.refuse(entry.request, demand, code)
        self.orders.dequeue(entry)
        if entry.starts:
            self.orders.await_return(demand, entry, refusal)
        else:
            self.orders.touch(demand)

    def _step_down(self, demand: Demand) -> None:
        """Stop what has been idle too long, and what has drained long enough."""
        # The latest first: requests go to the oldest, so that the others can leave.
        spare = sum(1 for _ in demand.ready()) - demand.stays_min
        for replica in reversed(list(demand.replicas.values())):
            due_ms = self._leaves_ms(demand, replica)
            if due_ms is None or due_ms > self.state.now_ms:
                continue
            if replica.phase is Phase.DRAINING:
                self._end(replica, replica.stop_why)
            elif spare > 0:
                spare -= 1
                timeout_s = demand.model.scaling.idle_timeout_ms / 1_000
                self._end(replica, f"not used for {timeout_s:g} s")

    def _leaves_ms(self, demand: Demand, replica: Replica) -> int | None:
        """When a replica ends if nothing happens; None = it does not."""
        if replica.phase is Phase.DRAINING:
            return replica.stop_by_ms
        timeout_ms = demand.model.scaling.idle_timeout_ms
        if timeout_ms == 0 or not replica.is_idle or demand.is_pinned:
            return None
        if demand.waiting or demand.told:
            return None
        return max(replica.last_use_ms + timeout_ms, demand.held_until_ms)

    def _set_wake(self, demand: Demand) -> None:
        """Keep the time at which this model is to be looked at though nothing happens."""
        times = [demand.review_ms, demand.cooldown_until_ms, demand.held_until_ms]
        for replica in demand.replicas.values():
            times += [self._leaves_ms(demand, replica) or 0, replica.resident_until_ms]
            times += [lease.until_ms for lease in replica.leases.values()]
            if replica.phase is Phase.STARTING:
                times.append(room.overdue_ms(self.state, replica))
        times.append(demand.crowded_from_ms() or 0)
        times += [demand.honours_holds_until_ms() or 0, demand.patience_ends_ms() or 0]
        next_up = demand.waiting if demand.is_barred else demand.waiting.heads()
        times += [demand.entry_patience_ends_ms(entry) for entry in next_up]
        if demand.promise is not None and demand.promise.is_barrier:
            barrier = demand.barrier
            times += [barrier.open_until_ms, 0 if barrier.closed_ms is None else barrier.opens_ms]
        now_ms = self.state.now_ms
        wake_ms = min((time for time in times if now_ms < time < NEVER_MS), default=None)
        if wake_ms is not None:
            self.orders.wake_at(demand, wake_ms)


def _kind(event: Ask) -> EntryKind:
    match event:
        case RequestArrived():
            return EntryKind.REQUEST
        case LoadAsked():
            return EntryKind.LOAD
        case LeaseAsked():
            return EntryKind.LEASE
        case _:
            assert_never(event)


def _own_or(own_ms: int | None, default_ms: int) -> int:
    return default_ms if own_ms is None else own_ms


def _hold_ms(model: Model, granted: Granted, event: GrantEnded) -> int:
    """How long the model is kept for this caller's next request: as it said itself, else by
    how its answer ended. Who left, or found nobody, is not expected back."""
    if granted.hold_ms is not None:
        return granted.hold_ms
    if event.outcome in (Outcome.CANCELLED, Outcome.UNREACHABLE):
        return 0
    after_call_ms, finished_ms = granted.default_holds_ms
    if event.is_tool_call:
        return _own_or(after_call_ms, model.hold_ms)
    return _own_or(finished_ms, model.hold_finished_ms)


def _smooth(known_ms: int | None, seen_ms: int) -> int:
    """A running mean that trusts the latest as much as all before it."""
    return seen_ms if known_ms is None else (known_ms + seen_ms) // 2
