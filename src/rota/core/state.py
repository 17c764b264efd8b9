"""What the scheduler remembers: replicas, entries, demands, promises.

All mutable state of the core is here and all of it is changed by `scheduler.Scheduler`
alone; `invariants.check` says what must hold between the parts. An entry is a caller who is
not yet served. It is in exactly one of three places:

    waiting   its request is here and holds its connection
    told      its request was answered "come back at …"; the demand stands in its name
    left      its client went away, or came too late; kept so that a returning caller finds
              its place in the queue, but it starts nothing

A model's demand is its entries and its missing `min` together; the demand's age is that of
its oldest part that may start something.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, assert_never

from rota.core.effects import Tell
from rota.core.events import StopCause
from rota.core.ledger import Ledger
from rota.core.types import Model, ModelName, Phase, Placement, ReplicaId, RequestId

Rank = tuple[int, int]
"""Place in the queue: (since_ms, order of arrival). Lower goes first."""


class EntryKind(Enum):
    """What an entry wants: a slot to serve a request, or only that the model be loaded."""

    REQUEST = "request"
    LOAD = "load"


class Presence(Enum):
    """Where an entry is; see the head of this file."""

    WAITING = "waiting"
    TOLD = "told"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class Entry:
    """One caller not yet served.

    Args:
        since_ms: its first arrival; inherited when it comes back.
        order: breaks ties, first come first.
        arrived_ms: when the present request came.
        back_ms: for one that was told: when it was told to be back.
        forget_ms: when an absent one is forgotten.
        is_owed: the model became ready for it while it was away.
        met_load: its request met a load or a wait for room.
        hold_ms, patience_ms: as its request stated them; None = the model's.
    """

    kind: EntryKind
    caller: str
    since_ms: int
    order: int
    request: RequestId
    arrived_ms: int
    activation_wait_ms: int = 0
    queue_wait_ms: int = 0
    hold_ms: int | None = None
    patience_ms: int | None = None
    body_bytes: int = 0
    presence: Presence = Presence.WAITING
    back_ms: int = 0
    forget_ms: int = 0
    is_owed: bool = False
    met_load: bool = False

    @property
    def rank(self) -> Rank:
        return (self.since_ms, self.order)


@dataclass(slots=True, eq=False)
class Replica:
    """One running, starting or stopping engine process of a model.

    Args:
        phase_since_ms: when it entered its phase.
        last_use_ms: when its last grant ended; when it became ready before the first.
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
    def is_idle(self) -> bool:
        return self.phase is Phase.READY and not self.grants

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
        leavers: the names of their models, for the story.
        is_barrier: made past patience, through replicas at work.
    """

    placement: Placement
    leaving: frozenset[ReplicaId]
    leavers: tuple[ModelName, ...]
    is_barrier: bool


@dataclass(slots=True, eq=False)
class Failure:
    """The last time a model did not come up, or went down by itself."""

    cause: StopCause
    detail: str
    is_permanent: bool


@dataclass(slots=True, eq=False)
class Demand:
    """A model, its replicas, and that it is wanted.

    Args:
        waiting: entries whose request is here, by rank.
        load_asks: how many of the waiting are loads asked for by hand.
        told: entries told to come back, by rank.
        left: entries whose caller is gone, by rank; they start nothing.
        missing_since_ms: since when fewer than `min` replicas are live.
        telling: what its callers were last told that they wait for.
        cold_since_ms: when the model last ceased to serve; activation waits start again here.
        review_ms: no entry needs a look before then (a lower bound, kept cheap).
        wake_ms: when the model is to be looked at next though nothing happens.
        load_ms: how long a load takes, as last seen; None = not known.
        serve_ms: how long a grant takes, smoothed; None = not known.
        loads: replicas started so far.
        is_held_down: unloaded by hand; `min` does not bring it back until it is asked for.
        holds: until when the model is kept for whose next request.
        held_until_ms: the last of these; before it nobody is evicted by the patient.
    """

    model: Model
    load_ms: int | None
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    waiting: list[Entry] = field(default_factory=list)
    load_asks: int = 0
    told: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    missing_since_ms: int | None = None
    missing_order: int = 0
    is_held_down: bool = False
    promise: Promise | None = None
    telling: Tell | None = None
    cold_since_ms: int = 0
    review_ms: int = 0
    wake_ms: int | None = None
    serve_ms: int | None = None
    loads: int = 0
    failures: int = 0
    failure: Failure | None = None
    cooldown_until_ms: int = 0
    holds: dict[str, int] = field(default_factory=dict)
    held_until_ms: int = 0

    def live(self) -> Iterator[Replica]:
        return (replica for replica in self.replicas.values() if replica.is_live)

    def ready(self) -> Iterator[Replica]:
        return (r for r in self.replicas.values() if r.phase is Phase.READY)

    @property
    def is_served(self) -> bool:
        """Whether a replica is ready, with or without a free slot."""
        return any(True for _ in self.ready())

    @property
    def is_up(self) -> bool:
        """Whether a replica serves or will."""
        return any(True for _ in self.live())

    @property
    def is_loading(self) -> bool:
        """Whether a replica is on its way."""
        return any(replica.phase is Phase.STARTING for replica in self.replicas.values())

    @property
    def is_owed(self) -> bool:
        """Whether a ready replica stands here for callers who were told to come back."""
        return any(entry.is_owed for entry in self.told)

    def head(self) -> Rank | None:
        """The rank of this demand: its oldest part that may start something."""
        ranks = [entry.rank for entry in (*self.waiting[:1], *self.told[:1])]
        if self.missing_since_ms is not None:
            ranks.append((self.missing_since_ms, self.missing_order))
        return min(ranks, default=None)

    def honours_holds_until_ms(self) -> int | None:
        """When this demand ceases to honour the holds of others: its oldest caller's say."""
        head = self.head()
        return None if head is None else head[0] + self._stated_patience_ms(head)

    def patience_ends_ms(self) -> int | None:
        """When this demand stops waiting for the work of others to end by itself. A caller
        may put it off; stating a short patience beats holds and nothing else."""
        head = self.head()
        if head is None:
            return None
        return head[0] + max(self._stated_patience_ms(head), self.model.patience_ms)

    def _stated_patience_ms(self, head: Rank) -> int:
        for entry in (*self.waiting[:1], *self.told[:1]):
            if entry.rank == head and entry.patience_ms is not None:
                return entry.patience_ms
        return self.model.patience_ms

    def hold_for(self, caller: str, until_ms: int, now_ms: int) -> None:
        """Keep the model for a caller's next request; in the past: no longer."""
        self.holds[caller] = until_ms
        self.holds = {who: until for who, until in self.holds.items() if until > now_ms}
        self.held_until_ms = max(self.holds.values(), default=0)

    def is_cooling(self, now_ms: int) -> bool:
        """Whether it failed so lately that it is not tried again yet."""
        return now_ms < self.cooldown_until_ms

    def replicas_wanted(self) -> int:
        """Further replicas to bring up now. One that stops counts towards `max`."""
        scaling = self.model.scaling
        floor = scaling.min if self.missing_since_ms is not None else 0
        asked = 1 if self.waiting or self.told else 0
        need = max(floor, asked) - sum(1 for _ in self.live())
        return max(0, min(need, scaling.max - len(self.replicas)))

    def add(self, entry: Entry) -> None:
        """Put an entry where its presence says, by rank."""
        insort(self._place(entry.presence), entry, key=lambda other: other.rank)

    def remove(self, entry: Entry) -> None:
        """Take an entry out of where its presence says it is."""
        self._place(entry.presence).remove(entry)

    def count(self, presence: Presence) -> int:
        """How many entries are there."""
        return len(self._place(presence))

    def take_returning(self, caller: str) -> Entry | None:
        """Take out the oldest absent entry of this caller, whose request is back."""
        found = [e for e in (*self.told, *self.left) if e.caller == caller]
        entry = min(found, key=lambda entry: entry.rank, default=None)
        if entry is not None:
            self.remove(entry)
        return entry

    def _place(self, presence: Presence) -> list[Entry]:
        match presence:
            case Presence.WAITING:
                return self.waiting
            case Presence.TOLD:
                return self.told
            case Presence.LEFT:
                return self.left
            case _:
                assert_never(presence)


