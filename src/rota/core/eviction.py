"""Who leaves, and for whom: the cheapest sufficient set of victims.

Think of clearing a shelf for a parcel: look at each shelf that could hold it, take down the
things least likely to be missed until it fits, put back whatever turned out not to be in the
way, and clear the shelf where that hurts least. What an absence costs comes with each
candidate (`loss_ms`, see `worth`); who goes first is one function, `value`, by the loss for each
MiB that is gained. Where all lose the same, as with `eviction: lru`, it is the least recent use.

The planner is a pure question, asked often and therefore silent: who *may* leave is the
scheduler's to say (`Candidate`), and acting on the answer is the scheduler's too. Searching
all subsets was refused: devices hold a handful of replicas, and the greedy answer with the
superfluous put back, or the one victim that does alone, is the same or close to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from rota.core.coexistence import Option
from rota.core.ledger import DeviceRoom
from rota.core.placement import allowed, need_mib, placement_on
from rota.core.types import DeviceId, Model, NodeId, Placement, ReplicaId

Cost = tuple[tuple[int, ...], float, tuple[int, ...]]
"""What leaving costs: work to wait for, by its last use; what is lost by the absence of the idle;
their last uses. Of last uses the latest counts first, then how many there are."""
NOTHING: Cost = ((), 0.0, ())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may be made to leave.

    Args:
        holds_mib: its memory on each device of the node.
        last_use_ms: when its last grant ended, or when it became ready.
        is_busy: whether work must end before it can go.
        loss_ms: what its absence is expected to cost; of one at work it is not asked.
    """

    replica: ReplicaId
    holds_mib: Mapping[DeviceId, int]
    last_use_ms: int
    is_busy: bool = False
    loss_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the replica will go once `victims` are gone, and what their going costs.

    Args:
        rule: which of them may not stand beside it, and who says so; None = memory alone.
    """

    placement: Placement
    victims: tuple[ReplicaId, ...]
    cost: Cost
    rule: Option | None = None


def value(candidate: Candidate) -> tuple[bool, float, int]:
    """What keeps a replica where it is; the least is evicted first.

    Work that must be waited for keeps it most, the latest used longest. An idle one is kept by
    what its absence costs for each MiB that it gives back, wherever; then by its last use.
    """
    if candidate.is_busy:
        return (True, 0.0, candidate.last_use_ms)
    gain_mib = max(1, sum(candidate.holds_mib.values()))
    return (False, candidate.loss_ms / gain_mib, candidate.last_use_ms)


def least_cost(candidates: Iterable[Candidate]) -> Cost:
    """What no plan that makes some of these leave can be cheaper than."""
    return min(map(_cost_of_one, candidates))


def plan(
    model: Model,
    node: NodeId,
    rooms: Sequence[DeviceRoom],
    candidates: Sequence[Candidate],
    forced: Sequence[Candidate] = (),
) -> Plan | None:
    """The cheapest way to hold a replica of `model` on this node, or None if there is none.

    Args:
        candidates: who may leave.
        forced: those of them that leave in any case.

    Devices are taken one by one, the cheapest next, since a victim that leaves one device
    leaves all it was on. Memory that is already coming free costs nothing.
    """
    chosen: list[DeviceRoom] = []
    victims: dict[ReplicaId, Candidate] = {c.replica: c for c in forced}
    open_rooms = allowed(model, rooms)
    ranked: dict[DeviceId, list[Candidate]] = {}
    for candidate in sorted(candidates, key=value):
        for device in candidate.holds_mib:
            ranked.setdefault(device, []).append(candidate)
    while len(chosen) < model.device_count:
        offers = [
            (_cost(offer), index, offer)
            for index, room in enumerate(open_rooms)
            if (offer := _clear(model, room, ranked.get(room.id, ()), victims)) is not None
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
    model: Model,
    room: DeviceRoom,
    ranked: Sequence[Candidate],
    already: Mapping[ReplicaId, Candidate],
) -> list[Candidate] | None:
    """The further victims that make room on this device; None if all are not enough.

    Args:
        ranked: those who hold memory of it, the least valuable first.
        already: those who leave anyway.
    """
    gone_mib = sum(candidate.holds_mib.get(room.id, 0) for candidate in already.values())
    lack_mib = need_mib(model, room) - room.free - room.coming - gone_mib
    others = [candidate for candidate in ranked if candidate.replica not in already]
    victims: list[Candidate] = []
    for candidate in others:
        if lack_mib <= 0:
            break
        victims.append(candidate)
        lack_mib -= candidate.holds_mib[room.id]
    if lack_mib > 0:
        return None
    for candidate in sorted(victims, key=_cost_of_one, reverse=True):
        if lack_mib + candidate.holds_mib[room.id] <= 0:  # it is not in the way: put it back
            victims.remove(candidate)
            lack_mib += candidate.holds_mib[room.id]
    if model.device_count > 1:  # what else its victims free is wanted too
        return victims
    # For each MiB these cost little; one that does alone may cost less.
    least_mib = lack_mib + sum(candidate.holds_mib[room.id] for candidate in victims)
    loss_ms = fsum(victim.loss_ms for victim in victims)
    alone = [
        [candidate]
        for candidate in others
        if candidate.loss_ms < loss_ms and candidate.holds_mib[room.id] >= least_mib
    ]
    return min([victims, *alone], key=_cost)


def _cost(victims: Sequence[Candidate]) -> Cost:
    busy = sorted((victim.last_use_ms for victim in victims if victim.is_busy), reverse=True)
    idle = sorted((victim.last_use_ms for victim in victims if not victim.is_busy), reverse=True)
    loss_ms = fsum(victim.loss_ms for victim in victims if not victim.is_busy)
    return (tuple(busy), loss_ms, tuple(idle))


def _cost_of_one(victim: Candidate) -> Cost:
    last_use = (victim.last_use_ms,)
    return (last_use, 0.0, ()) if victim.is_busy else ((), victim.loss_ms, last_use)
