"""Each event and effect in one line, and the whole state as plain values.

The lines are what logs, transcripts and journals show, so that a test reads like a story and
a bug report can be followed by a request's or a replica's id.
"""

from __future__ import annotations

from typing import assert_never

from rota.core.effects import (
    Effect,
    Grant,
    Leased,
    LeaseEnded,
    Loaded,
    Refuse,
    Start,
    Stop,
    Tell,
)
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
    PinAsked,
    ReplicaReady,
    ReplicaSilent,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    ShutdownAsked,
    TimePassed,
    UnloadAsked,
)
from rota.core.state import Demand, Replica, State
from rota.core.types import Phase, Placement
from rota.core.words import eta_ms

NAMED_MAX = 10
"""Models of a catalog that a line names."""


def describe(fact: Event | Effect) -> str:
    """One line for an event or an effect."""
    return _effect(fact) if isinstance(fact, Effect) else _event(fact)


def _event(event: Event) -> str:
    match event:
        case RequestArrived(request=request, model=model, caller=caller):
            own = "" if event.hold_ms is None else f", hold {event.hold_ms} ms"
            own += "" if event.patience_ms is None else f", patience {event.patience_ms} ms"
            own += "" if event.priority is None else f", priority {event.priority}"
            return f"{request} arrived for {model} from {caller}{own}"
        case RequestCancelled(request=request):
            return f"{request} was cancelled"
        case GrantEnded(request=request, outcome=outcome, is_tool_call=is_tool_call):
            goes_on = f" and goes on as {event.lease.lease}" if event.lease is not None else ""
            return f"{request} ended {outcome.value}{' in a tool call' * is_tool_call}{goes_on}"
        case LeaseAsked(lease=lease, model=model, caller=caller, ttl_ms=ttl_ms):
            return f"{caller} asked for {lease} on {event.replica or model}, {ttl_ms} ms"
        case LeaseRenewed(lease=lease, ttl_ms=ttl_ms):
            return f"{lease} was renewed for {ttl_ms} ms"
        case LeaseReleased(lease=lease):
            return f"{lease} was released"
        case ReplicaReady(replica=replica):
            return f"{replica} is ready"
        case ReplicaStopped(replica=replica, cause=cause, detail=detail):
            return f"{replica} is gone ({cause.value})" + (f": {detail}" if detail else "")
        case ReplicaSilent(replica=replica, detail=detail):
            return f"{replica} answers nothing" + (f": {detail}" if detail else "")
        case NodeJoined(node=node, devices=devices, running=running):
            listed = ", ".join(f"{device.id} {device.memory_mib} MiB" for device in devices)
            runs = ", ".join(f"{r.replica} of {r.model} {r.phase.value}" for r in running)
            return f"node {node} joined with {listed or 'no device'}" + (runs and f"; {runs}")
        case NodeLost(node=node):
            return f"node {node} was lost"
        case LoadAsked(request=request, model=model):
            return f"{request} asked to load {model}"
        case PinAsked(model=model, is_pinned=is_pinned):
            return f"{model} was {'pinned' if is_pinned else 'unpinned'}"
        case UnloadAsked(model=model, grace_ms=grace_ms):
            return f"unload of {model or 'all models'} asked, grace {grace_ms} ms"
        case ModelsChanged(models=models):
            few = ", ".join(model.name for model in models[:NAMED_MAX]) or "empty"
            more = f" and {len(models) - NAMED_MAX} more" if len(models) > NAMED_MAX else ""
            return f"the catalog is now {few}{more}"
        case ShutdownAsked(grace_ms=grace_ms):
            return f"shutdown asked, grace {grace_ms} ms"
        case TimePassed():
            return "time passed"
        case _:
            assert_never(event)


def _effect(effect: Effect) -> str:
    match effect:
        case Grant(request=request, replica=replica, waited_ms=waited_ms, why=why):
            return f"grant {request} on {replica} after {waited_ms} ms" + _because(why)
        case Refuse(request=request, refusal=refusal):
            again = refusal.retry_after_ms
            back = f", back in {again // 1_000} s" if again is not None else ""
            return f"refuse {request}: {refusal.code.value}{back}; {refusal.message}"
        case Loaded(request=request, replica=replica):
            return f"tell {request} that {replica} is loaded"
        case Leased(lease=lease, model=model, replica=replica, waited_ms=waited_ms):
            return f"lease {replica} of {model} to {lease} after {waited_ms} ms"
        case LeaseEnded(lease=lease, model=model, replica=replica, why=why):
            return f"end {lease} on {replica} of {model}: {why}"
        case Tell(model=model, text=text):
            return f"tell the waiting of {model}: {text}"
        case Start(replica=replica, model=model, placement=placement, why=why):
            return f"start {replica} of {model} on {_where(placement)}" + _because(why)
        case Stop(replica=replica, model=model, why=why):
            return f"stop {replica} of {model}" + _because(why)
        case _:
            assert_never(effect)


