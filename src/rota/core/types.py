"""The nouns of the core: models, devices, placements, phases. All frozen, all plain.

Memory is MiB, time is integer milliseconds on a clock that never runs backwards; where that
clock starts is the shell's business. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

# Aliases for readers: an id is a string, and one that was used is never used again.
ModelName = str
NodeId = str
DeviceId = str
ReplicaId = str
RequestId = str
LeaseId = str


class Phase(Enum):
    """Where a replica is in its life. A cold model has no replica at all.

    Sleep (SLEEPING, ASLEEP, WAKING) joins with the warm tiers.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # runs what it was granted, takes nothing new, then stops
    STOPPING = "stopping"


class Eviction(Enum):
    """What decides who makes room, among those who may."""

    VALUE = "value"  # what their absence is expected to cost, for each MiB
    LRU = "lru"  # the least recent use alone


@dataclass(frozen=True, slots=True)
class Device:
    """Something with memory to place a replica on: a GPU, or RAM for engines on the CPU."""

    id: DeviceId
    memory_mib: int

    def __post_init__(self) -> None:
        assert self.memory_mib >= 0, self


@dataclass(frozen=True, slots=True)
class Placement:
    """A node, the devices on it that a replica gets, and what it takes of each.

    `memory_mib` has one figure per device, in the same order. A model that someone else runs
    has no devices.
    """

    node: NodeId
    devices: tuple[DeviceId, ...]
    memory_mib: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.devices) == len(self.memory_mib), self
        assert len(set(self.devices)) == len(self.devices), self

    def shares(self) -> Iterator[tuple[DeviceId, int]]:
        """Each device with what is taken of it."""
        return zip(self.devices, self.memory_mib, strict=True)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many replicas a model may and must have.

    Args:
        min: replicas kept whatever happens.
        max: replicas at most; 0 = off.
        idle_timeout_ms: a replica above `min` steps down after this long without use; 0 = never.
    """

    min: int
    max: int
    idle_timeout_ms: int

    def __post_init__(self) -> None:
        assert 0 <= self.min <= self.max, self
        assert self.idle_timeout_ms >= 0, self

    @property
    def is_off(self) -> bool:
        return self.max == 0

    @property
    def is_always(self) -> bool:
        return self.min > 0

    @property
    def kind(self) -> str:
        """`off`, `always` or `on demand`: the words users see."""
        return "off" if self.is_off else "always" if self.is_always else "on demand"


class Preload(Enum):
    """Whether a model is loaded though nobody asks: into memory that is free, evicting nobody.

    ALWAYS: a default model that is back when the one that displaced it has gone.
    """

    NEVER = "never"
    ONCE = "once"  # after the start
    ALWAYS = "always"  # whenever there is room; it does not step down by itself


@dataclass(frozen=True, slots=True)
class Model:
    """What the core knows of a catalog entry: everything about when, nothing about how.

    Args:
        name: what clients ask for.
        scaling: see `Scaling`.
        memory_mib: memory a replica takes on each of its devices; None = it takes them whole.
        device_count: devices a replica needs on one node; 0 = someone else runs it.
        devices: the ids it may be placed on; None = any.
        slots: grants a replica takes at once.
        queue_max: requests that may wait for this model; over it 429.
        activation_wait_ms: how long a request holds its connection for a load.
        queue_wait_ms: how long a request waits for a slot of a ready replica.
        patience_ms: how long a demand honours the holds of others, and the least age from
            which it may close a busy replica to later requests.
        hold_ms: after an answer that calls a tool, how long the model is kept for its caller's
            next request: an agent is coming back.
        hold_finished_ms: the same after any other answer.
        stop_grace_ms: between asking an engine to end and killing its process group.
        load_ms: how long a load is expected to take, from earlier ones; None = not known.
        priority: who goes first among models that wait for room; higher goes first.
        rejects_when_full: a request that finds no free slot is refused instead of queued.
        is_pinned: once up, a replica never leaves to make room and never steps down.
        scale_up_after_ms: a further replica is brought up, within `scaling.max`, when a request
            has waited so long for a slot.
        preload: see `Preload`.
        is_exclusive_while_busy: while a replica has a grant or a lease, nothing is started on
            its devices.
    """

    name: ModelName
    scaling: Scaling
    memory_mib: int | None
    device_count: int = 1
    devices: frozenset[DeviceId] | None = None
    slots: int = 10
    queue_max: int = 1_000
    activation_wait_ms: int = 45_000
    queue_wait_ms: int = 600_000
    patience_ms: int = 300_000
    hold_ms: int = 0
    hold_finished_ms: int = 0
    stop_grace_ms: int = 10_000
    load_ms: int | None = None
    priority: int = 0
    rejects_when_full: bool = False
    is_pinned: bool = False
    is_exclusive_while_busy: bool = False
    scale_up_after_ms: int = 5_000
    preload: Preload = Preload.NEVER

    def __post_init__(self) -> None:
        assert self.slots > 0, self
        assert self.device_count >= 0, self

    @property
    def is_external(self) -> bool:
        """Whether someone else runs it: an endpoint to probe, nothing to place."""
        return self.device_count == 0


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """What turns a grant into a lease on the same replica, in the step in which it ends.

    Args:
        lease: the lease's id, never used before.
        ttl_ms: how long it lasts unless renewed; capped at the file's `lease_ttl_max`.
        reason: what the replica works on, for people.
    """

    lease: LeaseId
    ttl_ms: int
    reason: str = ""

    def __post_init__(self) -> None:
        assert self.ttl_ms > 0, self


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that a simulation switches off one by one, to show what each is for. All are on in
    service.

    Args:
        barriers: a demand past its patience closes those in its way to later requests.
        whole_sets: nothing is stopped before all that must go can go.
        reopening: a barrier that is not met opens for a while, then closes for twice as long.
        outranking: a demand past its patience goes before every priority.
        residence: a load is not thrown away before it has paid.
        owed: a replica that became ready for absent callers stands for them.
        called_off_once: a load for which another was called off is not called off itself.
    """

    barriers: bool = True
    whole_sets: bool = True
    reopening: bool = True
    outranking: bool = True
    residence: bool = True
    owed: bool = True
    called_off_once: bool = True
