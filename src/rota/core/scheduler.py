"""The one state machine that decides everything: facts in, orders out.

`step(event, now_ms)` applies the fact, then settles: it looks at the models the fact touched
and at the demands that want room until nothing changes. It knows no clock, socket, process
or log, so the same events at the same times give the same effects, and every decision can be
replayed and explained. It is total: an event about an id no longer known changes nothing.
A poll loop that compares desired and actual state was refused: it cannot say why.

Order of decision. Written once, here; the same numbers mark the branches below.

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

Demands are taken by rank: the oldest `since` first. Serving (5) is done for all before room
is made (8) for any. Memory promised to a demand goes to no later one: each decision sees the
books less what earlier demands were promised.

What is so is asked elsewhere: who is evicted at `eviction.value`, where a replica goes in
`placement`, who may leave in `room`, the words that users read in `words`. What is done
about it is here and nowhere else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import assert_never

from rota.core import room, words
from rota.core.describe import snapshot
from rota.core.effects import Effect, Grant, Loaded, Refusal, RefusalCode, Refuse, Start, Stop
from rota.core.events import (
    Event,
    GrantEnded,
    LoadAsked,
    NodeJoined,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    ShutdownAsked,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.eviction import Plan
from rota.core.room import Outlook
from rota.core.state import (
    Demand,
    Entry,
    EntryKind,
    Failure,
    Granted,
    Presence,
    Promise,
    Rank,
    Replica,
    State,
)
from rota.core.types import Model, ModelName, Phase, Placement, ReplicaId, RequestId

FORGET_MS = 30_000
"""An absent caller keeps its place this long after it left, or should have been back."""
OWED_MS = 10_000
"""A ready replica stands for a caller this long after it should have been back."""
COOLDOWN_MS_MIN = 5_000
COOLDOWN_MS_MAX = 300_000
"""The pause after a failure; it doubles with each one from the first bound to the second."""
NEVER_MS = 2**62
HOLD_MS_MAX = 300_000
"""A caller may keep a model for its next request no longer than this at a time."""
ALARMS_PER_MODEL = 8
"""So many kept alarms per model are swept: callers with little time leave one each."""


class Scheduler:
    """Decides who is loaded, who leaves, who is served and who is told to come back.

    Args:
        models: the catalog, in the order of the file.
        queue_bytes_max: request bodies held in memory while they wait, over all models.
        hold_ms_max: the longest hold that a caller can ask for.
    """

    def __init__(
        self,
        models: Iterable[Model],
        *,
        queue_bytes_max: int = 512 * 1024 * 1024,
        hold_ms_max: int = HOLD_MS_MAX,
    ) -> None:
        demands = [Demand(model=model, load_ms=model.load_ms) for model in models]
        self.state = State({demand.model.name: demand for demand in demands})
        assert len(self.state.demands) == len(demands), "two models of one name"
        self.queue_bytes_max = queue_bytes_max
        self.hold_ms_max = hold_ms_max
        self._replica_count = 0
        self._entry_count = 0
        self._effects: list[Effect] = []
        self._touched: dict[ModelName, None] = {}
        self._is_room_stale = True
        self._alarms: list[tuple[int, ModelName]] = []
        self._closed: set[ReplicaId] = set()

    # ── the surface ──────────────────────────────────────────────────────────────────────

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Take a fact in, give the orders that follow from it.

        Args:
            now_ms: when it happened; never earlier than the last one.
        """
        assert now_ms >= self.state.now_ms, (now_ms, self.state.now_ms)
        self.state.now_ms = now_ms
        self._effects = []
        self._apply(event)
        self._settle()
        return self._effects

    def next_wake_ms(self) -> int | None:
        """When to send `TimePassed` if nothing else happens; None = no need."""
        while self._alarms:
            due_ms, name = self._alarms[0]
            if self.state.demands[name].wake_ms == due_ms:
                return due_ms
            heapq.heappop(self._alarms)
        return None

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
            case ReplicaReady():
                self._ready(event.replica)
            case ReplicaStopped():
                self._stopped(event)
            case NodeJoined():
                self._joined(event)
            case LoadAsked():
                self._load_asked(event)
            case UnloadAsked():
                self._unload_asked(event)
            case ShutdownAsked():
                self.state.is_shutting_down = True
                for demand in self.state.demands.values():
                    self._take_down(demand, RefusalCode.SHUTTING_DOWN, event.grace_ms)
            case TimePassed():
                pass
            case _:
                assert_never(event)

    def _arrived(self, event: RequestArrived) -> None:
        demand = self._admit(event)
        if demand is None:
            return
        returning = demand.take_returning(event.caller)
        entry = returning or self._new_entry(EntryKind.REQUEST, event)
        if self._is_queue_full(demand, event) and self._slot_for(demand, entry) is None:  # 6
            refusal = self._refuse(event.request, demand, RefusalCode.QUEUE_FULL)
            if returning is not None:  # it keeps its place in line
                self._await_return(demand, returning, refusal)
            return
        entry.request = event.request
        entry.arrived_ms = self.state.now_ms
        entry.body_bytes = event.body_bytes
        entry.activation_wait_ms = _own_or(
            event.activation_wait_ms, demand.model.activation_wait_ms
        )
        entry.queue_wait_ms = _own_or(event.queue_wait_ms, demand.model.queue_wait_ms)
        entry.hold_ms = event.hold_ms
        entry.patience_ms = event.patience_ms
        entry.met_load = not self._serves(demand, entry)
        self._enqueue(demand, entry)

    def _load_asked(self, event: LoadAsked) -> None:
        demand = self._admit(event)
        if demand is not None:
            entry = self._new_entry(EntryKind.LOAD, event)
            entry.activation_wait_ms = entry.queue_wait_ms = NEVER_MS
            self._enqueue(demand, entry)

    def _admit(self, event: RequestArrived | LoadAsked) -> Demand | None:
        """Answer at once what can be answered at once (1, 2, 3, 4).

        What failed for good is looked at again, in case it was mended (3); so is an endpoint,
        where a try costs nothing (11), and whatever a person asks for.
        """
        state, request, name = self.state, event.request, event.model
        is_by_hand = isinstance(event, LoadAsked)
        if request in state.waiting or request in state.granted:
            return None  # a repeated event changes nothing
        demand = state.demands.get(name)
        if demand is None:  # 1
            self._effects.append(Refuse(request, words.not_found(name)))
            return None
        code: RefusalCode | None = None
        if state.is_shutting_down:
            code = RefusalCode.SHUTTING_DOWN
        elif demand.model.scaling.is_off:  # 2
            code = RefusalCode.MODEL_OFF
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
            self._refuse(request, demand, code)
            return None
        demand.is_held_down = False
        self._note_missing(demand)
        self._touch(demand)
        return demand

    def _cancelled(self, request: RequestId) -> None:
        if request in self.state.granted:
            self._grant_ended(GrantEnded(request, Outcome.CANCELLED))
        elif request in self.state.waiting:
            demand, entry = self.state.waiting[request]
            self._dequeue(entry)
            self._touch(demand)
            if entry.kind is EntryKind.REQUEST:
                self._make_absent(demand, entry, Presence.LEFT, self.state.now_ms + FORGET_MS)

    def _grant_ended(self, event: GrantEnded) -> None:
        granted, outcome = self.state.granted.pop(event.request, None), event.outcome
        if granted is None:
            return
        replica = granted.replica
        demand = self.state.demand_of(replica)
        replica.grants.discard(event.request)
        replica.last_use_ms = self.state.now_ms
        hold_ms = min(_hold_ms(demand.model, granted, event), self.hold_ms_max)
        demand.hold_for(granted.caller, self.state.now_ms + hold_ms, self.state.now_ms)
        if outcome is Outcome.OK:
            replica.has_served = True
            demand.failures = 0
            demand.serve_ms = _smooth(demand.serve_ms, self.state.now_ms - granted.since_ms)
        if replica.phase is Phase.DRAINING and not replica.grants:
            self._stop(replica, replica.stop_why)
        elif outcome is Outcome.UNREACHABLE and replica.is_idle:
            self._stop(replica, "it cannot be reached")  # alive perhaps, and of no use to anyone
        self._is_room_stale |= replica.is_idle
        self._touch(demand)

    def _ready(self, replica_id: ReplicaId) -> None:
        replica = self.state.replicas.get(replica_id)
        if replica is None or replica.phase is not Phase.STARTING:
            return
        demand = self.state.demand_of(replica)
        demand.load_ms = _smooth(demand.load_ms, self.state.now_ms - replica.phase_since_ms)
        self._enter(replica, Phase.READY)
        replica.last_use_ms = self.state.now_ms
        if not demand.is_cooling(self.state.now_ms):
            demand.failure = None  # it came up: what went wrong before is over
        residence_ms = min(demand.load_ms, demand.model.patience_ms // 2)
        replica.resident_until_ms = self.state.now_ms + residence_ms
        for entry in demand.told:
            entry.is_owed = True
        self._review(demand)
        self._is_room_stale = True

    def _stopped(self, event: ReplicaStopped) -> None:
        replica = self.state.replicas.pop(event.replica, None)
        if replica is None:
            return
        demand = self.state.demand_of(replica)
        del demand.replicas[replica.id]
        self.state.ledger.release(replica.id, replica.placement)
        for request in replica.grants:
            del self.state.granted[request]  # its GrantEnded finds nothing: a grant ends once
        if replica.phase is Phase.READY and not demand.is_served:
            self._turn_cold(demand)
        was_asked = replica.phase in (Phase.STOPPING, Phase.DRAINING)
        if not was_asked and event.cause is not StopCause.ASKED:
            self._failed(demand, replica, event)
        self._note_missing(demand)
        self._is_room_stale = True
        self._touch(demand)

    def _failed(self, demand: Demand, replica: Replica, event: ReplicaStopped) -> None:
        """Cool down after a failure, and answer those who waited for it (3, 4, 11).

        One that has served well and dies is brought up again at once: only an end before
        any good answer says that the next try is likely to fail too.
        """
        demand.failure = Failure(event.cause, event.detail, event.permanent)
        if replica.phase is Phase.READY and replica.has_served:
            return
        demand.failures += 1
        pause_ms = min(COOLDOWN_MS_MIN * 2 ** min(demand.failures - 1, 10), COOLDOWN_MS_MAX)
        demand.cooldown_until_ms = self.state.now_ms + pause_ms
        if demand.missing_since_ms is not None:
            demand.missing_since_ms = demand.cooldown_until_ms
        if demand.is_up:
            return
        if demand.model.is_external:  # 11
            self._give_up(demand, RefusalCode.NO_ENDPOINT)
        elif event.permanent:
            self._give_up(demand, RefusalCode.MODEL_FAILED)
        else:
            self._answer_waiting(demand, RefusalCode.MODEL_COOLING)
            for absent in (demand.told, demand.left):  # a crash loop grows no older than its rivals
                for entry in absent:
                    entry.since_ms = max(entry.since_ms, demand.cooldown_until_ms)
                absent.sort(key=lambda entry: entry.rank)
        self._review(demand)

    def _joined(self, event: NodeJoined) -> None:
        self.state.ledger.join(event.node, event.devices)
        for demand in self.state.demands.values():
            self._note_missing(demand)
            self._touch(demand)
        self._is_room_stale = True

    def _unload_asked(self, event: UnloadAsked) -> None:
        names = list(self.state.demands) if event.model is None else [event.model]
        for name in names:
            if name in self.state.demands:
                demand = self.state.demands[name]
                self._take_down(demand, RefusalCode.MODEL_UNLOADED, event.grace_ms)

    def _take_down(self, demand: Demand, code: RefusalCode, grace_ms: int) -> None:
        """Answer a model's waiting, let its running end within the grace, and stop it."""
        self._give_up(demand, code)
        demand.is_held_down = True
        demand.missing_since_ms = None
        self._is_room_stale = True  # what `min` kept is on its way out
        is_by_hand = code is RefusalCode.MODEL_UNLOADED
        for replica in [r for r in demand.replicas.values() if not r.is_leaving]:
            replica.stop_why = "unloaded by hand" if is_by_hand else "rota is ending"
            if replica.grants and grace_ms > 0:
                stop_by_ms = self.state.now_ms + grace_ms
                if replica.phase is Phase.DRAINING and replica.stop_by_ms is not None:
                    stop_by_ms = min(stop_by_ms, replica.stop_by_ms)
                self._enter(replica, Phase.DRAINING)
                replica.stop_by_ms = stop_by_ms
            else:
                self._stop(replica, replica.stop_why)

    # ── settling ─────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Look at what was touched or is due until nothing changes."""
        self._touch_due()
        while self._touched:
            touched, self._touched = self._touched, {}
            demands = [self.state.demands[name] for name in touched]
            for demand in demands:
                self._serve(demand)
            for demand in demands:
                self._look(demand)
            if self._is_room_stale:
                self._is_room_stale = False
                self._make_room()
            for demand in demands:
                self._answer_late(demand)
                self._tell(demand)
                self._set_wake(demand)

    def _touch(self, demand: Demand) -> None:
        self._touched[demand.model.name] = None

    def _review(self, demand: Demand) -> None:
        """What entries wait for has changed, and with it when each is due."""
        demand.review_ms = 0
        self._touch(demand)

    def _touch_due(self) -> None:
        while self._alarms and self._alarms[0][0] <= self.state.now_ms:
            due_ms, name = heapq.heappop(self._alarms)
            demand = self.state.demands[name]
            if demand.wake_ms == due_ms:
                demand.wake_ms = None
                self._is_room_stale = True  # patience or a pause may have ended
                self._touch(demand)

    def _serve(self, demand: Demand) -> None:
        """5, 7: serve those who wait, by rank, as long as there are slots."""
        if not demand.waiting or not demand.is_served:
            return
        ready = next(demand.ready())
        if demand.load_asks:
            for entry in [e for e in demand.waiting if e.kind is EntryKind.LOAD]:
                self._dequeue(entry)
                self._effects.append(Loaded(entry.request, ready.id))
        while demand.waiting:
            replica = self._slot_for(demand, demand.waiting[0])
            if replica is None:
                break
            self._grant(demand.waiting[0], replica)

    def _slot_for(self, demand: Demand, entry: Entry) -> Replica | None:
        """The replica that would serve this entry now: the least busy, then the oldest."""
        able = [r for r in demand.replicas.values() if r.has_slot and r.takes(entry.rank)]
        return min(able, key=lambda replica: len(replica.grants), default=None)

    def _grant(self, entry: Entry, replica: Replica) -> None:
        self._dequeue(entry)
        replica.grants.add(entry.request)
        self.state.granted[entry.request] = Granted(
            replica, self.state.now_ms, entry.caller, entry.hold_ms
        )
        waited_ms = self.state.now_ms - entry.arrived_ms
        why = replica.why if entry.met_load else "every slot was taken" if waited_ms else ""
        self._effects.append(Grant(entry.request, replica.id, waited_ms, entry.met_load, why))

    def _look(self, demand: Demand) -> None:
        """Do what is due at one model, and see whether it wants a replica."""
        if demand.review_ms <= self.state.now_ms:
            self._forget(demand)
        self._step_down(demand)
        name = demand.model.name
        wants = demand.replicas_wanted() > 0 and not demand.is_cooling(self.state.now_ms)
        rank = demand.head()
        if wants and rank is not None:
            self._is_room_stale |= self.state.wanting.get(name) != rank
            self.state.wanting[name] = rank
        elif name in self.state.wanting:
            del self.state.wanting[name]
            self._drop_promise(demand)

    def _forget(self, demand: Demand) -> None:
        """Let go of absent callers whose time is over."""
        now_ms = self.state.now_ms
        for entry in [e for e in demand.told if e.is_owed and e.back_ms + OWED_MS <= now_ms]:
            demand.remove(entry)  # its turn came and it was not there: it starts nothing more
            self._make_absent(demand, entry, Presence.LEFT, entry.forget_ms)
        demand.told = [entry for entry in demand.told if entry.forget_ms > now_ms]
        demand.left = [entry for entry in demand.left if entry.forget_ms > now_ms]

    def _answer_late(self, demand: Demand) -> None:
        """Answer those who have waited as long as they may, after all was done for them."""
        now_ms = self.state.now_ms
        if demand.review_ms > now_ms:
            return
        for entry in [e for e in demand.waiting if self._deadline_ms(demand, e) <= now_ms]:
            self._tell_to_return(demand, entry)
        times = [self._deadline_ms(demand, entry) for entry in demand.waiting]
        times += [entry.back_ms + OWED_MS for entry in demand.told if entry.is_owed]
        times += [entry.forget_ms for entry in (*demand.told, *demand.left)]
        demand.review_ms = min(times, default=NEVER_MS)

    def _tell_to_return(self, demand: Demand, entry: Entry) -> None:
        """Past its wait: the connection is let go, the demand stands."""
        if self._serves(demand, entry):
            code = RefusalCode.MODEL_BUSY
        elif demand.is_loading:
            code = RefusalCode.MODEL_LOADING
        else:
            code = RefusalCode.MODEL_WAITING
        refusal = self._refuse(entry.request, demand, code)
        self._dequeue(entry)
        self._await_return(demand, entry, refusal)

    def _await_return(self, demand: Demand, entry: Entry, refusal: Refusal) -> None:
        """Keep the place of a caller who was told to come back."""
        assert refusal.retry_after_ms is not None, refusal
        entry.back_ms = self.state.now_ms + refusal.retry_after_ms
        self._make_absent(demand, entry, Presence.TOLD, entry.back_ms + FORGET_MS)

    def _make_absent(
        self, demand: Demand, entry: Entry, presence: Presence, forget_ms: int
    ) -> None:
        entry.presence = presence
        entry.forget_ms = forget_ms
        self._is_room_stale |= entry.is_owed
        entry.is_owed = False
        self._touch(demand)
        # Bounded like the queue: the latest to go loses its place.
        if demand.count(presence) < demand.model.queue_max:
            demand.add(entry)
            demand.review_ms = min(demand.review_ms, forget_ms)

    def _step_down(self, demand: Demand) -> None:
        """Stop what has been idle too long, and what has drained long enough."""
        spare = sum(1 for _ in demand.live()) - demand.model.scaling.min
        for replica in list(demand.replicas.values()):
            due_ms = self._leaves_ms(demand, replica)
            if due_ms is None or due_ms > self.state.now_ms:
                continue
            if replica.phase is Phase.DRAINING:
                self._stop(replica, replica.stop_why)
            elif spare > 0:
                spare -= 1
                timeout_s = demand.model.scaling.idle_timeout_ms / 1_000
                self._stop(replica, f"not used for {timeout_s:g} s")

    def _leaves_ms(self, demand: Demand, replica: Replica) -> int | None:
        """When a replica ends if nothing happens; None = it does not."""
        if replica.phase is Phase.DRAINING:
            return replica.stop_by_ms
        timeout_ms = demand.model.scaling.idle_timeout_ms
        if timeout_ms == 0 or not replica.is_idle or demand.waiting or demand.told:
            return None
        return max(replica.last_use_ms + timeout_ms, demand.held_until_ms)

    def _set_wake(self, demand: Demand) -> None:
        """Keep the time at which this model is to be looked at though nothing happens."""
        times = [demand.review_ms, demand.cooldown_until_ms, demand.held_until_ms]
        for replica in demand.replicas.values():
            times += [self._leaves_ms(demand, replica) or 0, replica.resident_until_ms]
        times += [demand.honours_holds_until_ms() or 0, demand.patience_ends_ms() or 0]
        now_ms = self.state.now_ms
        wake_ms = min((time for time in times if now_ms < time < NEVER_MS), default=None)
        # A later time is left to the earlier alarm: it looks, and sets the next. So the heap
        # does not grow with every grant that ends.
        if wake_ms is not None and (demand.wake_ms is None or wake_ms < demand.wake_ms):
            demand.wake_ms = wake_ms
            heapq.heappush(self._alarms, (wake_ms, demand.model.name))
            if len(self._alarms) > ALARMS_PER_MODEL * len(self.state.demands):
                self._sweep_alarms()

    def _sweep_alarms(self) -> None:
        """Let go of alarms that an earlier one has overtaken."""
        demands = self.state.demands.items()
        self._alarms = [(d.wake_ms, name) for name, d in demands if d.wake_ms is not None]
        heapq.heapify(self._alarms)

    # ── room ─────────────────────────────────────────────────────────────────────────────

    def _make_room(self) -> None:
        """8, 9, 10: each demand that wants a replica gets its turn, first in line first."""
        if not self.state.ledger.totals:
            return
        queue = self.state.queue()
        outlook = Outlook(room.goers(self.state) if queue else ())
        for rank, demand in queue:
            while self._decide(demand, rank, outlook):
                pass
            if demand.promise is not None:
                outlook.note(rank, demand.promise)
            self._tell(demand)
        self._close(outlook.leaving)

    def _decide(self, demand: Demand, rank: Rank, outlook: Outlook) -> bool:
        """One demand's turn. Returns whether it may have another."""
        state, model = self.state, demand.model
        if demand.replicas_wanted() == 0:
            return False
        placement = room.free_place(state, model, outlook.claims)
        if placement is not None:  # 8a
            self._start(demand, placement)
            return True
        if not room.fits_somewhere(state, model):  # 3
            self._give_up_load(demand, RefusalCode.MODEL_FAILED)
            return False
        demand.promise = self._promise_for(demand, rank, outlook)
        if demand.promise is not None:
            self._pursue(demand, rank, demand.promise)
        elif not room.could_come_free(state, model):  # 10
            self._give_up_load(demand, RefusalCode.NO_ROOM)
        return False  # 9

    def _promise_for(self, demand: Demand, rank: Rank, outlook: Outlook) -> Promise | None:
        """8b, then 8c: whose going makes room.

        A promise is kept while it is good, but work is not waited for once idle ones will do.
        """
        state, model, claims = self.state, demand.model, outlook.claims
        kept = demand.promise
        if kept is not None and not room.still_stands(state, kept, claims):
            kept = None
        if kept is not None and not kept.is_barrier:
            return kept
        honours = _is_still(demand.honours_holds_until_ms(), state.now_ms)
        idle = [
            replica
            for replica in outlook.idle()
            if room.may_go(state, replica, rank, honours_holds=honours)
        ]
        found = room.best_plan(state, model, claims, idle)
        if found is not None:
            return self._promise(found, is_barrier=False)
        if _is_still(demand.patience_ends_ms(), state.now_ms):
            return None
        if kept is not None:
            return kept
        found = room.best_plan(state, model, claims, outlook.others())
        return None if found is None else self._promise(found, is_barrier=True)

    def _promise(self, plan: Plan, *, is_barrier: bool) -> Promise:
        leavers = sorted({self.state.replicas[victim].model.name for victim in plan.victims})
        return Promise(plan.placement, frozenset(plan.victims), tuple(leavers), is_barrier)

    def _pursue(self, demand: Demand, rank: Rank, promise: Promise) -> None:
        """Stop what must go, once all of it can."""
        known = (self.state.replicas.get(replica_id) for replica_id in sorted(promise.leaving))
        staying = [replica for replica in known if replica and not replica.is_leaving]
        honours = _is_still(demand.honours_holds_until_ms(), self.state.now_ms)
        if all(
            room.may_go(self.state, replica, rank, honours_holds=honours) for replica in staying
        ):
            for replica in staying:
                self._stop(replica, words.eviction_reason(self.state, demand, replica))

    def _close(self, leaving: Mapping[ReplicaId, Rank]) -> None:
        """8c: who makes way takes no later request; who need not any more is open again.

        One that has yet to come up, is owed or in its residence, is closed after that.
        """
        now_ms = self.state.now_ms
        concerned, self._closed = self._closed | leaving.keys(), set()
        for replica_id in sorted(concerned):
            replica = self.state.replicas.get(replica_id)
            if replica is None:
                continue
            demand = self.state.demand_of(replica)
            is_due = replica.phase is Phase.READY and not demand.is_owed
            is_due = is_due and replica.resident_until_ms <= now_ms
            closed_for = leaving.get(replica_id) if is_due else None
            if closed_for is not None:
                self._closed.add(replica_id)
            if closed_for is not None and replica.closed_for is None:
                replica.closed_for = closed_for
                self._turn_cold(demand)
            elif closed_for != replica.closed_for:
                replica.closed_for = closed_for
                self._review(demand)

    def _drop_promise(self, demand: Demand) -> None:
        """Void a promise; what stood closed for it is opened when room is next looked at."""
        self._is_room_stale |= demand.promise is not None
        demand.promise = None

    def _give_up_load(self, demand: Demand, code: RefusalCode) -> None:
        """3, 10: no load can come of it. What is up serves on."""
        if code is RefusalCode.MODEL_FAILED:
            text = words.refusal(self.state, demand, code, "").message
            demand.failure = Failure(StopCause.REFUSED, text, is_permanent=True)
        self._pause_min(demand, code)
        if not demand.is_up:
            self._give_up(demand, code)

    def _give_up(self, demand: Demand, code: RefusalCode) -> None:
        """Answer everyone who wants this model and forget that it was wanted."""
        self._answer_waiting(demand, code)
        demand.told.clear()
        demand.left.clear()
        self._drop_promise(demand)
        self._review(demand)

    def _pause_min(self, demand: Demand, code: RefusalCode) -> None:
        """Look at a missing `min` that nothing can help again after a pause."""
        if demand.missing_since_ms is None or demand.is_cooling(self.state.now_ms):
            return
        text = words.refusal(self.state, demand, code, "").message
        demand.failure = Failure(StopCause.REFUSED, text, is_permanent=True)
        demand.cooldown_until_ms = self.state.now_ms + COOLDOWN_MS_MAX
        demand.missing_since_ms = demand.cooldown_until_ms
        self._touch(demand)

    # ── orders, and the books that go with them ──────────────────────────────────────────

    def _start(self, demand: Demand, placement: Placement) -> None:
        self._replica_count += 1
        replica = Replica(
            id=f"r{self._replica_count}",
            model=demand.model,
            placement=placement,
            phase=Phase.STARTING,
            phase_since_ms=self.state.now_ms,
            last_use_ms=self.state.now_ms,
            why=words.start_reason(demand),
        )
        self._drop_promise(demand)
        self.state.replicas[replica.id] = replica
        demand.replicas[replica.id] = replica
        demand.loads += 1
        self.state.ledger.book(replica.id, placement)
        self._note_missing(demand)
        self._effects.append(Start(replica.id, demand.model.name, placement, replica.why))
        self._is_room_stale = True  # who may leave has changed, and so has what `min` keeps (10)
        self._touch(demand)

    def _stop(self, replica: Replica, why: str) -> None:
        demand = self.state.demand_of(replica)
        replica.stop_why = why
        self._enter(replica, Phase.STOPPING)
        self.state.ledger.leave(replica.id, replica.placement)
        grace_ms = replica.model.stop_grace_ms
        self._effects.append(Stop(replica.id, replica.model.name, grace_ms, why))
        self._note_missing(demand)
        self._is_room_stale = True
        if not demand.is_served:
            self._turn_cold(demand)
        self._touch(demand)

    def _enter(self, replica: Replica, phase: Phase) -> None:
        replica.phase = phase
        replica.phase_since_ms = self.state.now_ms
        replica.closed_for = None

    def _refuse(self, request: RequestId, demand: Demand, code: RefusalCode) -> Refusal:
        refusal = words.refusal(self.state, demand, code, request)
        self._effects.append(Refuse(request, refusal))
        return refusal

    def _answer_waiting(self, demand: Demand, code: RefusalCode) -> None:
        for entry in list(demand.waiting):
            self._dequeue(entry)
            self._refuse(entry.request, demand, code)

    def _new_entry(self, kind: EntryKind, event: RequestArrived | LoadAsked) -> Entry:
        self._entry_count += 1
        return Entry(
            kind=kind,
            caller=event.caller if isinstance(event, RequestArrived) else "",
            since_ms=self.state.now_ms,
            order=self._entry_count,
            request=event.request,
            arrived_ms=self.state.now_ms,
        )

    def _enqueue(self, demand: Demand, entry: Entry) -> None:
        entry.presence = Presence.WAITING
        self._is_room_stale |= entry.is_owed  # who was kept for it may leave after it
        entry.is_owed = False
        demand.add(entry)
        demand.load_asks += entry.kind is EntryKind.LOAD
        demand.review_ms = min(demand.review_ms, self._deadline_ms(demand, entry))
        self.state.waiting[entry.request] = (demand, entry)
        self.state.queue_bytes += entry.body_bytes
        self._touch(demand)

    def _dequeue(self, entry: Entry) -> None:
        demand, _ = self.state.waiting.pop(entry.request)
        demand.remove(entry)
        demand.load_asks -= entry.kind is EntryKind.LOAD
        self.state.queue_bytes -= entry.body_bytes

    def _is_queue_full(self, demand: Demand, event: RequestArrived) -> bool:
        held_bytes = self.state.queue_bytes + event.body_bytes
        return len(demand.waiting) >= demand.model.queue_max or held_bytes > self.queue_bytes_max

    def _note_missing(self, demand: Demand) -> None:
        """A `min` that is not met is a demand from the moment it went missing."""
        is_met = sum(1 for _ in demand.live()) >= demand.model.scaling.min
        if is_met or demand.is_held_down or self.state.is_shutting_down:
            demand.missing_since_ms = None
        elif demand.missing_since_ms is None:
            self._entry_count += 1
            demand.missing_order = self._entry_count
            demand.missing_since_ms = max(self.state.now_ms, demand.cooldown_until_ms)

    def _turn_cold(self, demand: Demand) -> None:
        """Those queued on a replica now wait for a load: their wait for it begins here."""
        demand.cold_since_ms = self.state.now_ms
        for entry in demand.waiting:
            entry.met_load = True
        for entry in demand.told:
            entry.is_owed = False
        self._review(demand)

    def _tell(self, demand: Demand) -> None:
        """Say what a model's callers wait for, when it has changed."""
        if not demand.waiting and demand.missing_since_ms is None:
            demand.telling = None
            return
        tell = words.reason(self.state, demand)
        known = demand.telling
        if known is None or (known.kind, known.text) != (tell.kind, tell.text):
            demand.telling = tell
            self._effects.append(tell)

    # ── bounds ───────────────────────────────────────────────────────────────────────────

    def _serves(self, demand: Demand, entry: Entry) -> bool:
        """Whether a ready replica will take it once a slot is free."""
        return any(replica.takes(entry.rank) for replica in demand.ready())

    def _deadline_ms(self, demand: Demand, entry: Entry) -> int:
        """Until when a waiting request holds its connection."""
        if self._serves(demand, entry):
            return entry.arrived_ms + entry.queue_wait_ms
        # Both waits may follow one another, but not beyond what the caller can stand.
        last_ms = entry.arrived_ms + max(entry.queue_wait_ms, entry.activation_wait_ms)
        cold_ms = max(entry.arrived_ms, demand.cold_since_ms)
        return min(cold_ms + entry.activation_wait_ms, last_ms)


def _own_or(own_ms: int | None, default_ms: int) -> int:
    return default_ms if own_ms is None else own_ms


def _hold_ms(model: Model, granted: Granted, event: GrantEnded) -> int:
    """How long the model is kept for this caller's next request: as it said itself, else by
    how its answer ended. Who left, or found nobody, is not expected back."""
    if granted.hold_ms is not None:
        return granted.hold_ms
    if event.outcome in (Outcome.CANCELLED, Outcome.UNREACHABLE):
        return 0
    return model.hold_ms if event.is_tool_call else model.hold_finished_ms


def _is_still(until_ms: int | None, now_ms: int) -> bool:
    return until_ms is not None and now_ms < until_ms


def _smooth(known_ms: int | None, seen_ms: int) -> int:
    """A running mean that trusts the latest as much as all before it."""
    return seen_ms if known_ms is None else (known_ms + seen_ms) // 2
