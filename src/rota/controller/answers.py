"""What a refusal is to a caller: an error with a status, a code and when to come back."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.effects import Refusal, RefusalCode
from rota.core.state import State
from rota.errors import CapacityError, ReplicaError, RequestError, RotaError


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a refusal is said over HTTP."""

    error: type[RotaError]
    status: int
    retry: bool | None = None


# SDKs retry 409 and every 5xx unless `x-should-retry` says otherwise (wire formats, section
# 2.1 of the OpenAI SDK's rules), so what waiting cannot mend says so.
_ANSWERS = {
    RefusalCode.MODEL_NOT_FOUND: _Answer(RequestError, 404),
    RefusalCode.MODEL_OFF: _Answer(RequestError, 409, retry=False),
    RefusalCode.MODEL_FAILED: _Answer(ReplicaError, 500, retry=False),
    RefusalCode.MODEL_COOLING: _Answer(CapacityError, 503),
    RefusalCode.QUEUE_FULL: _Answer(CapacityError, 429),
    RefusalCode.MODEL_BUSY: _Answer(CapacityError, 429),
    RefusalCode.MODEL_LOADING: _Answer(CapacityError, 503),
    RefusalCode.MODEL_WAITING: _Answer(CapacityError, 503),
    RefusalCode.NO_ROOM: _Answer(CapacityError, 503, retry=False),
    RefusalCode.NO_ENDPOINT: _Answer(CapacityError, 503),
    RefusalCode.NOT_LOADED: _Answer(RequestError, 409, retry=False),
    RefusalCode.MODEL_UNLOADED: _Answer(CapacityError, 503),
    RefusalCode.SHUTTING_DOWN: _Answer(CapacityError, 503),
}

_ON_THE_WAY = (RefusalCode.MODEL_LOADING, RefusalCode.MODEL_WAITING)


def error_of(state: State, model: str, refusal: Refusal) -> RotaError:
    """A refusal as what its caller sees."""
    answer = _ANSWERS[refusal.code]
    return answer.error(
        refusal.message,
        code=refusal.code.value,
        status=answer.status,
        retry=answer.retry,
        retry_after_s=_whole_seconds(refusal.retry_after_ms),
        loading=_loading(state, model, refusal) if refusal.code in _ON_THE_WAY else None,
    )


def _loading(state: State, model: str, refusal: Refusal) -> dict[str, object]:
    load_ms = state.demands[model].load_ms
    is_loading = refusal.code is RefusalCode.MODEL_LOADING
    progress = None
    if is_loading and load_ms and refusal.eta_ms is not None:
        progress = round(min(max(1 - refusal.eta_ms / load_ms, 0.0), 0.99), 2)
    return {
        "model": model,
        "state": "loading" if is_loading else "waiting",
        "progress": progress,
        "eta_seconds": _whole_seconds(refusal.eta_ms),
        "position": refusal.position,
    }


def _whole_seconds(ms: int | None) -> int | None:
    return None if ms is None else -(-ms // 1_000)
