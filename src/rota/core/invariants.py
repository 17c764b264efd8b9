"""What always holds, after every step: the scheduler's promises to its users, as assertions.

`check` looks at the state and knows nothing of how it came about. `EffectAudit` looks at the
orders alone, as the shell that carries them out sees them, and keeps books of its own: a
mistake in the state cannot hide in it. Both are for tests, simulation and a debugging run;
they walk everything, which `Scheduler.step` must never do.

The figures in brackets are the numbers of docs/scheduler.md, "What always holds". Whoever
changes a rule of the scheduler changes it there and here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from rota.core import room
from rota.core.changes import unknown_model
from rota.core.coexistence import FREE, Coexistence
from rota.core.effects import (
    Effect,
    Grant,
    Leased,
    LeaseEnded,
    Loaded,
    RefusalCode,
    Refuse,
    Start,
    Stop,
    Tell,
)
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
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
    UnloadAsked,
)
from rota.core.ledger import DeviceKey
from rota.core.scheduler import OWED_MS, Scheduler
from rota.core.state import BEHIND, Demand, Entry, EntryKind, Presence, Rank, Replica, State
from rota.core.types import LeaseId, Model, ModelName, Phase, Placement, ReplicaId, RequestId
from rota.core.words import RETRY_MS_MAX, RETRY_MS_MIN


def check(scheduler: Scheduler) -> None:
    """Assert everything that must hold between two steps.

    Raises:
        AssertionError: with the values that contradict each other.
    """
    state = scheduler.state
    _books_add_up(state)
    _each_replica_has_its_place(state)
    for demand in state.demands.values():
        _scaling_is_kept(state, demand)
        _grants_fit(demand)
        _entries_are_in_order(state, demand)
        _served_as_far_as_slots_go(state, demand)
        _wanting_is_known(state, demand)
    _requests_are_in_one_place(state)
    _indexes_are_true(state)
    assert state.queue_bytes <= scheduler.queue_bytes_max, state.queue_bytes
    _room_is_used(state)
    _barriers_have_a_reason(state)
    _nothing_is_slept_through(state, scheduler.next_wake_ms())
    if state.is_shutting_down:
        assert not state.waiting, state.waiting
        assert not any(r.is_live for r in state.replicas.values()), state.replicas


def _books_add_up(state: State) -> None:
    """[1, 5] Taken within budget; taken by those who stay, plus promised, within budget."""
    taken: Counter[DeviceKey] = Counter()
    coming: Counter[DeviceKey] = Counter()
    staying: Counter[DeviceKey] = Counter()
    promises = [d.promise for d in state.demands.values() if d.promise is not None]
    leaving = {replica for promise in promises for replica in promise.leaving}
    for replica in state.replicas.values():
        for key, mib in _shares(replica.placement):
            assert state.ledger.held[key].get(replica.id) == mib, (replica.id, key, mib)
            taken[key] += mib
            coming[key] += mib if replica.is_leaving else 0
            if not replica.is_leaving and replica.id not in leaving:
                staying[key] += mib
    for promise in promises:
        for key, mib in _shares(promise.placement):
            staying[key] += mib
    for node, devices in state.ledger.totals.items():
        rooms = state.ledger.rooms(node, {})
        roomiest_mib = max((room.free + room.coming for room in rooms), default=0)
        assert state.ledger.roomiest_mib(node) == roomiest_mib, (node, rooms)
        for device, total in devices.items():
            key = (node, device)
            assert sum(state.ledger.held[key].values()) == taken[key], (key, taken[key])
            assert state.ledger.used_mib(key) == taken[key], (key, taken[key])
            assert state.ledger.coming_mib(key) == coming[key], (key, coming[key])
            assert taken[key] <= total, (key, taken[key], total)
            assert staying[key] <= total, (key, staying[key], total, promises)


def _each_replica_has_its_place(state: State) -> None:
    listed = {r.id: r for demand in state.demands.values() for r in demand.replicas.values()}
    assert listed == state.replicas, (listed, state.replicas)
    for demand in state.demands.values():
        for replica_id, replica in demand.replicas.items():
            assert replica_id == replica.id, (replica_id, replica)
            assert replica.model.name == demand.model.name, (replica, demand.model)
            assert replica.phase_since_ms <= state.now_ms, replica
            assert replica.is_busy or replica.phase is not Phase.DRAINING, replica


def _scaling_is_kept(state: State, demand: Demand) -> None:
    """[10] Off is off, never more than `max` (what a node that is back has beyond that leaves),
    and a missing `min` is a demand."""
    scaling = demand.model.scaling
    assert sum(1 for _ in demand.live()) <= scaling.max, (demand.model.name, demand.replicas)
    if demand.is_held_down or state.is_shutting_down or not state.ledger.totals:
        return
    is_short = sum(1 for _ in demand.live()) < scaling.min
    assert is_short == (demand.missing is not None), (demand.model.name, is_short)


def _grants_fit(demand: Demand) -> None:
    """[3] As many as there are slots, and none before ready."""
    for replica in demand.replicas.values():
        assert len(replica.grants) <= replica.model.slots, replica
        assert replica.phase is not Phase.STARTING or not replica.is_busy, replica
        assert replica.phase is not Phase.DRAINING or replica.is_busy, replica


def _entries_are_in_order(state: State, demand: Demand) -> None:
    """[8] By rank, each where its presence says, none past its time."""
    model, now_ms = demand.model, state.now_ms
    for presence in Presence:
        line = demand.line(presence)
        entries = list(line)
        order = [(-entry.priority, *entry.place) for entry in entries]
        assert order == sorted(order), (model.name, presence, order)
        assert all(line.lanes.values()), (model.name, presence, "an empty lane")
        assert len(line) == len(entries), (model.name, presence, len(line), len(entries))
        assert all(entry.presence is presence for entry in entries), (model.name, entries)
        requests = [entry for entry in entries if entry.kind is EntryKind.REQUEST]
        assert len(requests) <= model.queue_max, (model.name, presence, len(requests))
        if presence is not Presence.WAITING:
            assert all(e.starts and e.kind is not EntryKind.LOAD for e in entries), entries
            assert all(entry.forget_ms > now_ms for entry in entries), (model.name, entries)
    for entry in (*demand.waiting, *demand.told, *demand.left):
        if entry.owed_by is not None:
            assert entry.presence is Presence.TOLD, entry
            owing = demand.replicas.get(entry.owed_by)
            is_there = owing is not None and owing.phase is Phase.READY
            assert is_there, (model.name, "owed by no replica", entry)
            assert entry.back_ms + OWED_MS > now_ms, entry


def _served_as_far_as_slots_go(state: State, demand: Demand) -> None:
    """[5] No slot is free for anyone, and nobody waits for a load or a lease that can be had."""
    for entry in demand.waiting:
        rank = state.entry_rank(demand, entry)
        open_to = [replica for replica in demand.ready() if replica.takes(rank)]
        match entry.kind:
            case EntryKind.REQUEST:
                able = [replica for replica in open_to if replica.has_slot]
            case EntryKind.LOAD:
                able = list(demand.ready())
            case EntryKind.LEASE:
                able = [r for r in open_to if entry.on_replica in (None, r.id)]
                assert entry.starts or demand.is_served, (demand.model.name, entry)
            case _:
                assert_never(entry.kind)
        assert not able, (demand.model.name, entry, able)


def _wanting_is_known(state: State, demand: Demand) -> None:
    wants = demand.replicas_wanted() > 0 and not demand.is_cooling(state.now_ms)
    name = demand.model.name
    rank = state.rank(demand) if wants else None
    assert state.wanting.get(name) == rank, (name, wants, rank, demand)
    assert wants or demand.promise is None, (name, demand.promise)
    slotless = sum(1 for entry in demand.waiting if entry.kind is not EntryKind.REQUEST)
    assert demand.slotless == slotless, (name, demand.slotless, slotless)


def _requests_are_in_one_place(state: State) -> None:
    """[2] Queued or granted, and known there."""
    queued = {e.request: (d, e) for d in state.demands.values() for e in d.waiting}
    assert queued == state.waiting, (queued, state.waiting)
    assert len(queued) == sum(len(d.waiting) for d in state.demands.values()), queued
    granted = {request: r for r in state.replicas.values() for request in r.grants}
    assert granted == {request: g.replica for request, g in state.granted.items()}, granted
    assert not queued.keys() & granted.keys(), queued.keys() & granted.keys()
    held = sum(entry.body_bytes for _, entry in state.waiting.values())
    assert held == state.queue_bytes, (held, state.queue_bytes)


def _indexes_are_true(state: State) -> None:
    """What is kept for speed says what a look at everything says."""
    replicas = state.replicas.values()
    loose = {r.id for r in replicas if r.is_idle or r.phase is Phase.STARTING}
    loose -= {r.id for r in replicas if not r.placement.devices}
    assert set(state.loose) == loose, (set(state.loose), loose)
    exclusive = {r.id for r in replicas if r.model.is_exclusive_while_busy}
    assert set(state.exclusive) == exclusive, (set(state.exclusive), exclusive)
    closed = {r.id for r in replicas if r.closed_for is not None}
    assert state.closed == closed, (state.closed, closed)
    leases = {lease.id: lease for r in replicas for lease in r.leases.values()}
    assert leases == state.leases, (leases, state.leases)
    for lease in leases.values():
        assert state.now_ms < lease.until_ms <= lease.last_ms, lease
        assert lease.id in state.replicas[lease.replica].leases, lease
    keeping = {n for n, d in state.demands.items() if d.is_pinned or d.model.scaling.is_always}
    assert set(state.keeping) == keeping, (set(state.keeping), keeping)


def _room_is_used(state: State) -> None:
    """[5, 9] In order of rank: nobody waits for memory that is free, nor for somebody who
    could leave; and nobody waits where no end of anything would help."""
    if not state.ledger.totals:
        return
    promised = room.Promised()
    unquiet = room.unquiet(state)
    for rank, demand in state.queue():
        model, name = demand.model, demand.model.name
        place = room.free_place(state, model, promised, unquiet)
        assert place is None, (name, "waits for memory that is free", place)
        goers = room.goers(state)
        is_for_more = rank[0] == BEHIND
        is_hopeless = room.best_plan(state, model, room.UNPROMISED, goers) is None
        assert not is_hopeless or state.lost or is_for_more, (name, "waits for ever")
        promise = demand.promise
        if promise is None or promise.is_barrier:
            rest = [r for r in goers if r.id not in promised.leaving]
            idle = [r for r in rest if room.may_go(state, r, demand, rank)]
            plan = room.best_plan(state, model, promised, idle, unquiet)
            is_past_patience = not is_for_more and _is_past_patience(state, demand)
            is_doubtful = demand.is_doubtful and not is_past_patience
            is_for_nobody = plan is not None and not plan.victims
            if is_for_nobody or not is_doubtful:
                assert plan is None, (name, "waits for those who could leave", plan)
            if promise is None and state.rules.barriers and is_past_patience:
                plan = room.best_plan(state, model, promised, rest)
                assert plan is None, (name, "has no promise past its patience", plan)
        if promise is not None:
            assert room.still_stands(state, model, promise, promised), (name, promise)
            promised.add(name, promise)
    if not any(demand.replicas_needed() for _, demand in state.queue()):
        for demand in state.to_preload():
            place = room.free_place(state, demand.model, promised, unquiet)
            assert place is None, (demand.model.name, "is not preloaded", place)


def _barriers_have_a_reason(state: State) -> None:
    """[4, 5] Closed for the first demand whose promise closes it, or open."""
    closed_for: dict[ReplicaId, Rank] = {}
    for rank, demand in state.queue():
        promise, barrier = demand.promise, demand.barrier
        if promise is None:
            assert barrier.closed_ms is None, (demand.model.name, barrier)
            continue
        if promise.is_barrier:
            assert _is_past_patience(state, demand), (demand.model.name, rank, promise)
            members = [state.replicas[r] for r in promise.closes if r in state.replicas]
            is_any_kept = any(_is_kept(state, replica) for replica in members)
            is_closed = barrier.closed_ms is not None
            if is_closed:
                assert not is_any_kept, (demand.model.name, members)
                assert state.now_ms < barrier.opens_ms or not state.rules.reopening, barrier
            elif not is_any_kept:
                assert state.now_ms < barrier.open_until_ms, (demand.model.name, barrier)
            if not is_closed:
                continue
        for replica_id in promise.closes:
            if not room.is_owed(state, replica_id):
                closed_for.setdefault(replica_id, rank)
    for replica in state.replicas.values():
        expected = closed_for.get(replica.id) if replica.phase is Phase.READY else None
        assert replica.closed_for == expected, (replica, expected)


def _is_kept(state: State, replica: Replica) -> bool:
    """Whether it has yet to come up, is owed, or has not paid for its load."""
    if replica.phase is not Phase.READY:
        return replica.phase is Phase.STARTING
    return state.now_ms < replica.resident_until_ms or state.demand_of(replica).owes(replica)


def _nothing_is_slept_through(state: State, wake_ms: int | None) -> None:
    """[9] Whatever is due next, `next_wake_ms` is not later."""
    assert wake_ms is None or wake_ms > state.now_ms, (wake_ms, state.now_ms)
    for what, due_ms in _dues(state):
        assert due_ms > state.now_ms, (what, due_ms, state.now_ms, "is overdue")
        assert wake_ms is not None, (what, due_ms, "would be slept through")
        assert wake_ms <= due_ms, (what, due_ms, wake_ms, "would be slept through")


def _dues(state: State) -> Iterable[tuple[str, int]]:
    for name, demand in state.demands.items():
        for entry in demand.waiting:
            if entry.kind is not EntryKind.LOAD:
                yield f"{entry.request} waits for {name}", _latest_answer_ms(state, demand, entry)
        for entry in (*demand.told, *demand.left):
            yield f"{entry.request} is forgotten by {name}", entry.forget_ms
            if entry.owed_by is not None:
                yield f"{entry.request} is owed by {name}", entry.back_ms + OWED_MS
        if name in state.wanting and demand.promise is None:
            yield from _patience_and_holds(state, demand)
        if demand.replicas_wanted() and demand.is_cooling(state.now_ms):
            yield f"{name} is tried again", demand.cooldown_until_ms
        if demand.promise is not None and demand.promise.is_barrier:
            is_closed = demand.barrier.closed_ms is not None and state.rules.reopening
            if is_closed:
                yield f"the barrier of {name} opens", demand.barrier.opens_ms
            elif demand.barrier.open_until_ms:
                yield f"the barrier of {name} closes again", demand.barrier.open_until_ms
        yield from _ends(demand)
    for lease in state.leases.values():
        yield f"{lease.id} expires", lease.until_ms


def _is_past_patience(state: State, demand: Demand) -> bool:
    """Stated patience may be longer than the default, but does not shorten it here."""
    ends_ms = demand.patience_ends_ms()
    place = demand.place()
    assert ends_ms is not None, demand.model.name
    assert place is not None, demand.model.name
    assert ends_ms >= place[0] + demand.model.patience_ms, demand.model.name
    return ends_ms <= state.now_ms


def _patience_and_holds(state: State, demand: Demand) -> Iterable[tuple[str, int]]:
    """For one who waits for room: its own patience, and the end of each hold it honours."""
    dues = [
        (f"{demand.model.name} honours holds", demand.honours_holds_until_ms() or 0),
        (f"{demand.model.name} loses patience", demand.patience_ends_ms() or 0),
        *((f"{name} is held", other.held_until_ms) for name, other in state.demands.items()),
    ]
    return [(what, due_ms) for what, due_ms in dues if due_ms > state.now_ms]


def _latest_answer_ms(state: State, demand: Demand, entry: Entry) -> int:
    rank = state.entry_rank(demand, entry)
    if any(replica.takes(rank) for replica in demand.ready()):
        return entry.arrived_ms + entry.queue_wait_ms
    cold_ms = max(entry.arrived_ms, demand.cold_since_ms)
    last_ms = entry.arrived_ms + max(entry.queue_wait_ms, entry.activation_wait_ms)
    return min(cold_ms + entry.activation_wait_ms, last_ms)


def _ends(demand: Demand) -> Iterable[tuple[str, int]]:
    scaling = demand.model.scaling
    is_spare = sum(1 for _ in demand.ready()) > demand.stays_min
    for replica in demand.replicas.values():
        if replica.phase is Phase.DRAINING and replica.stop_by_ms is not None:
            yield f"{replica.id} drains", replica.stop_by_ms
        is_unwanted = replica.is_idle and not demand.waiting and not demand.told
        is_unwanted = is_unwanted and not demand.is_pinned
        if is_unwanted and is_spare and scaling.idle_timeout_ms:
            idle_ms = replica.last_use_ms + scaling.idle_timeout_ms
            yield f"{replica.id} is idle", max(idle_ms, demand.held_until_ms)


def _shares(placement: Placement) -> list[tuple[DeviceKey, int]]:
    return [((placement.node, device), mib) for device, mib in placement.shares()]


@dataclass(slots=True)
class _Life:
    """A replica as its orders and reports tell it."""

    start: Start
    model: Model  # as it was started
    is_ready: bool = False
    is_stopping: bool = False
    is_useless: bool = False  # it cannot be reached, or answers nothing
    grants: set[RequestId] = field(default_factory=set)  # and leases


_Who = tuple[str, int]
"""A caller, and what tells its requests apart."""


@dataclass(slots=True)
class _Told:
    """A caller who was told, while the model was not ready, when to be back, and the replica that
    became ready for it."""

    who: _Who
    back_ms: int
    owed_by: ReplicaId | None = None


COMES_BACK = frozenset(
    {
        RefusalCode.MODEL_COOLING,
        RefusalCode.QUEUE_FULL,
        RefusalCode.MODEL_BUSY,
        RefusalCode.MODEL_LOADING,
        RefusalCode.MODEL_WAITING,
        RefusalCode.NO_ENDPOINT,
    }
)
"""The refusals that say when to come back."""


PLACES_ENOUGH = 100
"""A model that keeps so many absent callers in mind loses none in a test; with fewer, some lose
their place, and nothing is owed to them."""


class EffectAudit:
    """Follows the orders with books of its own and objects to a wrong one.

    Args:
        models: the catalog.
        coexistence: which of them may stand together.
    """

    def __init__(self, models: Iterable[Model], coexistence: Coexistence = FREE) -> None:
        self.coexistence = coexistence
        self.models: Mapping[ModelName, Model] = {model.name: model for model in models}
        self.totals: dict[DeviceKey, int] = {}
        self.taken: Counter[DeviceKey] = Counter()
        self.lives: dict[ReplicaId, _Life] = {}
        self.gone: set[ReplicaId] = set()
        self.asked: dict[RequestId, tuple[ModelName, _Who]] = {}
        self.answered: set[RequestId] = set()
        self.told: dict[ModelName, list[_Told]] = {name: [] for name in self.models}
        self.taken_down: set[ReplicaId] = set()
        self.pinned = {model.name for model in self.models.values() if model.is_pinned}
        self.leases: dict[LeaseId, ReplicaId] = {}
        self.too_many: set[ReplicaId] = set()  # of these some may end when their work has

    def watch(self, event: Event, effects: Iterable[Effect], now_ms: int) -> None:
        """Take in one step; an event about something unknown must have had no effect on it."""
        self._hear(event, now_ms)
        for effect in effects:
            match effect:
                case Grant():
                    self._granted(effect)
                case Refuse():
                    self._refused(effect, now_ms)
                case Leased():
                    self._leased(effect)
                case LeaseEnded(lease=lease, replica=replica):
                    assert self.leases.pop(lease) == replica, effect
                    if replica in self.lives:
                        self.lives[replica].grants.discard(lease)
                case Loaded(request=request, replica=replica):
                    self._answer(request)
                    assert self.lives[replica].is_ready, effect
                    assert not self.lives[replica].is_stopping, effect
                case Start():
                    self._started(effect)
                case Stop():
                    self._stopped(effect, now_ms)
                case Tell(model=model):
                    assert model in self.models, effect
                case _:
                    assert_never(effect)

    def _hear(self, event: Event, now_ms: int) -> None:
        match event:
            case NodeJoined(node=node, devices=devices):
                self.totals |= {(node, device.id): device.memory_mib for device in devices}
                self.told = {name: [] for name in self.told}  # it may show that nothing will fit
                for running in event.running:
                    self._adopt(running)
            case NodeLost(node=node):
                for replica, life in list(self.lives.items()):
                    if life.start.placement.node == node:
                        self._gone(replica)
                self.told = {name: [] for name in self.told}
            case PinAsked(model=model, is_pinned=is_pinned):
                self.pinned.discard(model)
                self.pinned |= {model} & self.models.keys() if is_pinned else set()
            case RequestArrived() | LeaseAsked():
                who, model = (event.caller, event.mark), event.model
                self.asked.setdefault(event.request, (model, who))
                if model in self.told:  # it takes the place of one who was told
                    self.told[model] = [told for told in self.told[model] if told.who != who]
            case LoadAsked(request=request, model=model):
                self.asked.setdefault(request, (model, ("", 0)))
            case RequestCancelled(request=request) | GrantEnded(request=request):
                is_lost = isinstance(event, GrantEnded) and event.outcome is Outcome.UNREACHABLE
                for life in self.lives.values():
                    if is_lost and request in life.grants:
                        life.is_useless = True
                        self._owes_no_more(life)
                    life.grants.discard(request)
                if isinstance(event, RequestCancelled) and request in self.asked:
                    self.answered.add(request)
            case ReplicaReady(replica=replica) if replica in self.lives:
                life = self.lives[replica]
                if not life.is_ready and not life.is_stopping:
                    self._came_up(life)
            case ReplicaSilent(replica=replica) if replica in self.lives:
                self.lives[replica].is_useless = self.lives[replica].is_ready
                self._owes_no_more(self.lives[replica])
            case ReplicaStopped(replica=replica) if replica in self.lives:
                if not self.lives[replica].is_ready:
                    # A load that failed may end its demand without a word.
                    self.told[self.lives[replica].start.model] = []
                self._gone(replica)
            case UnloadAsked(model=model):
                self._take_down(self.models if model is None else {model})
            case ModelsChanged(models=models):
                self.coexistence = event.coexistence
                self._change({model.name: model for model in models})
            case ShutdownAsked():
                self._take_down(self.models)
            case _:
                pass

    def _came_up(self, life: _Life) -> None:
        life.is_ready = True
        for told in self.told[life.start.model]:
            if told.owed_by is None:
                told.owed_by = life.start.replica

    def _owes_no_more(self, life: _Life) -> None:
        for told in self.told[life.start.model]:
            if told.owed_by == life.start.replica:
                told.owed_by = None

    def _gone(self, replica: ReplicaId) -> None:
        life = self.lives.pop(replica)
        self._owes_no_more(life)
        self.gone.add(replica)
        self.taken_down.discard(replica)  # a node that is back with it knows of no unload
        self.taken.subtract(dict(_shares(life.start.placement)))

    def _adopt(self, running: Running) -> None:
        if running.replica in self.lives:
            return
        self.told.setdefault(running.model, [])
        model = self.models.get(running.model) or unknown_model(running.model)
        life = _Life(Start(running.replica, model.name, running.placement, "adopted"), model)
        life.is_stopping = running.phase is Phase.STOPPING
        life.grants = set(running.grants)
        self.lives[running.replica] = life
        self.taken.update(dict(_shares(running.placement)))
        siblings = [x for x in self.lives.values() if x.start.model == running.model]
        if len(siblings) > model.scaling.max:
            self.too_many |= {life.start.replica for life in siblings}
        if running.phase is Phase.READY:
            self._came_up(life)

    def _leased(self, leased: Leased) -> None:
        """[3] On one that serves; an answer if it was asked for, else a grant went on as this."""
        if leased.lease in self.asked:
            self._answer(leased.lease)
        life = self.lives[leased.replica]
        assert life.is_ready, (leased, life)
        assert not life.is_stopping, (leased, life)
        assert leased.lease not in self.leases, leased
        self.leases[leased.lease] = leased.replica
        life.grants.add(leased.lease)

    def _change(self, models: Mapping[ModelName, Model]) -> None:
        """[12] What is there and is kept stays, unless there is more of it than there may be."""
        removed = self.models.keys() - models.keys()
        for name, model in models.items():
            known = self.models.get(name)
            if known is not None and known.is_pinned != model.is_pinned:
                self.pinned.discard(name)
            if model.is_pinned and (known is None or not known.is_pinned):
                self.pinned.add(name)
            live = {r for r, x in self.lives.items() if x.start.model == name}
            if len(live) > model.scaling.max:
                self.too_many |= live
            if model.scaling.is_off:
                self.told[name] = []
        for name in removed:
            self.told[name] = []
            self.too_many |= {r for r, x in self.lives.items() if x.start.model == name}
            self.pinned.discard(name)
        self.told = {name: self.told.get(name, []) for name in {**self.told, **models}}
        self.models = {**models}

    def _take_down(self, names: Iterable[ModelName]) -> None:
        for name in names:
            self.taken_down |= {r for r, x in self.lives.items() if x.start.model == name}
            self.told[name] = []

    def _answer(self, request: RequestId) -> None:
        assert request in self.asked, (request, "never asked")
        assert request not in self.answered, (request, "was answered before, or had left")
        self.answered.add(request)

    def _granted(self, grant: Grant) -> None:
        """[2, 3, 5]"""
        self._answer(grant.request)
        life = self.lives[grant.replica]
        assert life.is_ready, (grant, life)
        assert not life.is_stopping, (grant, life)
        assert not life.is_useless, (grant, life, "cannot be reached")
        assert grant.replica not in self.taken_down, (grant, "drains")
        assert life.start.model == self.asked[grant.request][0], (grant, life)
        life.grants.add(grant.request)
        requests = life.grants - self.leases.keys()
        assert len(requests) <= life.model.slots, life
        assert grant.waited_ms >= 0, grant

    def _refused(self, refuse: Refuse, now_ms: int) -> None:
        self._answer(refuse.request)
        code, retry_ms = refuse.refusal.code, refuse.refusal.retry_after_ms
        assert (retry_ms is not None) == (code in COMES_BACK), refuse
        model, who = self.asked[refuse.request]
        if code in (RefusalCode.MODEL_FAILED, RefusalCode.NO_ROOM):
            self.told[model] = []  # nothing can come of it, for those who are away either
        if retry_ms is None:
            return
        assert RETRY_MS_MIN <= retry_ms <= RETRY_MS_MAX, refuse
        assert retry_ms % 1_000 == 0, refuse
        is_for_load = code in (RefusalCode.MODEL_LOADING, RefusalCode.MODEL_WAITING)
        if is_for_load and self.models[model].queue_max >= PLACES_ENOUGH:
            self.told[model].append(_Told(who, now_ms + retry_ms))

    def _started(self, start: Start) -> None:
        """[1, 7, 10]"""
        model = self.models[start.model]
        assert start.replica not in self.lives, start
        assert start.replica not in self.gone, (start, "is an id of old")
        assert not model.scaling.is_off, start
        assert len(start.placement.devices) == model.device_count, start
        lives = sum(1 for life in self.lives.values() if life.start.model == model.name)
        assert lives < model.scaling.max, (start, lives)
        self._is_quiet(start)
        if start.placement.devices:
            self._may_stand(start)
        for key, mib in _shares(start.placement):
            assert model.devices is None or key[1] in model.devices, start
            self.taken[key] += mib
            assert self.taken[key] <= self.totals[key], (start, key, self.taken[key])
            if model.memory_mib is None:
                assert self.taken[key] == self.totals[key], (start, key, "takes it whole")
        self.lives[start.replica] = _Life(start, model)
        if model.scaling.is_always:  # it may leave no room, which ends demands without a word
            self.told = {name: [] for name in self.told}

    def _may_stand(self, start: Start) -> None:
        """[1] Nothing is started beside what has to leave for it, until that has ended."""
        lives = [life.start for life in self.lives.values() if life.start.placement.devices]
        there = {s.model for s in lives if s.placement.node == start.placement.node}
        options = self.coexistence.options(start.model, frozenset(there - {start.model}))
        assert any(not option.leaving for option in options), (start, there, options)

    def _is_quiet(self, start: Start) -> None:
        """[4] Nothing is started beside one that bears nothing beside its work."""
        where = {key for key, _ in _shares(start.placement)}
        for life in self.lives.values():
            is_beside = any(key in where for key, _ in _shares(life.start.placement))
            is_exclusive = life.model.is_exclusive_while_busy
            assert not (is_beside and is_exclusive and life.grants), (start, life)

    def _stopped(self, stop: Stop, now_ms: int) -> None:
        """[4] Work, what is owed, pinned and `min` end by hand or by themselves, never for room."""
        life = self.lives[stop.replica]
        assert not life.is_stopping, (stop, "twice")
        life.is_stopping = True
        if stop.replica in self.taken_down:
            return
        if life.is_useless:
            return
        assert not life.grants, (stop, life)
        if stop.replica in self.too_many:
            return
        assert stop.model not in self.pinned, (stop, "is pinned")
        if stop.rival is not None:
            may_leave = self.coexistence.may_displace(stop.rival, stop.model)
            assert may_leave, (stop, "is persistent")
        if not life.is_ready:
            waits = [w for w in self.told[stop.model] if now_ms < w.back_ms + OWED_MS]
            assert not waits, (stop, "is called off, and wanted", waits)
        stays = [
            other
            for other in self.lives.values()
            if other.start.model == stop.model and not other.is_stopping
        ]
        assert len(stays) >= self.models[stop.model].scaling.min, (stop, "is kept by min")
        owed = [
            told
            for told in self.told[stop.model]
            if told.owed_by == stop.replica and now_ms < told.back_ms + OWED_MS
        ]
        assert not owed, (stop, "is owed", owed)
