"""What the gateway needs of a controller, and nothing more.

The real one is `rota.controller.Controller`; tests bring a scripted one. A structural type
rather than a base class: the controller need not know who reads it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from rota.config.values import Config
from rota.core.events import Outcome
from rota.engines.base import Endpoint


class GrantHandle(Protocol):
    """A request's right to one slot of one replica (see `rota.core.effects.Grant`)."""

    @property
    def replica(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def waited_ms(self) -> int: ...
    @property
    def loaded(self) -> bool: ...
    @property
    def why(self) -> str: ...

    def end(self, outcome: Outcome, *, is_tool_call: bool = False) -> None:
        """Give the slot back; only the first call counts. Leaving the grant's context does
        it too: OK, CANCELLED for a cancellation, FAILED for any other exception."""


class Controller(Protocol):
    """Grants, and what the admin surface asks for."""

    @property
    def config(self) -> Config: ...

    def grant(
        self,
        *,
        request: str,
        model: str,
        caller: str,
        body_bytes: int = 0,
        activation_wait_ms: int | None = None,
        queue_wait_ms: int | None = None,
        hold_ms: int | None = None,
        patience_ms: int | None = None,
    ) -> AbstractAsyncContextManager[GrantHandle]:
        """Wait for a slot of the model; cancelling the wait withdraws the request.

        Raises: RotaError: any of the refusals.
        """

    async def load(self, model: str) -> str:
        """Bring a model up and wait for it; the replica's id. Raises: RotaError."""

    def ask_load(self, model: str) -> None:
        """Ask for a model and do not wait. Raises: RotaError: what is known at once."""

    async def unload(
        self, model: str | None, *, grace_ms: int | None = None, wait: bool = True
    ) -> None:
        """Take a model (None = all) down; `grace_ms` None = as configured."""

    def status(self) -> dict[str, object]:
        """The body of `GET /rota/v1/status`. Reading it is not use."""

    def queue(self) -> dict[str, object]:
        """The body of `GET /rota/v1/queue`."""

    async def explain(self, request: str) -> dict[str, object]:
        """The body of `GET /rota/v1/explain/{id}`. Raises: RotaError: it is not known."""

    async def save_journal(self) -> Path:
        """Write down what was decided lately. Raises: RotaError: it cannot be."""