class Granted(NamedTuple):
    """A grant that has not ended, and what its request said of what comes after it."""

    replica: Replica
    since_ms: int
    caller: str
    hold_ms: int | None


@dataclass(slots=True, eq=False)
class State:
    """Everything the scheduler knows, in one place.

    Args:
        waiting: where each waiting request is queued.
        granted: the grants that have not ended.
        wanting: the models that want a replica brought up, with the rank they want it at.
        queue_bytes: request bodies held by the waiting.
    """

    demands: dict[ModelName, Demand]
    now_ms: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    waiting: dict[RequestId, tuple[Demand, Entry]] = field(default_factory=dict)
    granted: dict[RequestId, Granted] = field(default_factory=dict)
    wanting: dict[ModelName, Rank] = field(default_factory=dict)
    queue_bytes: int = 0
    is_shutting_down: bool = False

    def demand_of(self, replica: Replica) -> Demand:
        return self.demands[replica.model.name]

    def queue(self) -> list[tuple[Rank, Demand]]:
        """The demands that want a replica, first in line first."""
        demands = [self.demands[name] for name in self.wanting]
        ranked = [(head, demand) for demand in demands if (head := demand.head()) is not None]
        return sorted(ranked, key=lambda pair: pair[0])

    def position(self, model: ModelName) -> int | None:
        """Place of a model in `queue`, from 1; None if it does not wait for room."""
        names = [demand.model.name for _, demand in self.queue()]
        return names.index(model) + 1 if model in names else None
