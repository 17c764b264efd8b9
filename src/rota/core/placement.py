"""Where a replica goes when there is room: one node, the devices there that it fits best.

Think of parking: a small car goes into the smallest gap that takes it, so that the long gap
stays for the lorry. Best fit packs the small models together and leaves whole devices for
large ones, which is what saves evictions when there are more models than memory. Spreading
(each replica to the emptiest device) was refused: it makes a large model evict something on
every device. Ties go to the order in which the devices are stated.

Pure: a model and the room there is go in, a placement comes out. Making room where there is
none is `eviction`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rota.core.ledger import DeviceRoom
from rota.core.types import Device, Model, NodeId, Placement


def need_mib(model: Model, room: DeviceRoom) -> int:
    """What a replica takes of this device; an unknown footprint takes all of it."""
    return room.total if model.memory_mib is None else model.memory_mib


def allowed(model: Model, rooms: Iterable[DeviceRoom]) -> list[DeviceRoom]:
    """The devices it may be placed on and could ever fit."""
    return [
        room
        for room in rooms
        if (model.devices is None or room.id in model.devices)
        and need_mib(model, room) <= room.total
    ]


def placement_on(model: Model, node: NodeId, rooms: Sequence[DeviceRoom]) -> Placement:
    """The placement that takes these devices, in their stated order."""
    return Placement(
        node=node,
        devices=tuple(room.id for room in rooms),
        memory_mib=tuple(need_mib(model, room) for room in rooms),
    )


def place(model: Model, node: NodeId, rooms: Sequence[DeviceRoom]) -> Placement | None:
    """The placement in memory that is free now, or None if there is none on this node."""
    fitting = [room for room in allowed(model, rooms) if need_mib(model, room) <= room.free]
    if len(fitting) < model.device_count:
        return None
    tightest = sorted(fitting, key=lambda room: room.free - need_mib(model, room))
    chosen = {room.id for room in tightest[: model.device_count]}
    return placement_on(model, node, [room for room in rooms if room.id in chosen])


def could_ever_fit(model: Model, devices: Iterable[Device]) -> bool:
    """Whether a node with these devices, all of them empty, could hold a replica."""
    rooms = [DeviceRoom(d.id, d.memory_mib, d.memory_mib, 0) for d in devices]
    return len(allowed(model, rooms)) >= model.device_count
