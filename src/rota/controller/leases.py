"""The leases that are not over, beside the scheduler's own books: who took each, who waits for its
end, and who remembers it beyond this run.

The scheduler says when one begins and when it ends; this tells the others. It also knows the
leases of a scheduler that broke, so that none is forgotten in silence when another takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import KeysView

from rota.core.state import Lease, State
from rota.errors import RequestError
from rota.store import LeaseKeeper

LEASES_MAX = 3_000
"""At once: those of 1,000 jobs, 1,000 web sockets, and as many asked for. Each costs every step of
its model a look, so that who takes them and forgets would in time slow all others down."""
LEASES_RETRY_S = 30


class Leases:
    """Who has which lease.

    Args:
        keeper: remembers them beyond this run; None = nobody does.
    """

    def __init__(self, keeper: LeaseKeeper | None) -> None:
        self._keeper = keeper
        self._callers: dict[str, str] = {}  # who took it; a node that reports one cannot say
        self._ends: dict[str, list[asyncio.Future[str]]] = {}

    @property
    def active(self) -> KeysView[str]:
        """The ids of those that are not over."""
        return self._callers.keys()

    def taken(self, lease: Lease, model: str) -> None:
        """One begins; one that a scheduler that takes over has been told of is known already."""
        if lease.id in self._callers:
            return
        self._callers[lease.id] = lease.caller
        if self._keeper is not None:
            ttl_ms = lease.until_ms - lease.taken_ms
            self._keeper.taken(lease.id, model, lease.replica, lease.caller, lease.reason, ttl_ms)

    def renewed(self, lease: str, ttl_ms: int) -> None:
        """One ends in so long now."""
        if self._keeper is not None:
            self._keeper.renewed(lease, ttl_ms)

    def ended(self, lease: str, why: str) -> None:
        """One is over."""
        self._callers.pop(lease, None)
        if self._keeper is not None:
            self._keeper.ended(lease, why)
        for future in self._ends.pop(lease, ()):
            if not future.done():
                future.set_result(why)

    def end_of(self, lease: str) -> asyncio.Future[str]:
        """Comes true when one is over, with why."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if lease in self._callers:
            self._ends.setdefault(lease, []).append(future)
        else:
            future.set_result("it is over")
        return future

    def find(self, state: State, lease: str) -> Lease:
        """One of them.

        Raises:
            RequestError: `lease_not_found`: it is over, or never was.
        """
        found = state.leases.get(lease)
        if found is None:
            raise RequestError(
                f"There is no lease {lease!r}, or it is over.", code="lease_not_found", status=404
            )
        return found

    def say(self, state: State, lease: Lease, now_ms: int) -> dict[str, object]:
        """One of them, as plain values for JSON."""
        return {
            "lease": lease.id,
            "model": state.replicas[lease.replica].model.name,
            "replica": lease.replica,
            "caller": self._callers.get(lease.id, lease.caller),
            "reason": lease.reason,
            "age_s": (now_ms - lease.taken_ms) / 1_000,
            "expires_in_s": (lease.until_ms - now_ms) / 1_000,
        }
