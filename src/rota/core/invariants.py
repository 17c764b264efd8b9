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
from rota.core.effects import Effect, Grant, Loaded, RefusalCode, Refuse, Start, Stop, Tell
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
    UnloadAsked,
)
from rota.core.ledger import DeviceKey
from rota.core.scheduler import OWED_MS, Scheduler
from rota.core.state import Demand, Entry, EntryKind, Presence, Rank, State
from rota.core.types import Model, ModelName, Phase, Placement, ReplicaId, RequestId
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
        _served_as_far_as_slots_go(demand)
        _wanting_is_known(state, demand)
    _requests_are_in_one_place(state)
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
            assert replica.model is demand.model, (replica, demand.model)
            assert replica.phase_since_ms <= state.now_ms, replica
            has_end = replica.stop_by_ms is not None
            assert has_end or replica.phase is not Phase.DRAINING, replica


def _scaling_is_kept(state: State, demand: Demand) -> None:
    """[10] Off is off, never more than `max`, and a missing `min` is a demand."""
    scaling = demand.model.scaling
    assert len(demand.replicas) <= scaling.max, (demand.model.name, demand.replicas)
    if demand.is_held_down or state.is_shutting_down or not state.ledger.totals:
        return
    is_short = sum(1 for _ in demand.live()) < scaling.min
    assert is_short == (demand.missing_since_ms is not None), (demand.model.name, is_short)


def _grants_fit(demand: Demand) -> None:
    """[3] As many as there are slots, and none before ready."""
    for replica in demand.replicas.values():
        assert len(replica.grants) <= demand.model.slots, replica
        assert replica.phase is not Phase.STARTING or not replica.grants, replica
        if replica.phase is Phase.DRAINING:
            assert replica.grants, replica


def _entries_are_in_order(state: State, demand: Demand) -> None:
    """[8] By rank, each where its presence says, none past its time."""
    model, now_ms = demand.model, state.now_ms
    for presence in Presence:
        entries = {
            Presence.WAITING: demand.waiting,
            Presence.TOLD: demand.told,
            Presence.LEFT: demand.left,
        }[presence]
        ranks = [entry.rank for entry in entries]
        assert ranks == sorted(ranks), (model.name, presence, ranks)
        assert all(entry.presence is presence for entry in entries), (model.name, entries)
        requests = [entry for entry in entries if entry.kind is EntryKind.REQUEST]
        assert len(requests) <= model.queue_max, (model.name, presence, len(requests))
        if presence is not Presence.WAITING:
            assert len(requests) == len(entries), (model.name, "an absent load", entries)
            assert all(entry.forget_ms > now_ms for entry in entries), (model.name, entries)
    for entry in (*demand.waiting, *demand.told, *demand.left):
        if entry.is_owed:
            assert entry.presence is Presence.TOLD, entry
            assert demand.is_served, (model.name, "owed by no replica", entry)
            assert entry.back_ms + OWED_MS > now_ms, entry


def _served_as_far_as_slots_go(demand: Demand) -> None:
    """[5] No slot is free for the first in line, and no load is asked for that is there."""
    if demand.waiting:
        head = demand.waiting[0]
        able = [r for r in demand.replicas.values() if r.has_slot and r.takes(head.rank)]
        assert not able, (demand.model.name, head, able)
    if demand.is_served:
        assert all(e.kind is EntryKind.REQUEST for e in demand.waiting), demand.waiting


def _wanting_is_known(state: State, demand: Demand) -> None:
    wants = demand.replicas_wanted() > 0 and not demand.is_cooling(state.now_ms)
    name = demand.model.name
    assert state.wanting.get(name) == (demand.head() if wants else None), (name, wants, demand)
    assert wants or demand.promise is None, (name, demand.promise)
    loads = sum(1 for entry in demand.waiting if entry.kind is EntryKind.LOAD)
    assert demand.load_asks == loads, (name, demand.load_asks, loads)


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


def _room_is_used(state: State) -> None:
    """[5, 9] In order of rank: nobody waits for memory that is free, nor for somebody who
    could leave; and nobody waits where no end of anything would help."""
    if not state.ledger.totals:
        return
    claims: Counter[DeviceKey] = Counter()
    spoken_for: set[ReplicaId] = set()
    for rank, demand in state.queue():
        model, name = demand.model, demand.model.name
        place = room.free_place(state, model, claims)
        assert place is None, (name, "waits for memory that is free", place)
        goers = room.goers(state)
        assert room.best_plan(state, model, {}, goers) is not None, (name, "waits for ever")
        promise = demand.promise
        if promise is None or promise.is_barrier:
            rest = [r for r in goers if r.id not in spoken_for]
            until_ms = demand.honours_holds_until_ms()
            honours = until_ms is not None and state.now_ms < until_ms
            idle = [r for r in rest if room.may_go(state, r, rank, honours_holds=honours)]
            plan = room.best_plan(state, model, claims, idle)
            assert plan is None, (name, "waits for those who could leave", plan)
            if promise is None and _is_past_patience(state, demand):
                plan = room.best_plan(state, model, claims, rest)
                assert plan is None, (name, "has no promise past its patience", plan)
        if promise is not None:
            assert room.still_stands(state, promise, claims), (name, promise)
            for key, mib in _shares(promise.placement):
                claims[key] += mib
            spoken_for |= promise.leaving


