"""What the controller needs of whatever carries its orders out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rota.config.values import Config
from rota.core.effects import Start, Stop
from rota.core.events import Event, NodeJoined
from rota.core.types import ModelName, ReplicaId
from rota.engines.base import Endpoint
from rota.node.node import Facts


class Cluster(Protocol):
    """Nodes with devices, engines on them, and the way to both.

    `start` and `stop` return at once; what comes of them is posted as `ReplicaReady` and
    `ReplicaStopped`. Each `Start` ends in exactly one `ReplicaStopped`; a replica that is ready
    and answers no more is told once as `ReplicaSilent`, and goes on until it is ordered to stop.
    """

    async def open(self, post: Callable[[Event], None]) -> None:
        """Begin, and post a `NodeJoined` for each node."""

    def joined(self) -> list[NodeJoined]:
        """What each node would say of itself if it joined now, with what runs there: from this a
        controller that lost its state can have it again."""

    async def close(self) -> None:
        """End every engine; nothing is left running."""

    def configure(self, config: Config) -> None:
        """From the next start on, models are run as this says. What runs stays as it is, and so
        do devices."""

    def obstacle(self, model: ModelName) -> str:
        """What would make any start of a model fail, in words; empty = nothing known."""

    def start(self, order: Start) -> None:
        """Bring a replica up."""

    def stop(self, order: Stop) -> None:
        """End a replica: ask, wait, kill."""

    def heard(self, replica: ReplicaId) -> None:
        """Bytes of an answer came from a replica, so it is not silent. Called for each read
        from an engine: cheap."""

    def endpoint(self, replica: ReplicaId) -> Endpoint:
        """Where a replica answers.

        Raises:
            ReplicaError: it is not running (any more).
        """

    def facts(self, replica: ReplicaId) -> Facts | None:
        """What is known of a replica's process; None if it has none."""
