"""Orders: all that the scheduler ever wants done. The shell carries them out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rota.core.types import LeaseId, ModelName, Placement, ReplicaId, RequestId


class RefusalCode(Enum):
    """The answers that are not a grant (docs/architecture.md, "What a request meets")."""

    MODEL_NOT_FOUND = "model_not_found"
    MODEL_OFF = "model_off"
    MODEL_FAILED = "model_failed"
    MODEL_COOLING = "model_cooling"
    QUEUE_FULL = "queue_full"
    MODEL_BUSY = "model_busy"
    MODEL_LOADING = "model_loading"
    MODEL_WAITING = "model_waiting"
    NO_ROOM = "no_room"
    NO_ENDPOINT = "no_endpoint"
    NOT_LOADED = "not_loaded"
    MODEL_UNLOADED = "model_unloaded"
    SHUTTING_DOWN = "shutting_down"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, and when again.

    Args:
        message: one sentence for a person.
        retry_after_ms: when coming back makes sense; a whole number of seconds.
        position: place in the queue among demands (1 = next); None where there is no queue.
        eta_ms: when the model is expected to serve; None = not known.
    """

    code: RefusalCode
    message: str
    retry_after_ms: int | None = None
    position: int | None = None
    eta_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """A request's right to one slot of one replica, until `GrantEnded`.

    Args:
        waited_ms: from the request's arrival to this grant.
        loaded: whether it met a load or a wait for room (else it was ready on arrival).
        why: what the wait was for, in words; empty when there was none.
    """

    request: RequestId
    replica: ReplicaId
    waited_ms: int
    loaded: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request, or a load that was asked for, with a refusal."""

    request: RequestId
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answer `LoadAsked`: the model has a ready replica."""

    request: RequestId
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Leased:
    """A replica is claimed until `LeaseEnded`: the answer to `LeaseAsked`, or to a grant that
    ended in a job."""

    lease: LeaseId
    model: ModelName
    replica: ReplicaId
    until_ms: int
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease is over, and why. It ends once."""

    lease: LeaseId
    model: ModelName
    replica: ReplicaId
    why: str


class WaitKind(Enum):
    """What a demand waits for."""

    LOADING = "loading"
    ROOM = "room"  # replicas chosen to leave are on their way out
    HOLD = "hold"  # what could leave is kept for a while for its callers
    WORK = "work"  # every way to make room is through running work
    TURN = "turn"  # memory is promised to an earlier demand
    SLOT = "slot"  # ready, every slot taken
    COOLDOWN = "cooldown"


@dataclass(frozen=True, slots=True)
class Tell:
    """What a model's waiting callers wait for has changed.

    Args:
        text: the reason, in words.
        eta_ms: when the model is expected to serve; None = not known.
    """

    model: ModelName
    kind: WaitKind
    text: str
    eta_ms: int | None


@dataclass(frozen=True, slots=True)
class Start:
    """Bring a replica up; answered by `ReplicaReady`, `ReplicaStopped` or both in turn."""

    replica: ReplicaId
    model: ModelName
    placement: Placement
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End a replica: ask, wait `grace_ms`, kill its group, reap, see the memory free;
    answered by `ReplicaStopped`.

    Args:
        rival: the model it makes room for; None = it leaves for a reason of its own.
    """

    replica: ReplicaId
    model: ModelName
    grace_ms: int
    why: str
    rival: ModelName | None = None


Effect = Grant | Refuse | Loaded | Leased | LeaseEnded | Tell | Start | Stop
