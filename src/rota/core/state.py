"""What the scheduler remembers: replicas, entries, demands, promises.

All mutable state of the core is here and all of it is changed by `scheduler.Scheduler`
alone; `invariants.check` says what must hold between the parts. An entry is a caller who is
not yet served. It is in exactly one of three places:

    waiting   its request is here and holds its connection
    told      its request was answered "come back at …"; the demand stands in its name
    left      its client went away, or came too late; kept so that a returning caller finds
              its place in the queue, but it starts nothing

A model's demand is its entries and its missing `min` together; the demand's age is that of
its oldest part that may start something, its priority that of its highest. Both demands and
entries are ranked: who is past its patience by age, before everyone else; then by priority,
then by age. A rank changes with time and is therefore asked for, never kept.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple, assert_never

from rota.core.coexistence import FREE, Coexistence, Option
from rota.core.effects import Tell
from rota.core.events import StopCause
from rota.core.ledger import Ledger
from rota.core.types import (
    Eviction,
    LeaseClaim,
    LeaseId,
    Model,
    ModelName,
    NodeId,
    Phase,
    Placement,
    Preload,
    ReplicaId,
    RequestId,
    Rules,
)
from rota.core.worth import History

Place = tuple[int, int]
"""Age: (since_ms, order of arrival). Lower came first."""
FAILURES_FORGIVEN = 1
"""A load can fail by bad luck; a second failure in a row is a habit."""
Rank = tuple[int, int, int, int]
"""Place in line: (0 = past its patience, 1, or BEHIND; -priority; *place). Lower goes first."""
BEHIND = 2
"""Where a demand stands that has a replica and would be served better by one more."""


class EntryKind(Enum):
    """What an entry wants: a slot to serve a request, only that the model be loaded, or a lease.

    The last two take no slot.
    """

    REQUEST = "request"
    LOAD = "load"
    LEASE = "lease"


class Presence(Enum):
    """Where an entry is; see the head of this file."""

    WAITING = "waiting"
    TOLD = "told"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class Entry:
    """One caller not yet served.

    Args:
        mark: see `RequestArrived`.
        since_ms: its first arrival; inherited when it comes back.
        order: breaks ties, first come first.
        arrived_ms: when the present request came.
        back_ms: for one that was told: when it was told to be back.
        forget_ms: when an absent one is forgotten.
        owed_by: the replica that became ready for it while it was away, and stands for it.
        met_load: its request met a load or a wait for room.
        hold_ms, patience_ms: as its request stated them; None = the model's.
        default_holds_ms: see `RequestArrived`.
        priority: as its request, or the model, has it.
        claim: the lease it wants.
        on_replica: the replica that the lease must be on; None = any.
        starts: whether it may start a load; a lease that asked for none may not.
    """

    kind: EntryKind
    caller: str
    since_ms: int
    order: int
    request: RequestId
    arrived_ms: int
    mark: int = 0
    priority: int = 0
    activation_wait_ms: int = 0
    queue_wait_ms: int = 0
    hold_ms: int | None = None
    default_holds_ms: tuple[int | None, int | None] = (None, None)
    patience_ms: int | None = None
    body_bytes: int = 0
    presence: Presence = Presence.WAITING
    back_ms: int = 0
    forget_ms: int = 0
    owed_by: ReplicaId | None = None
    met_load: bool = False
    claim: LeaseClaim | None = None
    on_replica: ReplicaId | None = None
    starts: bool = True

    @property
    def place(self) -> Place:
        return (self.since_ms, self.order)


@dataclass(slots=True, eq=False)
class Line:
    """Entries in the order in which they are served.

    One lane for each priority, the highest first, by age within. So the oldest, the highest and
    the next are found among the heads of a few lanes, however many wait.

    Args:
        lanes: by priority; none is empty.
        count: how many there are.
    """

    lanes: dict[int, list[Entry]] = field(default_factory=dict)
    count: int = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Entry]:
        """By priority, then by age."""
        return chain.from_iterable(self.lanes.values())

    def heads(self) -> Iterator[Entry]:
        """The oldest of each priority, the highest first."""
        return (lane[0] for lane in self.lanes.values())

    def oldest(self) -> Entry | None:
        if not self.lanes:
            return None
        if len(self.lanes) == 1:
            (lane,) = self.lanes.values()
            return lane[0]
        return min(self.heads(), key=_place_of)

    def add(self, entry: Entry) -> None:
        lane = self.lanes.get(entry.priority)
        if lane is None:
            self.lanes[entry.priority] = [entry]
            self.lanes = dict(sorted(self.lanes.items(), reverse=True))
        else:
            insort(lane, entry, key=_place_of)
        self.count += 1

    def remove(self, entry: Entry) -> None:
        lane = self.lanes[entry.priority]
        lane.remove(entry)
        self.count -= 1
        if not lane:
            del self.lanes[entry.priority]

    def clear(self) -> None:
        self.lanes, self.count = {}, 0


def _place_of(entry: Entry) -> Place:
    return entry.place


@dataclass(slots=True, eq=False)
class Lease:
    """A claim on a replica.

    Args:
        until_ms: when it expires unless it is renewed.
        last_ms: no renewal reaches beyond this.
    """

    id: LeaseId
    replica: ReplicaId
    caller: str
    reason: str
    taken_ms: int
    until_ms: int
    last_ms: int


@dataclass(slots=True, eq=False)
class Replica:
    """One running, starting or stopping engine process of a model.

    Args:
        phase_since_ms: when it entered its phase.
        last_use_ms: when its last grant or lease ended; when it became ready before the first.
        leases: the claims on it; each takes no slot and keeps it from leaving like a grant.
        has_displaced_load: whether another load was called off for its own.
        stop_by_ms: for one that drains: when patience with its work ends.
        closed_for: the rank of the demand whose barrier it stands behind; later requests
            are not granted here.
        has_served: whether a grant on it has ended well.
        resident_until_ms: until then its holds and its work are honoured by everyone: a load is
            not thrown away before it has paid.
        why: what it was started for, in words.
    """

    id: ReplicaId
    model: Model
    placement: Placement
    phase: Phase
    phase_since_ms: int
    last_use_ms: int
    why: str
    grants: set[RequestId] = field(default_factory=set)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    has_displaced_load: bool = False
    stop_by_ms: int | None = None
    stop_why: str = ""
    closed_for: Rank | None = None
    has_served: bool = False
    resident_until_ms: int = 0

    @property
    def is_leaving(self) -> bool:
        return self.phase is Phase.STOPPING

    @property
    def is_live(self) -> bool:
        """Whether it serves, or will, as far as anyone knows."""
        return self.phase in (Phase.STARTING, Phase.READY)

    @property
    def is_busy(self) -> bool:
        """Whether it is in use."""
        return bool(self.grants or self.leases)

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.READY and not self.grants and not self.leases

    @property
    def has_slot(self) -> bool:
        return self.phase is Phase.READY and len(self.grants) < self.model.slots

    def takes(self, rank: Rank) -> bool:
        """Whether a request of this rank may be granted here as far as barriers go."""
        return self.closed_for is None or rank < self.closed_for


@dataclass(frozen=True, slots=True)
class Promise:
    """Memory being cleared for a demand.

    Args:
        placement: what it will get.
        leaving: the replicas that must be gone; nothing is stopped until all can go.
        quieting: those that stay, and may not work while something is started beside them.
        leavers: the names of the models that must leave, for the story.
        is_barrier: made past patience, through replicas at work.
        calls_off: whether a load was called off for it.
        rule: by which those leave that may not stand beside it, where a rule says so.
    """

    placement: Placement
    leaving: frozenset[ReplicaId]
    quieting: frozenset[ReplicaId]
    leavers: tuple[ModelName, ...]
    is_barrier: bool
    calls_off: bool = False
    rule: Option | None = None

    @property
    def closes(self) -> frozenset[ReplicaId]:
        """Those that take no later request."""
        return self.leaving | self.quieting if self.quieting else self.leaving


@dataclass(slots=True, eq=False)
class Failure:
    """The last time a model did not come up, or went down by itself."""

    cause: StopCause
    detail: str
    is_permanent: bool


@dataclass(slots=True, eq=False)
class Barrier:
    """How the barriers of one demand went, until its load starts.

    Args:
        unmet: those that had to open again.
        closed_ms: since when the present one is closed.
        opens_ms: when it opens if it is not met by then.
        open_until_ms: it lets requests through until then, and is then chosen anew.
    """

    unmet: int = 0
    closed_ms: int | None = None
    opens_ms: int = 0
    open_until_ms: int = 0


@dataclass(slots=True, eq=False)
class Demand:
    """A model, its replicas, and that it is wanted.

    Args:
        waiting: entries whose request is here.
        slotless: how many of the waiting want no slot.
        told: entries told to come back.
        left: entries whose caller is gone; they start nothing.
        missing: since when fewer than `min` replicas are live.
        is_pinned: its replicas are never made to leave.
        barrier: how its barriers went.
        telling: what its callers were last told that they wait for.
        cold_since_ms: when the model last ceased to serve; activation waits start again here.
        review_ms: no entry needs a look before then (a lower bound, kept cheap).
        is_crowded: a further replica would serve who has waited for a slot long enough.
        has_been_up: it was ready once since it is known.
        wake_ms: when the model is to be looked at next though nothing happens.
        load_ms: how long a load takes, as last seen; None = not known.
        serve_ms: how long a grant takes, smoothed; None = not known.
        loads: replicas started so far.
        is_held_down: unloaded by hand; `min` does not bring it back until it is asked for.
        is_removed: no longer in the file; it takes nobody, and is forgotten once it has ended.
        holds: until when the model is kept for whose next request.
        held_until_ms: the last of these; before it nobody is evicted by the patient.
        history: when it was wanted, which says how soon it is likely to be wanted again.
    """

    model: Model
    load_ms: int | None
    is_pinned: bool
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    waiting: Line = field(default_factory=Line)
    slotless: int = 0
    told: Line = field(default_factory=Line)
    left: Line = field(default_factory=Line)
    missing: Place | None = None
    is_held_down: bool = False
    is_removed: bool = False
    promise: Promise | None = None
    barrier: Barrier = field(default_factory=Barrier)
    telling: Tell | None = None
    cold_since_ms: int = 0
    review_ms: int = 0
    is_crowded: bool = False
    has_been_up: bool = False
    wake_ms: int | None = None
    serve_ms: int | None = None
    loads: int = 0
    failures: int = 0
    failure: Failure | None = None
    cooldown_until_ms: int = 0
    holds: dict[str, int] = field(default_factory=dict)
    held_until_ms: int = 0
    history: History = field(default_factory=History)

    # ── its replicas ─────────────────────────────────────────────────────────────────────

    def live(self) -> Iterator[Replica]:
        return (replica for replica in self.replicas.values() if replica.is_live)

    def ready(self) -> Iterator[Replica]:
        return (r for r in self.replicas.values() if r.phase is Phase.READY)

    @property
    def stays_min(self) -> int:
        """How many replicas do not step down by themselves."""
        return max(self.model.scaling.min, int(self.model.preload is Preload.ALWAYS))

    @property
    def is_served(self) -> bool:
        """Whether a replica is ready, with or without a free slot."""
        return any(True for _ in self.ready())

    @property
    def is_open(self) -> bool:
        """Whether a replica is ready and stands behind no barrier."""
        return any(replica.closed_for is None for replica in self.ready())

    @property
    def is_barred(self) -> bool:
        """Whether a replica stands behind a barrier."""
        return any(replica.closed_for is not None for replica in self.ready())

    @property
    def is_loaded_for_nobody(self) -> bool:
        """Whether a load of it may be called off: nobody waits, or others of its replicas serve."""
        return self.place() is None or (self.is_open and not self.told)

    @property
    def is_up(self) -> bool:
        """Whether a replica serves or will."""
        return any(True for _ in self.live())

    @property
    def is_loading(self) -> bool:
        """Whether a replica is on its way."""
        return any(replica.phase is Phase.STARTING for replica in self.replicas.values())

    def owes(self, replica: Replica) -> bool:
        """Whether this replica stands here for callers who were told to come back."""
        return len(self.told) > 0 and any(entry.owed_by == replica.id for entry in self.told)

    # ── who wants it, how much and since when ────────────────────────────────────────────

    def oldest(self) -> Entry | None:
        """The caller whose demand this is longest."""
        here, away = self.waiting.oldest(), self.told.oldest()
        if here is None or away is None:
            return here or away
        return min(here, away, key=_place_of)

    def lead(self) -> Lead | None:
        """Its oldest part, which speaks for it; None = nobody wants it."""
        own_ms, oldest = self.model.patience_ms, self.oldest()
        if oldest is None or (self.missing is not None and self.missing < oldest.place):
            return None if self.missing is None else Lead(self.missing, own_ms, own_ms)
        stated_ms = own_ms if oldest.patience_ms is None else oldest.patience_ms
        return Lead(oldest.place, stated_ms, own_ms)

    def place(self) -> Place | None:
        """The age of this demand: that of its oldest part; None = nobody wants it."""
        lead = self.lead()
        return None if lead is None else lead.place

    def priority(self) -> int:
        """That of its highest part; lanes begin with it."""
        parts = [next(iter(line.lanes)) for line in (self.waiting, self.told) if line.lanes]
        if self.missing is not None or not parts:
            parts.append(self.model.priority)
        return max(parts)

    def honours_holds_until_ms(self) -> int | None:
        """When this demand ceases to honour the holds of others: its oldest caller's say."""
        lead = self.lead()
        return None if lead is None else lead.honours_holds_until_ms

    def patience_ends_ms(self) -> int | None:
        """When this demand stops waiting for the work of others to end by itself. A caller
        may put it off; stating a short patience beats holds and nothing else."""
        lead = self.lead()
        return None if lead is None else lead.patience_ends_ms

    def entry_patience_ends_ms(self, entry: Entry) -> int:
        """When one of its callers goes before every priority, should it lead its lane."""
        own_ms = self.model.patience_ms if entry.patience_ms is None else entry.patience_ms
        return entry.since_ms + max(own_ms, self.model.patience_ms)

    def hold_for(self, caller: str, until_ms: int, now_ms: int) -> None:
        """Keep the model for a caller's next request; in the past: no longer."""
        self.holds[caller] = until_ms
        self.holds = {who: until for who, until in self.holds.items() if until > now_ms}
        self.held_until_ms = max(self.holds.values(), default=0)

    def is_cooling(self, now_ms: int) -> bool:
        """Whether it failed so lately that it is not tried again yet."""
        return now_ms < self.cooldown_until_ms

    @property
    def is_doubtful(self) -> bool:
        """Whether it failed again and again: then it makes nobody leave before it has waited its
        patience out, so that a crash loop does not cost the others a load each time."""
        return self.failures > FAILURES_FORGIVEN

    def crowded_from_ms(self) -> int | None:
        """When a further replica is due for those who wait for a slot of others, if none comes
        free; None = it is not."""
        if not self.waiting or len(self.replicas) >= self.model.scaling.max or self.is_loading:
            return None
        if not self.is_served or any(r.has_slot or r.closed_for for r in self.ready()):
            return None
        arrived = [e.arrived_ms for e in self.waiting.heads() if e.kind is EntryKind.REQUEST]
        return min(arrived) + self.model.scale_up_after_ms if arrived else None

    def replicas_wanted(self) -> int:
        """Further replicas to bring up now."""
        return self.replicas_needed() or int(self.is_crowded)

    def replicas_needed(self) -> int:
        """Those of them without which somebody is not served, or `min` is not met. One that stops
        counts towards `max`."""
        scaling = self.model.scaling
        floor = scaling.min if self.missing is not None else 0
        asked = 1 if self.told or any(entry.starts for entry in self.waiting) else 0
        need = max(floor, asked) - sum(1 for _ in self.live())
        return max(0, min(need, scaling.max - len(self.replicas)))

    # ── its entries ──────────────────────────────────────────────────────────────────────

    def add(self, entry: Entry) -> None:
        """Put an entry where its presence says."""
        self.line(entry.presence).add(entry)

    def remove(self, entry: Entry) -> None:
        """Take an entry out of where its presence says it is."""
        self.line(entry.presence).remove(entry)

    def take_returning(self, caller: str, mark: int) -> Entry | None:
        """Take out the oldest absent entry of this caller and mark, whose request is back."""
        absent = (*self.told, *self.left)
        found = [e for e in absent if e.caller == caller and e.mark == mark]
        entry = min(found, key=_place_of, default=None)
        if entry is not None:
            self.remove(entry)
        return entry

    def line(self, presence: Presence) -> Line:
        """Its entries of that presence."""
        match presence:
            case Presence.WAITING:
                return self.waiting
            case Presence.TOLD:
                return self.told
            case Presence.LEFT:
                return self.left
            case _:
                assert_never(presence)