def _barriers_have_a_reason(state: State) -> None:
    """[4, 5] Closed for the first demand past its patience that counts on it, or open."""
    closed_for: dict[ReplicaId, Rank] = {}
    for rank, demand in state.queue():
        if demand.promise is None:
            continue
        if demand.promise.is_barrier:
            assert _is_past_patience(state, demand), (demand.model.name, rank, demand.promise)
        for replica_id in demand.promise.leaving:
            closed_for.setdefault(replica_id, rank)
    for replica in state.replicas.values():
        is_due = replica.phase is Phase.READY and not state.demand_of(replica).is_owed
        is_due = is_due and replica.resident_until_ms <= state.now_ms
        expected = closed_for.get(replica.id) if is_due else None
        assert replica.closed_for == expected, (replica, expected)


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
            if entry.kind is EntryKind.REQUEST:
                yield f"{entry.request} waits for {name}", _latest_answer_ms(demand, entry)
        for entry in (*demand.told, *demand.left):
            yield f"{entry.request} is forgotten by {name}", entry.forget_ms
            if entry.is_owed:
                yield f"{entry.request} is owed by {name}", entry.back_ms + OWED_MS
        if name in state.wanting and demand.promise is None:
            yield from _patience_and_holds(state, demand)
        if demand.replicas_wanted() and demand.is_cooling(state.now_ms):
            yield f"{name} is tried again", demand.cooldown_until_ms
        yield from _ends(demand)


def _is_past_patience(state: State, demand: Demand) -> bool:
    """Stated patience may be longer than the default, but does not shorten it here."""
    ends_ms = demand.patience_ends_ms()
    head = demand.head()
    assert ends_ms is not None, demand.model.name
    assert head is not None, demand.model.name
    assert ends_ms >= head[0] + demand.model.patience_ms, demand.model.name
    return ends_ms <= state.now_ms


def _patience_and_holds(state: State, demand: Demand) -> Iterable[tuple[str, int]]:
    """For one who waits for room: its own patience, and the end of each hold it honours."""
    dues = [
        (f"{demand.model.name} honours holds", demand.honours_holds_until_ms() or 0),
        (f"{demand.model.name} loses patience", demand.patience_ends_ms() or 0),
        *((f"{name} is held", other.held_until_ms) for name, other in state.demands.items()),
    ]
    return [(what, due_ms) for what, due_ms in dues if due_ms > state.now_ms]


def _latest_answer_ms(demand: Demand, entry: Entry) -> int:
    if any(replica.takes(entry.rank) for replica in demand.ready()):
        return entry.arrived_ms + entry.queue_wait_ms
    cold_ms = max(entry.arrived_ms, demand.cold_since_ms)
    last_ms = entry.arrived_ms + max(entry.queue_wait_ms, entry.activation_wait_ms)
    return min(cold_ms + entry.activation_wait_ms, last_ms)


def _ends(demand: Demand) -> Iterable[tuple[str, int]]:
    scaling = demand.model.scaling
    is_spare = sum(1 for _ in demand.live()) > scaling.min
    for replica in demand.replicas.values():
        if replica.phase is Phase.DRAINING and replica.stop_by_ms is not None:
            yield f"{replica.id} drains", replica.stop_by_ms
        is_unwanted = replica.is_idle and not demand.waiting and not demand.told
        if is_unwanted and is_spare and scaling.idle_timeout_ms:
            idle_ms = replica.last_use_ms + scaling.idle_timeout_ms
            yield f"{replica.id} is idle", max(idle_ms, demand.held_until_ms)


def _shares(placement: Placement) -> list[tuple[DeviceKey, int]]:
    return [((placement.node, device), mib) for device, mib in placement.shares()]


