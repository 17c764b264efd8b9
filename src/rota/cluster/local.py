"""One machine: orders are carried out by a `Node` in this process."""

from __future__ import annotations

from collections.abc import Callable

from rota.config.values import Config
from rota.core.effects import Start, Stop
from rota.core.events import Event, NodeJoined
from rota.core.types import ModelName, ReplicaId
from rota.engines.base import Endpoint
from rota.node.node import Facts, Node

NODE = "local"


class LocalCluster:
    """The cluster of one machine."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        assert self._node is not None, "not open"
        return self._node

    async def open(self, post: Callable[[Event], None]) -> None:
        config = self._config
        self._node = Node(NODE, config.devices, config.models, config.state_dir, post)
        await self._node.open()
        post(self._node.joined())

    def joined(self) -> list[NodeJoined]:
        return [self.node.joined()]

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()

    def configure(self, config: Config) -> None:
        self._config = config
        self.node.configure(config.models)

    def obstacle(self, model: ModelName) -> str:
        return self.node.obstacle(model)

    def start(self, order: Start) -> None:
        self.node.start(order)

    def stop(self, order: Stop) -> None:
        self.node.stop(order)

    def heard(self, replica: ReplicaId) -> None:
        self.node.heard(replica)

    def endpoint(self, replica: ReplicaId) -> Endpoint:
        return self.node.endpoint(replica)

    def facts(self, replica: ReplicaId) -> Facts | None:
        return self.node.facts(replica)
