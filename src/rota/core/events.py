"""Facts, in the past tense: all that the scheduler ever hears.

Each is a frozen value that cannot be built wrong. An event about an id that is no longer
known changes nothing, so a late or repeated one is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rota.core.coexistence import FREE, Coexistence
from rota.core.types import (
    Device,
    Eviction,
    LeaseClaim,
    LeaseId,
    Model,
    ModelName,
    NodeId,
    Phase,
    Placement,
    ReplicaId,
    RequestId,
)


class Outcome(Enum):
    """How a granted request ended."""

    OK = "ok"
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"  # the engine broke off or answered 5xx
    UNREACHABLE = "unreachable"  # no connection to the engine could be had


class StopCause(Enum):
    """Why a replica is gone."""

    ASKED = "asked"
    CRASHED = "crashed"  # the process ended by itself
    NEVER_READY = "never ready"  # start_timeout passed
    REFUSED = "refused"  # it could not even be started
    SILENT = "silent"  # it runs and answers nothing


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A caller asks for a model.

    Args:
        request: its id.
        model: the model's own name (aliases are resolved before).
        caller: who asks, as finely as can be told: conversation, else key, else peer
            address. A caller who was told to come back finds its place again by this.
        mark: tells the requests of one caller apart, so that one who comes back finds its own
            place and no newcomer takes it (many share a peer address): a repeated request bears
            the same one. 0 = nothing is known of it.
        body_bytes: what it holds in memory while it waits.
        activation_wait_ms: this caller's own bound on a load, if it stated one.
        queue_wait_ms: this caller's own bound on the wait for a slot, if it stated one.
        hold_ms: how long the model is to be kept for this caller's next request; 0 = not at
            all, and what it asked for before is off; None = the model's default.
        default_holds_ms: in place of the model's `hold_ms` and `hold_finished_ms`, where the
            caller states none; None = the model's.
        patience_ms: how long this caller honours the holds of others; None = the default.
        priority: goes before lower ones; None = the model's.
        obstacle: what would make any start of the model fail, in words (no such file); seen
            before anyone is evicted for it. Empty = nothing known.
    """

    request: RequestId
    model: ModelName
    caller: str
    mark: int = 0
    body_bytes: int = 0
    activation_wait_ms: int | None = None
    queue_wait_ms: int | None = None
    hold_ms: int | None = None
    default_holds_ms: tuple[int | None, int | None] = (None, None)
    patience_ms: int | None = None
    priority: int | None = None
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away before it was answered or granted, or before it took its grant.

    The same for one that waits for a lease.
    """

    request: RequestId


@dataclass(frozen=True, slots=True)
class GrantEnded:
    """A granted request's response has ended, by whatever door. A grant ends once.

    Args:
        is_tool_call: whether it ended in a call of a tool, whose result will come back.
        lease: what goes on behind the answer (a job): the replica is leased in the same step, so
            there is no instant at which nobody seems to use it.
    """

    request: RequestId
    outcome: Outcome
    is_tool_call: bool = False
    lease: LeaseClaim | None = None


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """Someone claims that a replica of a model is in use though no request runs on it.

    Answered with `Leased` or `Refuse` under the lease's id.

    Args:
        lease: its id, which is no request's.
        caller: who asks; see `RequestArrived`.
        ttl_ms: how long it lasts if it is not renewed.
        reason: what for, for people.
        load: bring the model up if it is not, and wait for that; else it is refused.
        replica: the one it must be; None = any of the model.
        activation_wait_ms, priority, obstacle: see `RequestArrived`.
    """

    lease: LeaseId
    model: ModelName
    caller: str
    ttl_ms: int
    reason: str = ""
    load: bool = False
    replica: ReplicaId | None = None
    activation_wait_ms: int | None = None
    priority: int | None = None
    obstacle: str = ""

    @property
    def request(self) -> RequestId:
        """The id it is answered under."""
        return self.lease

    @property
    def mark(self) -> int:
        """A caller's leases are not told apart."""
        return 0


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """A lease is to last this long from now, within what leases may last."""

    lease: LeaseId
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """A lease is over. Releasing twice changes nothing."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """A starting replica answers its readiness probe."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class ReplicaStopped:
    """A replica is gone and its memory has been seen free.

    Args:
        detail: what it said last, for people.
        permanent: trying again cannot help until someone changes something (no such file).
    """

    replica: ReplicaId
    cause: StopCause
    detail: str = ""
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSilent:
    """A ready replica's process runs and has answered nothing for too long."""

    replica: ReplicaId
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """A replica that a node reports when it joins.

    Args:
        phase: STARTING, READY or STOPPING.
        grants: the requests that run on it.
        leases: the claims on it, with what is left of their time.
    """

    replica: ReplicaId
    model: ModelName
    placement: Placement
    phase: Phase
    grants: tuple[RequestId, ...] = ()
    leases: tuple[LeaseClaim, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A machine, what may be placed on it, and what runs there."""

    node: NodeId
    devices: tuple[Device, ...]
    running: tuple[Running, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A machine cannot be reached any more: what ran there serves nobody."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """Someone asks for a model to be brought up, with no request to serve.

    Answered with `Loaded` or `Refuse` under the id; it waits however long the load takes.
    `obstacle` is that of `RequestArrived`.
    """

    request: RequestId
    model: ModelName
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class PinAsked:
    """From now on a model's replicas are never made to leave, or may be again."""

    model: ModelName
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """Someone asks for a model (None = all) to go: the waiting are answered, the running
    may end within `grace_ms`."""

    model: ModelName | None
    grace_ms: int


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """Another catalog counts from now on.

    Args:
        models: all of it, in the order of the file.
        coexistence: which models may stand together.
        relaunched: those that are started in another way than before; a failure of theirs
            says nothing any more.
        eviction, queue_bytes_max, hold_ms_max, lease_ms_max: see `scheduler.Scheduler`; None = as
            before.
    """

    models: tuple[Model, ...]
    coexistence: Coexistence = FREE
    relaunched: frozenset[ModelName] = frozenset()
    eviction: Eviction | None = None
    queue_bytes_max: int | None = None
    hold_ms_max: int | None = None
    lease_ms_max: int | None = None


@dataclass(frozen=True, slots=True)
class ShutdownAsked:
    """rota is to end: the waiting are answered, the running may end within `grace_ms`."""

    grace_ms: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing but time: the shell woke at `next_wake_ms()`."""


Event = (
    RequestArrived
    | RequestCancelled
    | GrantEnded
    | LeaseAsked
    | LeaseRenewed
    | LeaseReleased
    | ReplicaReady
    | ReplicaStopped
    | ReplicaSilent
    | NodeJoined
    | NodeLost
    | LoadAsked
    | PinAsked
    | UnloadAsked
    | ModelsChanged
    | ShutdownAsked
    | TimePassed
)