@dataclass(slots=True)
class _Life:
    """A replica as its orders and reports tell it."""

    start: Start
    is_ready: bool = False
    is_stopping: bool = False
    is_unreachable: bool = False
    ready_ms: int = 0
    grants: set[RequestId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Told:
    """A caller who was told, while the model was not ready, when to be back."""

    caller: str
    at_ms: int
    back_ms: int


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
    """

    def __init__(self, models: Iterable[Model]) -> None:
        self.models: Mapping[ModelName, Model] = {model.name: model for model in models}
        self.totals: dict[DeviceKey, int] = {}
        self.taken: Counter[DeviceKey] = Counter()
        self.lives: dict[ReplicaId, _Life] = {}
        self.gone: set[ReplicaId] = set()
        self.asked: dict[RequestId, tuple[ModelName, str]] = {}
        self.answered: set[RequestId] = set()
        self.told: dict[ModelName, list[_Told]] = {name: [] for name in self.models}
        self.taken_down: set[ModelName] = set()

    def watch(self, event: Event, effects: Iterable[Effect], now_ms: int) -> None:
        """Take in one step; an event about something unknown must have had no effect on it."""
        self._hear(event, now_ms)
        for effect in effects:
            match effect:
                case Grant():
                    self._granted(effect)
                case Refuse():
                    self._refused(effect, now_ms)
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
            case RequestArrived(request=request, model=model, caller=caller):
                self.asked.setdefault(request, (model, caller))
                if model in self.told:
                    self.told[model] = [t for t in self.told[model] if t.caller != caller]
            case LoadAsked(request=request, model=model):
                self.asked.setdefault(request, (model, ""))
            case RequestCancelled(request=request) | GrantEnded(request=request):
                is_lost = isinstance(event, GrantEnded) and event.outcome is Outcome.UNREACHABLE
                for life in self.lives.values():
                    life.is_unreachable |= is_lost and request in life.grants
                    life.grants.discard(request)
                if isinstance(event, RequestCancelled) and request in self.asked:
                    self.answered.add(request)
            case ReplicaReady(replica=replica) if replica in self.lives:
                life = self.lives[replica]
                if not life.is_ready:
                    life.is_ready, life.ready_ms = True, now_ms
            case ReplicaStopped(replica=replica) if replica in self.lives:
                life = self.lives.pop(replica)
                self.gone.add(replica)
                self.taken.subtract(dict(_shares(life.start.placement)))
                if not life.is_ready:  # a load that failed may end its demand without a word
                    self.told[life.start.model] = []
            case UnloadAsked(model=model):
                self._take_down(self.models if model is None else {model})
            case ShutdownAsked():
                self._take_down(self.models)
            case _:
                pass

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
        assert grant.replica not in self.taken_down, (grant, "drains")
        assert life.start.model == self.asked[grant.request][0], (grant, life)
        life.grants.add(grant.request)
        assert len(life.grants) <= self.models[life.start.model].slots, life
        assert grant.waited_ms >= 0, grant

    def _refused(self, refuse: Refuse, now_ms: int) -> None:
        self._answer(refuse.request)
        code, retry_ms = refuse.refusal.code, refuse.refusal.retry_after_ms
        assert (retry_ms is not None) == (code in COMES_BACK), refuse
        model, caller = self.asked[refuse.request]
        if code in (RefusalCode.MODEL_FAILED, RefusalCode.NO_ROOM):
            self.told[model] = []  # nothing can come of it, for those who are away either
        if retry_ms is None:
            return
        assert RETRY_MS_MIN <= retry_ms <= RETRY_MS_MAX, refuse
        assert retry_ms % 1_000 == 0, refuse
        is_for_load = code in (RefusalCode.MODEL_LOADING, RefusalCode.MODEL_WAITING)
        if is_for_load and self.models[model].queue_max >= PLACES_ENOUGH:
            self.told[model].append(_Told(caller, now_ms, now_ms + retry_ms))

    def _started(self, start: Start) -> None:
        """[1, 7, 10]"""
        model = self.models[start.model]
        assert start.replica not in self.lives, start
        assert start.replica not in self.gone, (start, "is an id of old")
        assert not model.scaling.is_off, start
        assert len(start.placement.devices) == model.device_count, start
        lives = sum(1 for life in self.lives.values() if life.start.model == model.name)
        assert lives < model.scaling.max, (start, lives)
        for key, mib in _shares(start.placement):
            assert model.devices is None or key[1] in model.devices, start
            self.taken[key] += mib
            assert self.taken[key] <= self.totals[key], (start, key, self.taken[key])
            if model.memory_mib is None:
                assert self.taken[key] == self.totals[key], (start, key, "takes it whole")
        self.lives[start.replica] = _Life(start)
        if model.scaling.is_always:  # it may leave no room, which ends demands without a word
            self.told = {name: [] for name in self.told}

    def _stopped(self, stop: Stop, now_ms: int) -> None:
        """[4] Work, what is owed and `min` end by hand or by themselves, never for room."""
        life = self.lives[stop.replica]
        assert not life.is_stopping, (stop, "twice")
        life.is_stopping = True
        if stop.replica in self.taken_down:
            return
        assert not life.grants, (stop, life)
        assert life.is_ready, (stop, "loads, and is called off")
        if life.is_unreachable:
            return
        stays = [
            other
            for other in self.lives.values()
            if other.start.model == stop.model and not other.is_stopping
        ]
        assert len(stays) >= self.models[stop.model].scaling.min, (stop, "is kept by min")
        owed = [
            told
            for told in self.told[stop.model]
            if told.at_ms <= life.ready_ms and now_ms < told.back_ms + OWED_MS
        ]
        assert not owed, (stop, "is owed", owed)
