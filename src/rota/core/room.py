"""Questions about room: where a model fits, now or after somebody leaves.

The scheduler asks, decides and orders; here is only what is so. Each question takes the
`claims` of the demands that come first: memory they were promised is not there for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rota.core.eviction import Candidate, Plan, plan
from rota.core.ledger import DeviceKey
from rota.core.placement import could_ever_fit, place
from rota.core.state import Demand, Promise, Rank, Replica, State
from rota.core.types import Device, Model, Phase, Placement, ReplicaId

Claims = Mapping[DeviceKey, int]
"""MiB promised to earlier demands, by device."""


@dataclass(slots=True)
class Outlook:
    """What one walk along the queue has seen so far.

    Args:
        goers: who will or may leave some day; see `goers`.
        claims: memory promised to the demands before.
        leaving: who makes way for the demands before, and for the first of which.
    """

    goers: Sequence[Replica]
    claims: dict[DeviceKey, int] = field(default_factory=dict)
    leaving: dict[ReplicaId, Rank] = field(default_factory=dict)
    idle_at_first: Sequence[Replica] = ()

    def __post_init__(self) -> None:
        self.idle_at_first = [replica for replica in self.goers if replica.is_idle]

    def idle(self) -> list[Replica]:
        """Who is idle and makes way for nobody before; nobody falls idle during a walk."""
        return [r for r in self.idle_at_first if r.is_idle and r.id not in self.leaving]

    def others(self) -> list[Replica]:
        """All who make way for nobody before."""
        return [replica for replica in self.goers if replica.id not in self.leaving]

    def note(self, rank: Rank, promise: Promise) -> None:
        """Take a promise in: what comes later on the walk sees it."""
        for device, mib in promise.placement.shares():
            key = (promise.placement.node, device)
            self.claims[key] = self.claims.get(key, 0) + mib
        for replica_id in promise.leaving:
            self.leaving.setdefault(replica_id, rank)


def free_place(state: State, model: Model, claims: Claims) -> Placement | None:
    """Where it fits in memory that is free and promised to nobody before it."""
    for node in state.ledger.totals:
        if model.is_external:
            return Placement(node, (), ())
        placement = place(model, node, state.ledger.rooms(node, claims))
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
    plans = []
    for node in state.ledger.totals:
        candidates = [
            _candidate(state, replica)
            for replica in victims
            if replica.placement.node == node and not replica.is_leaving
        ]
        found = plan(model, node, state.ledger.rooms(node, claims), candidates)
        if found is not None:
            plans.append(found)
    return min(plans, key=lambda found: found.cost, default=None)


def still_stands(state: State, promise: Promise, claims: Claims) -> bool:
    """Whether a promise will be good once all that leaves has left."""
    node = promise.placement.node
    have = {room.id: room.free + room.coming for room in state.ledger.rooms(node, claims)}
    for replica_id in promise.leaving - state.ledger.leaving:
        replica = state.replicas.get(replica_id)
        if replica is not None and replica.placement.node == node:
            for device, mib in replica.placement.shares():
                have[device] += mib
    return all(have[device] >= mib for device, mib in promise.placement.shares())


def could_come_free(state: State, model: Model) -> bool:
    """Whether it would fit if everyone left who ever may: only what `min` keeps stays."""
    if not any(demand.model.scaling.is_always for demand in state.demands.values()):
        return fits_somewhere(state, model)
    return best_plan(state, model, {}, goers(state)) is not None


def may_go(state: State, replica: Replica, rank: Rank, *, honours_holds: bool) -> bool:
    """Whether it may leave at once for a demand of this rank: idle, owed to nobody, not held
    against this demand, and not wanted by callers who come first, for whom it would only have
    to be loaded again."""
    demand = state.demand_of(replica)
    if not replica.is_idle or demand.is_owed:
        return False
    honours_holds |= state.now_ms < replica.resident_until_ms
    if honours_holds and demand.held_until_ms > state.now_ms:
        return False
    head = demand.head()
    return head is None or rank < head


def goers(state: State) -> list[Replica]:
    """Everyone who will or may leave some day, whatever keeps it now: less each model's
    `min`, for which those are kept that are hardest to lose."""
    by_model: dict[str, list[Replica]] = {}
    found: list[Replica] = []
    for replica in state.replicas.values():
        if replica.is_live and replica.placement.devices:
            by_model.setdefault(replica.model.name, []).append(replica)
        elif replica.phase is Phase.DRAINING:
            found.append(replica)
    for name, group in by_model.items():
        demand = state.demands[name]
        pinned = 0 if demand.is_held_down else demand.model.scaling.min
        group.sort(key=lambda replica: (not replica.is_idle, replica.last_use_ms))
        found += group[: max(0, len(group) - pinned)]
    return found


def holders(state: State, demand: Demand) -> list[str]:
    """The models whose `min` keeps memory from this demand."""
    return [
        other.model.name
        for other in state.demands.values()
        if other.model.scaling.is_always and other is not demand and other.replicas
    ]


def _candidate(state: State, replica: Replica) -> Candidate:
    """As the planner sees it; one that has yet to serve is as good as used this instant."""
    placement = replica.placement
    has_yet_to_serve = replica.phase is Phase.STARTING or state.demand_of(replica).is_owed
    return Candidate(
        replica=replica.id,
        holds_mib=dict(placement.shares()),
        last_use_ms=state.now_ms if has_yet_to_serve else replica.last_use_ms,
        is_busy=has_yet_to_serve or not replica.is_idle,
    )
