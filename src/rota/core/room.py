"""Questions about room: where a model fits, now or after somebody leaves.

The scheduler asks, decides and orders; here is only what is so. Each question takes the
`claims` of the demands that come first: memory they were promised is not there for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rota.core.eviction import Candidate, Plan, plan
from rota.core.ledger import DeviceKey
from rota.core.placement import could_ever_fit, place
from rota.core.state import Demand, Promise, Replica, State
from rota.core.types import Device, Model, Phase, Placement

Claims = Mapping[DeviceKey, int]
"""MiB promised to earlier demands, by device."""


def free_place(state: State, model: Model, claims: Claims) -> Placement | None:
    """Where it fits in memory that is free and promised to nobody before it."""
    for node in state.ledger.totals:
        if model.is_external:
            return Placement(node, (), ())
        placement = place(model, node, state.ledger.rooms(node, claims, ()))
        if placement is not None:
            return placement
    return None


def fits_somewhere(state: State, model: Model) -> bool:
    """Whether some node could hold it if it were empty."""
    return any(
        could_ever_fit(model, [Device(device, total) for device, total in devices.items()])
        for devices in state.ledger.totals.values()
    )


def best_plan(
    state: State, model: Model, claims: Claims, victims: Sequence[Replica]
) -> Plan | None:
    """The cheapest plan over all nodes that needs no others than these to leave."""
    leaving = {replica.id for replica in state.replicas.values() if replica.is_leaving}
    plans = []
    for node in state.ledger.totals:
        candidates = [_candidate(r) for r in victims if r.placement.node == node]
        found = plan(model, node, state.ledger.rooms(node, claims, leaving), candidates)
        if found is not None:
            plans.append(found)
    return min(plans, key=lambda found: found.cost, default=None)


def still_stands(state: State, promise: Promise, claims: Claims) -> bool:
    """Whether a promise will be good once all that leaves has left."""
    placement = promise.placement
    leaving = {replica.id for replica in state.replicas.values() if replica.is_leaving}
    rooms = state.ledger.rooms(placement.node, claims, leaving | promise.leaving)
    have = {room.id: room.free + room.coming for room in rooms}
    wanted = zip(placement.devices, placement.memory_mib, strict=True)
    return all(have[device] >= mib for device, mib in wanted)


def idle_victims(state: State) -> list[Replica]:
    """Who may be made to leave at once."""
    return [replica for replica in victims_past_patience(state) if replica.is_idle]


def victims_past_patience(state: State) -> list[Replica]:
    """Who may be made to leave once its work has ended: ready, not owed, above `min`."""
    spoken_for = {r for d in state.demands.values() if d.promise for r in d.promise.leaving}
    return [
        replica
        for replica in _above_min(state, state.replicas.values())
        if replica.phase is Phase.READY
        and replica.id not in spoken_for
        and not state.demand_of(replica).is_owed
    ]


def goers(state: State) -> list[Replica]:
    """Everyone who will or may be gone some day, whatever keeps it now."""
    return [r for r in _above_min(state, state.replicas.values()) if not r.is_leaving]


def holders(state: State, demand: Demand) -> list[str]:
    """The models whose `min` keeps memory from this demand."""
    return [
        other.model.name
        for other in state.demands.values()
        if other.model.scaling.is_always and other is not demand and other.replicas
    ]


def _above_min(state: State, replicas: Iterable[Replica]) -> list[Replica]:
    """Less each model's `min`: those kept are the ones hardest to lose."""
    by_model: dict[str, list[Replica]] = {}
    for replica in replicas:
        if replica.placement.devices and not replica.is_leaving:
            by_model.setdefault(replica.model.name, []).append(replica)
    found: list[Replica] = []
    for name, group in by_model.items():
        demand = state.demands[name]
        pinned = 0 if demand.is_held_down else demand.model.scaling.min
        group.sort(key=lambda replica: (not replica.is_idle, replica.last_use_ms))
        found += group[: max(0, len(group) - pinned)]
    return found


def _candidate(replica: Replica) -> Candidate:
    placement = replica.placement
    return Candidate(
        replica=replica.id,
        holds_mib=dict(zip(placement.devices, placement.memory_mib, strict=True)),
        last_use_ms=replica.last_use_ms,
        is_busy=not replica.is_idle,
    )
