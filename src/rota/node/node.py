"""One machine: carries out `Start` and `Stop`, and says truthfully what became of them.

Each replica lives in one task (`replica.py`). The node owns these tasks, hands out what no
two replicas may share (ports, log files), and posts for each `Start` exactly one
`ReplicaStopped`: when nothing of the engine is left, for that is when its memory is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.parse import quote

from rota.config.values import DeviceConfig, ModelConfig
from rota.core.effects import Start, Stop
from rota.core.events import Event, NodeJoined, ReplicaReady, ReplicaSilent, Running
from rota.core.types import Device, ModelName, NodeId, ReplicaId
from rota.engines.base import Endpoint
from rota.errors import ReplicaError
from rota.node import memory
from rota.node.guards import Guards
from rota.node.records import Records
from rota.node.replica import Replica, obstacle

CLOSE_GRACE_MS = 1_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is to show of a replica. What is None is not known yet, or not ours to know.

    Args:
        pid: the engine's own.
        command: as launched.
        started_at: seconds since the epoch, when its start was ordered.
        log_path: where its output goes; older output is beside it in `.1`.
        is_outdated: whether its model would now be started in another way, or not at all.
    """

    pid: int | None
    port: int | None
    command: tuple[str, ...]
    started_at: float
    log_path: Path
    is_outdated: bool = False


class Node:
    """The replicas of one machine.

    Args:
        devices: as configured; none = the machine's RAM, as one device `cpu`.
        state_dir: where logs and records are kept; its `StateLock` is held by the caller.
        post: takes each event, in the event loop.
    """

    def __init__(
        self,
        node_id: NodeId,
        devices: Sequence[DeviceConfig],
        models: Mapping[str, ModelConfig],
        state_dir: Path,
        post: Callable[[Event], None],
    ) -> None:
        self.id = node_id
        self._devices = tuple(devices) or (DeviceConfig("cpu", memory.available_mib()),)
        self._models = models
        self._logs = state_dir.resolve() / "logs"
        self._post = post
        self._records = Records(state_dir)
        self._guards = Guards()
        self._replicas: dict[ReplicaId, Replica] = {}
        self._lives: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """End what an earlier life left behind, then be ready to start engines.

        Raises:
            OSError: the state directory cannot be used.
        """
        left = await asyncio.to_thread(self._records.sweep)
        if left:
            _log.warning("what an earlier life left behind does not end: %s", sorted(left))
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._guards.open()

    async def close(self) -> None:
        """End every replica, within a second or by SIGKILL. Nothing remains."""
        for replica in self._replicas.values():
            replica.ask(CLOSE_GRACE_MS)
        if self._lives:
            await asyncio.wait(self._lives)
        await self._guards.close()

    def joined(self) -> NodeJoined:
        """The event that tells the core of this node, its devices, and each replica whose start
        was ordered here and whose end has not been told yet."""
        devices = tuple(Device(device.id, device.memory_mib) for device in self._devices)
        orders = ((replica.order, replica.phase) for replica in self._replicas.values())
        running = tuple(
            Running(order.replica, order.model, order.placement, phase) for order, phase in orders
        )
        return NodeJoined(self.id, devices, running)

    def configure(self, models: Mapping[str, ModelConfig]) -> None:
        """From the next start on, models are run like this. What runs stays as it is, save that
        a server that someone else runs is asked at its new URL."""
        self._models = models
        for replica in self._replicas.values():
            if entry := models.get(replica.order.model):
                replica.point_at(entry.engine)

    def obstacle(self, model: ModelName) -> str:
        """What would make any start of a model fail, in words; empty = nothing known."""
        entry = self._models.get(model)
        return "" if entry is None else obstacle(entry)

    def start(self, order: Start) -> None:
        """Bring a replica up. Returns at once; the rest is told by events."""
        assert order.replica not in self._replicas, order
        config = self._models[order.model]
        visible = {device.id: device.visible for device in self._devices}
        placed_on = (visible[device] for device in order.placement.devices)
        replica = self._replicas[order.replica] = Replica(
            order,
            config,
            visible=tuple(name for name in placed_on if name is not None),
            log_path=self._choose_log(config.name),
            guards=self._guards,
            records=self._records,
            taken=lambda: {other.port for other in self._replicas.values()},
            on_ready=lambda: self._post(ReplicaReady(order.replica)),
            on_silent=lambda detail: self._post(ReplicaSilent(order.replica, detail)),
        )
        life = asyncio.create_task(self._live(replica), name=f"replica {replica.id}")
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    def stop(self, order: Stop) -> None:
        """End a replica, also one that is still starting. Returns at once; a second order can
        only shorten the grace of the first; one for a replica that is gone changes nothing."""
        if replica := self._replicas.get(order.replica):
            replica.ask(order.grace_ms)

    def heard(self, replica_id: ReplicaId) -> None:
        """Bytes of an answer came from a replica: it is not silent. Cheap, and for one that is
        gone nothing."""
        if replica := self._replicas.get(replica_id):
            replica.heard()

    def endpoint(self, replica_id: ReplicaId) -> Endpoint:
        """Where a replica answers. Raises ReplicaError (502): it is not up, or gone by now."""
        replica = self._replicas.get(replica_id)
        if replica is None or replica.endpoint is None:
            raise ReplicaError(f"replica {replica_id} is gone", code="replica_gone", status=502)
        return replica.endpoint

    def facts(self, replica_id: ReplicaId) -> Facts | None:
        """What there is to show of a replica; None = it is gone."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        child = replica.child
        return Facts(
            pid=child.pid if child else None,
            port=replica.port,
            command=child.launch.argv if child else (),
            started_at=replica.started_at,
            log_path=replica.log_path,
            is_outdated=_is_outdated(replica.config, self._models.get(replica.order.model)),
        )

    def tail(self, replica_id: ReplicaId, lines: int) -> list[str]:
        """The last lines a replica wrote, oldest first, at most 500; none when it is gone."""
        replica = self._replicas.get(replica_id)
        return replica.child.tail(lines) if replica and replica.child else []

    async def _live(self, replica: Replica) -> None:
        stopped = await replica.live()
        del self._replicas[replica.id]
        self._post(stopped)

    def _choose_log(self, model: str) -> Path:
        """`MODEL.log`, appended to by one life after the other, and `MODEL.2.log` for a second
        replica beside the first: as few files as there ever were replicas at once."""
        name = quote(model, safe="")[:200]
        taken = {replica.log_path for replica in self._replicas.values()}
        names = (f"{name}.log" if n == 1 else f"{name}.{n}.log" for n in count(1))
        return next(path for path in map(self._logs.joinpath, names) if path not in taken)


def _is_outdated(started: ModelConfig, entry: ModelConfig | None) -> bool:
    """Whether what was started is not what `entry` says."""
    return entry is None or (
        started.engine != entry.engine
        or started.model.memory_mib != entry.model.memory_mib
        or started.model.device_count != entry.model.device_count
        or started.model.devices != entry.model.devices
        or started.model.slots != entry.model.slots
    )