def snapshot(state: State) -> dict[str, object]:
    """What users may see of the state; times are relative to now, in seconds or MiB."""
    return {
        "models": [_model(state, demand) for demand in state.demands.values()],
        "devices": [
            {
                "id": device,
                "node": node,
                "memory_mib": total,
                "used_mib": state.ledger.used_mib((node, device)),
                "promised_mib": _promised_mib(state, node, device),
            }
            for node, devices in state.ledger.totals.items()
            for device, total in devices.items()
        ],
        "shutting_down": state.is_shutting_down,
    }


def model_state(state: State, demand: Demand) -> str:
    """One word for a model: `ready`, `loading`, `draining`, `stopping`, `waiting` (wanted,
    no replica yet), `failed` (its last try, or it
    went down by itself), `off`, or `cold`."""
    phases = {replica.phase for replica in demand.replicas.values()}
    for phase, word in (
        (Phase.READY, "ready"),
        (Phase.STARTING, "loading"),
        (Phase.DRAINING, "draining"),
        (Phase.STOPPING, "stopping"),
    ):
        if phase in phases:
            return word
    if demand.model.scaling.is_off:
        return "off"
    if demand.is_cooling(state.now_ms):
        return "failed"
    if demand.waiting or demand.told:
        return "waiting"
    return "failed" if demand.failure is not None else "cold"


def _model(state: State, demand: Demand) -> dict[str, object]:
    scaling = demand.model.scaling
    return {
        "name": demand.model.name,
        "state": model_state(state, demand),
        "scaling": {
            "min": scaling.min,
            "max": scaling.max,
            "idle_timeout_s": scaling.idle_timeout_ms / 1_000,
            "kind": scaling.kind,
        },
        "memory_mib": demand.model.memory_mib,
        "waiting": len(demand.waiting),
        "expected_back": len(demand.told),
        "reason": demand.telling.text if demand.telling is not None else None,
        "eta_s": _seconds(eta_ms(state, demand)) if demand.telling is not None else None,
        "last_failure": demand.failure.detail if demand.failure is not None else None,
        "load_s": _seconds(demand.load_ms),
        "loads": demand.loads,
        "pinned": demand.is_pinned,
        "removed": demand.is_removed,
        "priority": demand.model.priority,
        "replicas": [_replica(state, replica) for replica in demand.replicas.values()],
    }


def _replica(state: State, replica: Replica) -> dict[str, object]:
    return {
        "id": replica.id,
        "phase": replica.phase.value,
        "phase_s": (state.now_ms - replica.phase_since_ms) / 1_000,
        "node": replica.placement.node,
        "devices": list(replica.placement.devices),
        "memory_mib": list(replica.placement.memory_mib),
        "in_flight": len(replica.grants),
        "leases": len(replica.leases),
        "held_s": _held_s(state, replica),
        "closed": replica.closed_for is not None,
        "idle_s": (state.now_ms - replica.last_use_ms) / 1_000 if replica.is_idle else None,
        "why": replica.stop_why or replica.why,
    }


def _held_s(state: State, replica: Replica) -> float:
    """How long an idle one is kept for its callers; one at work stays anyway."""
    held_ms = state.demand_of(replica).held_until_ms - state.now_ms
    return max(0, held_ms) / 1_000 if replica.is_idle else 0.0


def _promised_mib(state: State, node: str, device: str) -> int:
    return sum(
        mib
        for demand in state.demands.values()
        if demand.promise is not None and demand.promise.placement.node == node
        for id_, mib in zip(
            demand.promise.placement.devices, demand.promise.placement.memory_mib, strict=True
        )
        if id_ == device
    )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1_000


def _because(why: str) -> str:
    return f"; {why}" if why else ""


def _where(placement: Placement) -> str:
    listed = " + ".join(f"{device} {mib} MiB" for device, mib in placement.shares())
    return f"{placement.node} {listed}".rstrip()
