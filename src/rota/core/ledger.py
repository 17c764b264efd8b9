"""Memory accounts: what each device has, and which replica takes how much of it.

A replica is booked from its `Start` until `ReplicaStopped`: memory is free when it has been
seen free, never when somebody was told to leave (docs/adr/0002). The books are kept as
events come, so that a question costs the devices asked about and not the whole fleet;
`invariants.check` adds them up anew after every step of a test.

Promises are not booked here. They belong to demands and change with the queue, so a decision
lays them over the books as `claims` (see `rooms`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rota.core.types import Device, DeviceId, NodeId, Placement, ReplicaId

DeviceKey = tuple[NodeId, DeviceId]


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """One device as one decision sees it, in MiB.

    Args:
        total: the budget.
        free: neither taken nor claimed by an earlier demand; negative while memory that was
            claimed is still on its way.
        coming: held by replicas that are on their way out.
    """

    id: DeviceId
    total: int
    free: int
    coming: int


class Ledger:
    """Who holds what on which device."""

    def __init__(self) -> None:
        self.totals: dict[NodeId, dict[DeviceId, int]] = {}
        self.held: dict[DeviceKey, dict[ReplicaId, int]] = {}
        self.leaving: set[ReplicaId] = set()
        self._used: dict[DeviceKey, int] = {}
        self._coming: dict[DeviceKey, int] = {}
        self._roomiest: dict[NodeId, int] = {}

    def join(self, node: NodeId, devices: tuple[Device, ...]) -> None:
        """Open the books of a node's devices; one that is known keeps what it holds."""
        self.totals[node] = {device.id: device.memory_mib for device in devices}
        self._roomiest.pop(node, None)
        for device in devices:
            self.held.setdefault((node, device.id), {})
            self._used.setdefault((node, device.id), 0)
            self._coming.setdefault((node, device.id), 0)

    def leave_node(self, node: NodeId) -> None:
        """Close the books of a node that is gone; nobody holds anything of it any more."""
        for device in self.totals.pop(node):
            key = (node, device)
            assert not self.held.pop(key), key
            del self._used[key], self._coming[key]
        self._roomiest.pop(node, None)

    def book(self, replica: ReplicaId, placement: Placement) -> None:
        """Write a replica's memory down as taken."""
        for device, mib in placement.shares():
            key = (placement.node, device)
            assert replica not in self.held[key], (replica, key)
            self.held[key][replica] = mib
            self._used[key] += mib
        self._roomiest.pop(placement.node, None)

    def leave(self, replica: ReplicaId, placement: Placement) -> None:
        """Note that a replica was told to go: its memory is on its way."""
        self.leaving.add(replica)
        for device in placement.devices:
            key = (placement.node, device)
            self._coming[key] += self.held[key][replica]
        self._roomiest.pop(placement.node, None)

    def release(self, replica: ReplicaId, placement: Placement) -> None:
        """Cross a replica's memory out: it has been seen free."""
        for device in placement.devices:
            key = (placement.node, device)
            mib = self.held[key].pop(replica)
            self._used[key] -= mib
            if replica in self.leaving:
                self._coming[key] -= mib
        self.leaving.discard(replica)
        self._roomiest.pop(placement.node, None)

    def used_mib(self, key: DeviceKey) -> int:
        return self._used[key]

    def coming_mib(self, key: DeviceKey) -> int:
        return self._coming[key]

    def roomiest_mib(self, node: NodeId) -> int:
        """The most that is free, or will be once all that leaves has left, on one device of a node;
        a full node need not be looked at device by device."""
        known = self._roomiest.get(node)
        if known is None:
            known = max((room.free + room.coming for room in self.rooms(node, {})), default=0)
            self._roomiest[node] = known
        return known

    def rooms(self, node: NodeId, claims: Mapping[DeviceKey, int]) -> list[DeviceRoom]:
        """A node's devices, in their stated order, after `claims`."""
        return [
            DeviceRoom(
                id=device,
                total=total,
                free=total - self._used[node, device] - claims.get((node, device), 0),
                coming=self._coming[node, device],
            )
            for device, total in self.totals[node].items()
        ]