class Lead(NamedTuple):
    """The oldest part of a demand: its age, its caller's patience and that of its model."""

    place: Place
    stated_ms: int
    own_ms: int

    @property
    def honours_holds_until_ms(self) -> int:
        return self.place[0] + self.stated_ms

    @property
    def patience_ends_ms(self) -> int:
        return self.place[0] + max(self.stated_ms, self.own_ms)


class Granted(NamedTuple):
    """A grant that has not ended, and what its request said of what comes after it."""

    replica: Replica
    since_ms: int
    caller: str
    hold_ms: int | None = None
    default_holds_ms: tuple[int | None, int | None] = (None, None)


@dataclass(slots=True, eq=False)
class State:
    """Everything the scheduler knows, in one place.

    Args:
        rules: those that are on; all of them in service.
        coexistence: which models may stand together.
        eviction: what decides who leaves.
        waiting: where each waiting request is queued.
        granted: the grants that have not ended.
        leases: the leases that have not ended.
        wanting: the models that want a replica brought up, with the rank they want it at.
        loose: the replicas that are idle or loading: of those some may leave at once.
        exclusive: the replicas beside which nothing is started while they work.
        closed: the replicas that stand behind a barrier.
        preloads: the models that are loaded though nobody asks.
        keeping: the models of which some replicas may not leave for another's sake.
        lost: the nodes that were lost and are not back.
        queue_bytes: request bodies held by the waiting.
    """

    demands: dict[ModelName, Demand]
    rules: Rules = field(default_factory=Rules)
    coexistence: Coexistence = FREE
    eviction: Eviction = Eviction.VALUE
    now_ms: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    waiting: dict[RequestId, tuple[Demand, Entry]] = field(default_factory=dict)
    granted: dict[RequestId, Granted] = field(default_factory=dict)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    wanting: dict[ModelName, Rank] = field(default_factory=dict)
    loose: dict[ReplicaId, Replica] = field(default_factory=dict)
    exclusive: dict[ReplicaId, Replica] = field(default_factory=dict)
    closed: set[ReplicaId] = field(default_factory=set)
    preloads: dict[ModelName, Demand] = field(default_factory=dict)
    keeping: dict[ModelName, Demand] = field(default_factory=dict)
    lost: set[NodeId] = field(default_factory=set)
    queue_bytes: int = 0
    is_shutting_down: bool = False

    def demand_of(self, replica: Replica) -> Demand:
        return self.demands[replica.model.name]

    def note_kept(self, demand: Demand) -> None:
        """Keep `keeping` and `preloads` as they should be when a model is pinned or changed."""
        if demand.model.preload is Preload.NEVER or demand.is_removed:
            self.preloads.pop(demand.model.name, None)
        else:
            self.preloads[demand.model.name] = demand
        if demand.is_pinned or demand.model.scaling.is_always:
            self.keeping[demand.model.name] = demand
        else:
            self.keeping.pop(demand.model.name, None)

    def note_use(self, replica: Replica) -> None:
        """Keep `loose` as it should be after a replica's phase or use has changed."""
        is_loose = replica.is_idle or replica.phase is Phase.STARTING
        if is_loose and replica.placement.devices:
            self.loose[replica.id] = replica
        else:
            self.loose.pop(replica.id, None)

    def to_preload(self) -> list[Demand]:
        """Who is to be loaded for nobody, should there be room."""
        if self.is_shutting_down:
            return []
        return [demand for demand in self.preloads.values() if self._is_to_preload(demand)]

    def _is_to_preload(self, demand: Demand) -> bool:
        is_due = demand.model.preload is Preload.ALWAYS or not demand.has_been_up
        is_hopeless = demand.failure is not None and demand.failure.is_permanent
        is_free = not demand.replicas and demand.model.name not in self.wanting
        is_let = not demand.is_held_down and not demand.model.scaling.is_off
        return (
            is_due and is_free and is_let and not is_hopeless and not demand.is_cooling(self.now_ms)
        )

    # ── ranks ────────────────────────────────────────────────────────────────────────────

    def rank(self, demand: Demand) -> Rank | None:
        """Where a demand stands; None = nobody wants the model."""
        lead = demand.lead()
        if lead is None:
            return None
        if demand.is_crowded and not demand.replicas_needed():
            return (BEHIND, -demand.priority(), *lead.place)
        return self._rank(lead.patience_ends_ms, demand.priority(), lead.place)

    def entry_rank(self, demand: Demand, entry: Entry) -> Rank:
        """Where one caller stands."""
        return self._rank(demand.entry_patience_ends_ms(entry), entry.priority, entry.place)

    def _rank(self, patience_ends_ms: int, priority: int, place: Place) -> Rank:
        if patience_ends_ms <= self.now_ms and self.rules.outranking:
            return (0, 0, *place)
        return (1, -priority, *place)

    def next_waiting(self, demand: Demand) -> Entry | None:
        """Whose turn it is at one model. Behind a barrier that is not always who leads a lane:
        one that came later and lost its patience sooner may go before the barrier's demand."""
        if demand.is_barred:
            ranked = [(self.entry_rank(demand, entry), entry) for entry in demand.waiting]
            return min(ranked, key=lambda pair: pair[0], default=(None, None))[1]
        lanes = demand.waiting.lanes
        if len(lanes) == 1:
            return next(demand.waiting.heads())
        return min(
            demand.waiting.heads(),
            key=lambda entry: self.entry_rank(demand, entry),
            default=None,
        )

    def queue(self) -> list[tuple[Rank, Demand]]:
        """The demands that want a replica, first in line first."""
        demands = [self.demands[name] for name in self.wanting]
        ranked = [(rank, demand) for demand in demands if (rank := self.rank(demand)) is not None]
        return sorted(ranked, key=lambda pair: pair[0])

    def position(self, model: ModelName) -> int | None:
        """Place of a model in `queue`, from 1; None if it does not wait for room."""
        names = [demand.model.name for rank, demand in self.queue() if rank[0] != BEHIND]
        return names.index(model) + 1 if model in names else None
