"""Who leaves, and for whom: the cheapest sufficient set of victims.

Think of clearing a shelf for a parcel: look at each shelf that could hold it, take down the
things least likely to be missed until it fits, put back whatever turned out not to be in the
way, and clear the shelf where that hurts least. What an eviction costs is one function,
`value`; it is the least recent use for now, so it is where a better rule goes.

The planner is a pure question, asked often and therefore silent: who *may* leave is the
scheduler's to say (`Candidate`), and acting on the answer is the scheduler's too. Searching
all subsets was refused: devices hold a handful of replicas and the greedy answer with the
superfluous put back is the same or within one victim of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rota.core.ledger import DeviceRoom
from rota.core.placement import allowed, need_mib, placement_on
from rota.core.types import DeviceId, Model, NodeId, Placement, ReplicaId

Cost = tuple[tuple[bool, int], ...]
"""What leaving costs: the value of each victim, the dearest first; the empty one is the least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may be made to leave.

    Args:
        holds_mib: its memory on each device of the node.
        last_use_ms: when its last grant ended, or when it became ready.
        is_busy: whether work must end before it can go.
    """

    replica: ReplicaId
    holds_mib: Mapping[DeviceId, int]
    last_use_ms: int
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the replica will go once `victims` are gone, and what their going costs."""

    placement: Placement
    victims: tuple[ReplicaId, ...]
    cost: Cost


def value(candidate: Candidate) -> tuple[bool, int]:
    """What is lost by evicting it; the least is evicted first.

    Work that must be waited for costs most; then the least recently used goes.
    """
    return (candidate.is_busy, candidate.last_use_ms)


def plan(
    model: Model, node: NodeId, rooms: Sequence[DeviceRoom], candidates: Sequence[Candidate]
) -> Plan | None:
    """The cheapest way to hold a replica of `model` on this node, or None if there is none.

    Devices are taken one by one, the cheapest next, since a victim that leaves one device
    leaves all it was on. Memory that is already coming free costs nothing.
    """
    chosen: list[DeviceRoom] = []
    victims: dict[ReplicaId, Candidate] = {}
    open_rooms = allowed(model, rooms)
    ranked: dict[DeviceId, list[Candidate]] = {}
    for candidate in sorted(candidates, key=value):
        for device in candidate.holds_mib:
            ranked.setdefault(device, []).append(candidate)
    while len(chosen) < model.device_count:
        offers = [
            (_cost(offer), index, offer)
            for index, room in enumerate(open_rooms)
            if (offer := _clear(room, need_mib(model, room), ranked.get(room.id, ()), victims))
            is not None
        ]
        if not offers:
            return None
        _, index, offer = min(offers, key=lambda found: found[:2])
        chosen.append(open_rooms.pop(index))
        victims |= {candidate.replica: candidate for candidate in offer}
    taken = {room.id for room in chosen}
    return Plan(
        placement=placement_on(model, node, [room for room in rooms if room.id in taken]),
        victims=tuple(sorted(victims, key=lambda replica: value(victims[replica]))),
        cost=_cost(list(victims.values())),
    )


def _clear(
    room: DeviceRoom,
    need: int,
    ranked: Sequence[Candidate],
    already: Mapping[ReplicaId, Candidate],
) -> list[Candidate] | None:
    """The further victims that make `need` fit into this device; None if all are not enough.

    Args:
        ranked: those who hold memory of it, the least valuable first.
        already: those who leave anyway.
    """
    have = room.free + room.coming
    have += sum(candidate.holds_mib.get(room.id, 0) for candidate in already.values())
    victims: list[Candidate] = []
    for candidate in ranked:
        if have >= need:
            break
        if candidate.replica not in already:
            victims.append(candidate)
            have += candidate.holds_mib[room.id]
    if have < need:
        return None
    for candidate in sorted(victims, key=value, reverse=True):  # put back what is not in the way
        if have - candidate.holds_mib[room.id] >= need:
            victims.remove(candidate)
            have -= candidate.holds_mib[room.id]
    return victims


def _cost(victims: Sequence[Candidate]) -> Cost:
    """Costs compare by the dearest victim first, then the next, then by how many."""
    return tuple(sorted((value(candidate) for candidate in victims), reverse=True))
