"""What a caller holds: the right to a slot until its response has ended, or a lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rota.core.effects import Grant
from rota.core.events import Event, GrantEnded, Outcome
from rota.core.types import LeaseClaim
from rota.engines.base import Endpoint


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim that a replica is in use.

    Args:
        expires_in_s: from the time of the call; if it is not renewed.
    """

    id: str
    model: str
    replica: str
    expires_in_s: float


class GrantHandle:
    """A request's right to a slot, until `end`.

    Attributes:
        replica: the id of the replica that serves it.
        endpoint: where that replica answers.
        waited_ms: how long the request waited for it.
        loaded: whether it met a load or a wait for room.
        why: what it waited for, in words.
    """

    __slots__ = (
        "_heard",
        "_is_over",
        "_post",
        "_request",
        "endpoint",
        "loaded",
        "model",
        "replica",
        "waited_ms",
        "why",
    )

    def __init__(
        self,
        post: Callable[[Event], None],
        heard: Callable[[str], None],
        model: str,
        grant: Grant,
        endpoint: Endpoint,
    ) -> None:
        self._post = post
        self._heard = heard
        self._request = grant.request
        self._is_over = False
        self.model = model
        self.replica = grant.replica
        self.endpoint = endpoint
        self.waited_ms = grant.waited_ms
        self.loaded = grant.loaded
        self.why = grant.why

    def heard(self) -> None:
        """Bytes came from the engine: it is not silent, whatever its probes say."""
        self._heard(self.replica)

    def end(
        self, outcome: Outcome, *, is_tool_call: bool = False, lease: LeaseClaim | None = None
    ) -> None:
        """Give the slot back. Only the first call counts.

        Args:
            lease: what goes on behind the answer; it takes the place of the grant without an
                instant between them.
        """
        if not self._is_over:
            self._is_over = True
            self._post(GrantEnded(self._request, outcome, is_tool_call, lease))
