"""What callers are told: reasons, refusals, and when to come back. Pure, and only words.

A sentence here names what is waited for and what would help, never a status code: those are
the gateway's. Estimates are None rather than guessed; a caller is then told the longest
pause that every SDK obeys, so that three tries of an unmodified one cover four minutes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import assert_never
from zlib import crc32

from rota.core import worth
from rota.core.effects import Refusal, RefusalCode, Tell, WaitKind
from rota.core.room import (
    NAMED_MAX,
    UNPROMISED,
    Outlook,
    fits_somewhere,
    free_place,
    holders,
    in_the_way,
)
from rota.core.state import Demand, Replica, State
from rota.core.types import Eviction, Model, ModelName, Phase, ReplicaId, RequestId

RETRY_MS_MIN = 2_000
RETRY_MS_MAX = 60_000
"""Bounds on what a caller is told. SDKs of 2024 and 2025 ignore a `Retry-After` over 60 s."""
RETRY_JITTER_MS = 2_000
"""Spread over those who wait. Answers are whole seconds, so less than two would spread nobody."""
SLOTLESS_MAX = 1_000
"""Loads asked for by hand, and leases, that may wait for one model; they are in nobody's queue."""
NAMES_MAX = NAMED_MAX - 1
"""Models named in one sentence."""
STOP_MS_EXPECTED = 1_000
"""What an engine that obeys SIGTERM takes to end, with room to spare."""


