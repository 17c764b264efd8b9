"""What a caller may see go wrong, as one tree.

`RotaError` → `RequestError` (4xx, the caller's), `CapacityError` (429 and 503, with when to
come back), `ReplicaError` (5xx, the engine's, with its last lines), `ConfigError` (start-up,
the file's author's). Foreign exceptions are translated into these once, at the edge that met
them, keeping the cause. A broken invariant of our own is an `assert`, never one of these.

The codes and statuses are the table of docs/architecture.md, "What a request meets"; the
gateway renders any of them into the client's own dialect.
"""

from __future__ import annotations


class RotaError(Exception):
    """Something a caller may see.

    Args:
        message: one sentence for a person: what, where, and what would be accepted.
        code: a stable word for programs, for example `model_loading`.
        status: the HTTP status that says it.
        retry_after_s: whole seconds after which trying again makes sense; None: do not say.
        retry: what SDKs are told in `x-should-retry`; None: leave it to the status.
        loading: for a model on its way: `{model, state, progress, eta_seconds, position}`.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "internal_error",
        status: int = 500,
        retry_after_s: int | None = None,
        retry: bool | None = None,
        loading: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s
        self.retry = retry
        self.loading = loading


class RequestError(RotaError):
    """The request cannot be served as it is, whenever it is sent (4xx)."""


class CapacityError(RotaError):
    """Not now: the answer says why and, where it is known, when (429, 503)."""


class ReplicaError(RotaError):
    """The engine failed (500, 502, 504); the message ends with its last lines."""


class ConfigError(RotaError):
    """The configuration cannot be used; the message names file, line and remedy."""
