"""What the gateway needs of a controller, and nothing more.

The real one is `rota.controller.Controller`; tests bring a scripted one. A structural type
rather than a base class: the controller need not know who reads it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from rota.config.values import Config
from rota.core.events import Outcome
from rota.core.types import LeaseClaim
from rota.engines.base import Endpoint
from rota.store import LeaseRecord


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

    def end(
        self, outcome: Outcome, *, is_tool_call: bool = False, lease: LeaseClaim | None = None
    ) -> None:
        """Give the slot back; only the first call counts. Leaving the grant's context does
        it too: OK, CANCELLED for a cancellation, FAILED for any other exception. With `lease`
        the replica is leased in the same step."""

    def heard(self) -> None:
        """Bytes came from the engine."""


class Lease(Protocol):
    """A claim on a replica, as it was when it was asked for."""

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def expires_in_s(self) -> float: ...


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
        mark: int = 0,
        body_bytes: int = 0,
        activation_wait_ms: int | None = None,
        queue_wait_ms: int | None = None,
        hold_ms: int | None = None,
        default_holds_ms: tuple[int | None, int | None] = (None, None),
        patience_ms: int | None = None,
        priority: int | None = None,
    ) -> AbstractAsyncContextManager[GrantHandle]:
        """Wait for a slot of the model; cancelling the wait withdraws the request.

        Raises: RotaError: any of the refusals.
        """

    async def lease(
        self,
        *,
        model: str,
        caller: str,
        ttl_ms: int,
        reason: str = "",
        load: bool = False,
        replica: str | None = None,
        activation_wait_ms: int | None = None,
    ) -> Lease:
        """Claim a ready replica of the model (the one named, if any); with `load`, wait for one.
        Cancelling withdraws it. Raises: RotaError: any of the refusals."""

    def renew_lease(self, lease: str, ttl_ms: int) -> Lease:
        """Let it last for so long from now. Raises: RequestError: 404, it is over."""

    def release_lease(self, lease: str) -> None:
        """End it; one that is over, or never was, changes nothing."""

    def leases(self) -> list[dict[str, object]]:
        """The active ones, as in the body of `GET /rota/v1/leases`."""

    def find_lease(self, lease: str) -> dict[str, object] | None:
        """One of those; None = it is over, or never was."""

    def lease_end(self, lease: str) -> asyncio.Future[str]:
        """Why it ended, once it has."""

    def pin(self, model: str, *, is_pinned: bool) -> None:
        """From now on the model does not leave once it is loaded, or may again."""

    def endpoint(self, replica: str) -> Endpoint:
        """Where a replica answers. Raises: ReplicaError: it is gone."""

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

    async def plan(self, model: str) -> dict[str, object]:
        """The body of `GET /rota/v1/models/{name}/plan`. Raises: RotaError: there is none."""

    async def explain(self, request: str) -> dict[str, object]:
        """The body of `GET /rota/v1/explain/{id}`. Raises: RotaError: it is not known."""

    async def save_journal(self) -> Path:
        """Write down what was decided lately. Raises: RotaError: it cannot be."""


class Reloader(Protocol):
    """Loads the file again that rota was started with; see `rota.cli.reloader`."""

    async def reload(self) -> dict[str, object]:
        """The body of `POST /rota/v1/reload`. Raises: RequestError: 422, nothing has changed."""

    async def preview(self, data: bytes | None = None) -> dict[str, object]:
        """What it would be if the file held this; None = what it holds. Nothing changes.
        Raises: RequestError: the same."""

    def status(self) -> dict[str, object]:
        """`configuration` in the body of `GET /rota/v1/status`."""


class LeaseRecords(Protocol):
    """What is remembered of leases; see `rota.store.LeaseStore`."""

    def find(self, lease: str) -> LeaseRecord | None:
        """The record of a lease, if it is remembered."""

    def recently_ended(self, count_max: int = ...) -> list[LeaseRecord]:
        """Leases that are over, the latest first."""