def eta_ms(state: State, demand: Demand) -> int | None:
    """When the model is expected to serve one who waits, from now; None = not known."""
    taking = sum(1 for replica in demand.ready() if replica.closed_for is None)
    if taking:
        if demand.serve_ms is None:
            return None
        slots = demand.model.slots * taking
        return demand.serve_ms * (len(demand.waiting) // slots + 1)
    if demand.load_ms is None:
        return None
    loading = [r.phase_since_ms for r in demand.replicas.values() if r.phase is Phase.STARTING]
    if loading:
        # One that is late is expected to be late by as much again.
        return abs(min(loading) + demand.load_ms - state.now_ms)
    if demand.promise is not None and not demand.promise.is_barrier:
        return STOP_MS_EXPECTED + demand.load_ms
    return None


def retry_after_ms(state: State, demand: Demand, request: RequestId) -> int:
    """When to come back, in whole seconds: the estimate, spread a little by request, so that
    all who wait do not come back at one instant."""
    estimate = eta_ms(state, demand)
    if estimate is None:
        return RETRY_MS_MAX
    return _bounded(estimate + crc32(request.encode()) % RETRY_JITTER_MS)


def reason(state: State, demand: Demand, outlook: Outlook | None = None) -> Tell:
    """What a model's callers wait for.

    Args:
        outlook: of the walk that asks, which knows what is the same for many.
    """
    name = demand.model.name

    def tell(kind: WaitKind, text: str) -> Tell:
        return Tell(name, kind, text, eta_ms(state, demand))

    if any(replica.closed_for is None for replica in demand.ready()):
        return tell(WaitKind.SLOT, f"every slot of {name} is taken")
    if demand.is_loading:
        return tell(WaitKind.LOADING, f"{name} is loading")
    if demand.is_served:
        return tell(WaitKind.TURN, f"{name} makes way for a demand that waited longer")
    if demand.replicas:
        return tell(WaitKind.ROOM, f"{name} is ending and will be loaded anew")
    if demand.is_cooling(state.now_ms):
        return tell(WaitKind.COOLDOWN, f"{name} failed and is cooling down")
    if demand.promise is not None:
        leaving = ", ".join(demand.promise.leavers)
        if not leaving and demand.promise.quieting:
            quiet = _names(_models(state, demand.promise.quieting))
            return tell(WaitKind.ROOM, f"waiting for {quiet} to fall quiet")
        if not leaving:
            return tell(WaitKind.ROOM, "memory is coming free")
        if not demand.promise.is_barrier:
            return tell(WaitKind.ROOM, f"waiting for {leaving} to leave")
        leased = _leased(state, demand.promise.leaving)
        return tell(WaitKind.ROOM, f"waiting for {leaving} to finish and leave{leased}")
    if demand.replicas_wanted() > 0 and demand.is_doubtful:
        text = f"{name} failed {demand.failures} times in a row and makes nobody leave for now"
        return tell(WaitKind.ROOM, text)
    look = in_the_way if outlook is None else outlook.in_the_way
    rivals = look(state, demand.model)
    if demand.replicas_wanted() > 0:
        held = _names(r.model.name for r in rivals if _is_held(state, r))
        if held:
            return tell(WaitKind.HOLD, f"{held} is kept a little for its caller's next request")
        if state.exclusive and free_place(state, demand.model, UNPROMISED) is not None:
            working = _names(r.model.name for r in state.exclusive.values() if r.is_busy)
            return tell(WaitKind.WORK, f"{working} bears no load beside its work")
        if state.lost and not fits_somewhere(state, demand.model):
            return tell(WaitKind.ROOM, f"waiting for node {', '.join(sorted(state.lost))}")
        first = _names(other for other in state.wanting if state.demands[other].promise)
        if first and not rivals:
            return tell(WaitKind.TURN, f"what comes free is promised to {first}")
    names = _names(replica.model.name for replica in rivals) or "memory"
    leased = _leased(state, {replica.id for replica in rivals})
    return tell(WaitKind.WORK, f"waiting for {names} to come free{leased}")


def start_reason(demand: Demand) -> str:
    """Why a replica is started, and what had to happen first."""
    name = demand.model.name
    if not demand.waiting and not demand.told:
        return f"{name} is preloaded" if demand.missing is None else f"{name} is kept loaded"
    if demand.is_crowded and not demand.replicas_needed():
        return f"every slot of {name} was taken for {demand.model.scale_up_after_ms / 1_000:g} s"
    leavers = ", ".join(demand.promise.leavers) if demand.promise is not None else ""
    return f"{name} was not loaded" + (f"; {leavers} left to make room" if leavers else "")


def eviction_reason(state: State, demand: Demand, victim: Replica) -> str:
    """Why this replica leaves."""
    if victim.phase is Phase.STARTING:
        return f"called off: nobody waits for it, and {demand.model.name} needs its room"
    rule = None if demand.promise is None else demand.promise.rule
    if rule is not None and victim.model.name in rule.leaving:
        return f"makes room for {demand.model.name}: {rule.rule}"
    idle_s = (state.now_ms - victim.last_use_ms) / 1_000
    text = f"makes room for {demand.model.name}; not used for {idle_s:.1f} s"
    if state.eviction is Eviction.LRU:
        return text
    known = state.demand_of(victim)
    load_s = worth.reload_ms(known.load_ms) / 1_000
    per_hour = known.history.per_hour(state.now_ms)
    return f"{text}, wanted {_how_often(per_hour)}, {load_s:.0f} s to load again"


def _how_often(per_hour: float) -> str:
    if per_hour >= 2:
        return f"about {per_hour:.0f} times an hour"
    per_day = 24 * per_hour
    return f"about {per_day:.0f} times a day" if per_day >= 2 else "seldom"


def not_found(model: str) -> Refusal:
    """The refusal for a name that is not in the catalog."""
    text = f"There is no model named {model!r} here; GET /v1/models lists those there are."
    return Refusal(RefusalCode.MODEL_NOT_FOUND, text)


def refusal(state: State, demand: Demand, code: RefusalCode, request: RequestId) -> Refusal:
    """A refusal in words, with when to come back where that makes sense."""
    name = demand.model.name
    retry_ms: int | None = None
    match code:
        case RefusalCode.MODEL_OFF:
            text = f"{name} is configured and switched off: its scaling allows no replica."
        case RefusalCode.MODEL_FAILED:
            text = _why_never(state, demand)
        case RefusalCode.MODEL_COOLING:
            retry_ms = _bounded(demand.cooldown_until_ms - state.now_ms)
            text = f"{name} failed and is tried again later. {_last_words(demand)}"
        case RefusalCode.QUEUE_FULL:
            retry_ms = retry_after_ms(state, demand, request)
            full = f"The queue of {name} is full ({len(demand.waiting)} waiting)."
            heavy = f"The requests that wait hold {state.queue_bytes >> 20} MiB, which is the most."
            requests = len(demand.waiting) - demand.slotless
            is_full = requests >= demand.model.queue_max or demand.slotless >= SLOTLESS_MAX
            text = full if is_full else heavy
        case RefusalCode.MODEL_BUSY:
            retry_ms = retry_after_ms(state, demand, request)
            text = f"{name} had no free slot in the time this request could wait."
            if demand.model.rejects_when_full:
                text = f"Every slot of {name} is taken, and it is set to reject rather than queue."
        case RefusalCode.MODEL_LOADING | RefusalCode.MODEL_WAITING:
            retry_ms = retry_after_ms(state, demand, request)
            text = f"{name} is not ready yet: {reason(state, demand).text}{_left(state, demand)}."
        case RefusalCode.NO_ROOM:
            kept = ", ".join(holders(state, demand))
            is_free = state.coexistence.is_free
            why = "pinned or always on" if is_free else "pinned, always on or persistent"
            text = f"There is no room for {name}: {kept} may not leave ({why})."
        case RefusalCode.NO_ENDPOINT:
            retry_ms = RETRY_MS_MIN
            text = _told_once(f"{name} is run elsewhere and does not answer.", demand)
        case RefusalCode.NOT_LOADED:
            text = f"{name} has no ready replica to lease; `load: true` would bring it up."
        case RefusalCode.MODEL_UNLOADED:
            text = f"{name} was unloaded by hand while this request waited for it."
        case RefusalCode.SHUTTING_DOWN:
            text = "rota is shutting down."
        case RefusalCode.MODEL_NOT_FOUND:
            return not_found(name)
        case _:
            assert_never(code)
    return Refusal(
        code,
        text.rstrip(),
        retry_ms,
        position=state.position(name) if code is RefusalCode.MODEL_WAITING else None,
        eta_ms=eta_ms(state, demand) if retry_ms is not None else None,
    )


def _bounded(wait_ms: int) -> int:
    """Up to a whole second, within what callers obey."""
    return min(max(-(-wait_ms // 1_000) * 1_000, RETRY_MS_MIN), RETRY_MS_MAX)


def _left(state: State, demand: Demand) -> str:
    estimate = eta_ms(state, demand)
    return "" if estimate is None else f", about {-(-estimate // 1_000)} s left"


def _last_words(demand: Demand) -> str:
    return demand.failure.detail if demand.failure is not None else ""


def _why_never(state: State, demand: Demand) -> str:
    if fits_somewhere(state, demand.model):
        return _told_once(f"{demand.model.name} cannot be started.", demand)
    return f"{demand.model.name} cannot be started. {too_large(state, demand.model)}"


def _told_once(what: str, demand: Demand) -> str:
    """What happened, with the last words; those that name the model say it all by themselves."""
    last = _last_words(demand)
    return last if last.startswith(demand.model.name) else f"{what} {last}"


def too_large(state: State, model: Model) -> str:
    """What a model needs beside what the devices have."""
    need = "its devices whole" if model.memory_mib is None else f"{model.memory_mib} MiB"
    if model.device_count > 1:
        need += f" on each of {model.device_count} devices"
    have = ", ".join(
        f"{device} has {total} MiB"
        for devices in state.ledger.totals.values()
        for device, total in devices.items()
        if model.devices is None or device in model.devices
    )
    return f"It needs {need}; {have or 'there is no device it may use'}."


def _names(models: Iterable[ModelName]) -> str:
    """A few of these, by name, in their order; how many more there are is not counted."""
    names: dict[ModelName, None] = {}
    for name in models:
        names[name] = None
        if len(names) > NAMES_MAX:
            return ", ".join(list(names)[:NAMES_MAX]) + " and others"
    return ", ".join(sorted(names))


def _models(state: State, replicas: Iterable[ReplicaId]) -> Iterator[ModelName]:
    return (state.replicas[r].model.name for r in sorted(replicas) if r in state.replicas)


def _is_held(state: State, replica: Replica) -> bool:
    return replica.is_idle and state.demand_of(replica).held_until_ms > state.now_ms


def _leased(state: State, replicas: Container[ReplicaId]) -> str:
    """That one of these is leased, and what for, if that is said: of several the oldest lease."""
    for lease in state.leases.values():
        if lease.replica in replicas:
            reason = f": {lease.reason}" if lease.reason else ""
            return f" ({state.replicas[lease.replica].model.name} is leased{reason})"
    return ""
