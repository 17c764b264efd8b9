"""Leases over HTTP: taken, renewed, released and listed by whoever works beside the data path.

A lease that is over is still known for a while, with why: who releases one that has expired
learns that it had, and nobody has to tell "already released" from "never was" by a status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rota.config.values import ModelConfig
from rota.errors import RequestError
from rota.gateway.fields import bad_request, read_fields
from rota.gateway.intake import identify_caller
from rota.gateway.surface import Controller, Lease, LeaseRecords
from rota.gateway.watch import Watch
from rota.store import LeaseRecord

Handler = Callable[[Request], Awaitable[Response]]
Guard = Callable[[Handler], Handler]

ENDED_SHOWN = 100
REASON_LENGTH_MAX = 500
TTL_S_MAX = 365 * 86_400.0  # beyond it a figure is a slip; `lease_ttl_max` cuts earlier anyway

_Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class _Take(msgspec.Struct):
    model: str
    ttl_s: float
    reason: _Reason = ""
    load: bool = False


class _Renew(msgspec.Struct):
    ttl_s: float


class Leases:
    """The handlers below `/rota/v1/leases`.

    Args:
        find: the model of a name or an alias; raises RequestError.
        records: of leases that are over; None = none are kept.
    """

    def __init__(
        self,
        controller: Controller,
        find: Callable[[str], ModelConfig],
        records: LeaseRecords | None,
    ) -> None:
        self._controller = controller
        self._find = find
        self._records = records

    def routes(self, guard: Guard) -> list[Route]:
        path = "/rota/v1/leases"
        return [
            Route(path, guard(self._list_or_take), methods=["GET", "POST"]),
            Route(f"{path}/{{id}}", guard(self._show_or_release), methods=["GET", "DELETE"]),
            Route(f"{path}/{{id}}/renew", guard(self._renew), methods=["POST"]),
            Route(f"{path}/{{id}}/release", guard(self._release), methods=["POST"]),
        ]

    # One route per path, so that a wrong method is told all those that are right.

    async def _list_or_take(self, request: Request) -> Response:
        return await (self._take if request.method == "POST" else self._list)(request)

    async def _show_or_release(self, request: Request) -> Response:
        return await (self._release if request.method == "DELETE" else self._show)(request)

    async def _list(self, request: Request) -> Response:
        ended = [] if self._records is None else self._records.recently_ended(ENDED_SHOWN)
        return JSONResponse(
            {"leases": list(map(_say_active, self._controller.leases()))}
            | {"ended": list(map(_say_ended, ended))}
        )

    async def _show(self, request: Request) -> Response:
        lease = request.path_params["id"]
        active = self._controller.find_lease(lease)
        return JSONResponse(self._ended(lease) if active is None else _say_active(active))

    async def _take(self, request: Request) -> Response:
        wanted = await read_fields(request, _Take)
        ttl_ms = _ttl_ms(wanted.ttl_s)
        model = self._find(wanted.model).name
        with Watch(request.receive):
            lease = await self._controller.lease(
                model=model,
                caller=identify_caller(request.scope, dict(request.scope["headers"])),
                ttl_ms=ttl_ms,
                reason=wanted.reason,
                load=wanted.load,
            )
        return JSONResponse(_say_taken(lease), status_code=201)

    async def _renew(self, request: Request) -> Response:
        lease = request.path_params["id"]
        wanted = await read_fields(request, _Renew)
        ttl_ms = _ttl_ms(wanted.ttl_s)
        if self._controller.find_lease(lease) is None:
            ended = self._ended(lease)
            raise RequestError(
                f"lease {lease!r} of {ended['model']} is over since {ended['ended_at']}: "
                f"{ended['why']}; take another one",
                code="lease_not_found",
                status=404,
            )
        return JSONResponse(_say_taken(self._controller.renew_lease(lease, ttl_ms)))

    async def _release(self, request: Request) -> Response:
        """Release it; of one that is over already, say how and when it ended."""
        lease = request.path_params["id"]
        if self._controller.find_lease(lease) is not None:
            self._controller.release_lease(lease)
            if self._records is None:
                return JSONResponse({"lease": lease, "state": "ended", "why": "released"})
        return JSONResponse(self._ended(lease))

    def _ended(self, lease: str) -> dict[str, object]:
        """Raises: RequestError: 404, it is not known."""
        record = None if self._records is None else self._records.find(lease)
        if record is None or record.ended_ms is None:
            raise RequestError(
                f"there is no lease {lease[:100]!r}, and none that ended lately; "
                "GET /rota/v1/leases lists both",
                code="lease_not_found",
                status=404,
            )
        return _say_ended(record)


def _ttl_ms(ttl_s: float) -> int:
    if not ttl_s > 0:
        raise bad_request(f"`ttl_s` is {ttl_s:g}; a lease lasts for more than 0 seconds")
    return max(int(min(ttl_s, TTL_S_MAX) * 1_000), 1)


def _say_taken(lease: Lease) -> dict[str, object]:
    return {
        "lease": lease.id,
        "model": lease.model,
        "replica": lease.replica,
        "expires_in_s": lease.expires_in_s,
    }


def _say_active(lease: dict[str, object]) -> dict[str, object]:
    return {**lease, "state": "active"}


def _say_ended(record: LeaseRecord) -> dict[str, object]:
    assert record.ended_ms is not None, record
    return {
        "lease": record.lease,
        "model": record.model,
        "replica": record.replica,
        "caller": record.caller,
        "reason": record.reason,
        "taken_at": _say_time(record.taken_ms),
        "ended_at": _say_time(record.ended_ms),
        "lasted_s": max(record.ended_ms - record.taken_ms, 0) / 1_000,  # clocks are set back
        "state": "ended",
        "why": record.why,
    }


def _say_time(ms: int) -> str:
    """The wall clock's time in UTC, to the second."""
    return datetime.fromtimestamp(ms // 1_000, UTC).isoformat()
