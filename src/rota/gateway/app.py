"""The whole HTTP surface as one ASGI application.

The data path (`proxy.PATHS`, jobs, web sockets) is below any framework, for its price per
request; everything else is asked rarely and is an ordinary Starlette application beside it.

The admin surface can end models, so it answers this machine only (`guard`).

Health checks, lists and status are not use: nothing here but a grant keeps a model alive.
"""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import time
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from typing import TypeVar, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rota.config.values import Config, ModelConfig
from rota.errors import RequestError, RotaError
from rota.gateway import proxy
from rota.gateway.catalog import find
from rota.gateway.client import Client
from rota.gateway.errors import error_body, error_headers, internal_error, send_error
from rota.gateway.fields import read_body
from rota.gateway.guard import check_admin
from rota.gateway.jobs import METHODS, Jobs
from rota.gateway.keys import CHALLENGE, authenticate
from rota.gateway.leases import Handler, Leases
from rota.gateway.sockets import REALTIME, Sockets
from rota.gateway.surface import Controller, LeaseRecords, Reloader
from rota.gateway.watch import ClientGoneError, Watch

T = TypeVar("T")

GREETING = "rota is running"
GRACE_S_MAX = 86_400
PATH_SHOWN_MAX = 200
FILE_BYTES_MAX = 4 * 1024 * 1024 + 1  # a configuration is refused as too large at one less

_log = logging.getLogger(__name__)


class App:
    """rota over HTTP.

    Args:
        controller: decides and knows; never closed from here.
        client: towards the engines; None = one of our own, closed by `close`.
        records: of leases that are over; None = none are kept.
        reloader: loads the file again; None = there is none.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        client: Client | None = None,
        records: LeaseRecords | None = None,
        reloader: Reloader | None = None,
    ) -> None:
        self._controller = controller
        self._client = client or Client()
        self._jobs = Jobs(controller, self._client)
        self._proxy = proxy.Proxy(controller, self._client, self._jobs)
        self._sockets = Sockets(controller, self._client)
        self._beside = _Beside(controller, records, reloader).application()
        self._run = os.urandom(4).hex()
        self._count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            authenticate(scope, self._controller.config.keys)
        except RequestError as error:
            await send_error(send, error, self._id(), CHALLENGE)
            return
        if scope["type"] == "websocket":
            await self._sockets(scope, receive, send)
            return
        path = scope["path"]
        if path in proxy.PATHS or path in self._jobs.submits:
            if scope["method"] == "POST":
                await self._proxy(scope, receive, send)
            else:
                await self._send_not_allowed(send, "POST")
            return
        if self._jobs.covers(path):
            if scope["method"] in METHODS:
                await self._jobs(scope, receive, send)
            else:
                await self._send_not_allowed(send, ", ".join(METHODS))
            return
        if path == REALTIME:
            await send_error(send, _only_as_socket(), self._id(), [(b"upgrade", b"websocket")])
            return
        request_id = scope["state"]["request_id"] = self._id()
        try:
            await self._beside(scope, receive, send)
        except Exception:  # noqa: BLE001 - answered with a 500 already; the log gets the cause
            _log.exception("%s failed: %s %s", request_id, scope["method"], scope["path"])

    async def close(self) -> None:
        """Follow no job any longer, and close the connections kept to engines."""
        await self._jobs.close()
        await self._client.close()

    async def _send_not_allowed(self, send: Send, allowed: str) -> None:
        headers = [(b"allow", allowed.encode("ascii"))]
        await send_error(send, _not_allowed(allowed), self._id(), headers)

    def _id(self) -> str:
        return f"{self._run}-a{next(self._count)}"


class _Beside:
    """Everything that is not the data path."""

    def __init__(
        self, controller: Controller, records: LeaseRecords | None, reloader: Reloader | None
    ) -> None:
        self._controller = controller
        self._reloader = reloader
        self._leases = Leases(controller, self._find, records)
        self._since = int(time.time())

    def application(self) -> Starlette:
        admin = self._admin
        routes = [
            Route("/", self._greet),
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{id:path}", self._model),
            Route("/rota/v1/status", admin(self._status)),
            Route("/rota/v1/queue", admin(self._queue)),
            Route("/rota/v1/explain/{id:path}", admin(self._explain)),
            Route("/rota/v1/journal", admin(self._save_journal), methods=["POST"]),
            Route("/rota/v1/models/{name:path}/plan", admin(self._plan)),
            Route("/rota/v1/reload", admin(self._reload), methods=["POST"]),
            Route("/rota/v1/models/{name:path}/load", admin(self._load), methods=["POST"]),
            Route("/rota/v1/models/{name:path}/unload", admin(self._unload), methods=["POST"]),
            Route("/rota/v1/models/{name:path}/pin", admin(self._pin), methods=["POST"]),
            Route("/rota/v1/models/{name:path}/unpin", admin(self._unpin), methods=["POST"]),
            Route("/rota/v1/unload", admin(self._unload), methods=["POST"]),
            *self._leases.routes(admin),
            Route("/queue", admin(self._queue)),
            # llama-swap's names, for the tools that know them.
            Route("/running", admin(self._running)),
            Route("/unload", admin(self._unload_like_llama_swap), methods=["GET", "POST"]),
        ]
        application = Starlette(
            routes=routes,
            exception_handlers={
                RotaError: _on_rota_error,
                HTTPException: self._on_http_exception,
                ClientGoneError: _on_gone,
                Exception: _on_mistake,
            },
        )
        application.router.redirect_slashes = False
        return application

    async def _on_http_exception(self, request: Request, error: Exception) -> Response:
        """The framework's own refusals, in our shape."""
        assert isinstance(error, HTTPException)
        headers = error.headers or {}
        if error.status_code == 405:
            return _error_response(request, _not_allowed(headers["Allow"]), headers)
        offered = _say_offered(self._controller.config)
        message = f"there is nothing at {request.url.path[:PATH_SHOWN_MAX]}; rota answers {offered}"
        refusal = RequestError(message, code="not_found", status=error.status_code)
        return _error_response(request, refusal)

    # -- for everyone

    async def _greet(self, request: Request) -> Response:
        return PlainTextResponse(GREETING)

    async def _health(self, request: Request) -> Response:
        """200 as long as rota serves, whatever its models do."""
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        """Every configured model, in OpenAI's list and Anthropic's at once."""
        states = self._states()
        models = self._controller.config.models.values()
        data = [self._item(model, states) for model in models]
        return JSONResponse(
            {
                "object": "list",
                "data": data,
                "has_more": False,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
            }
        )

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._item(self._find(request.path_params["id"]), self._states()))

    def _item(self, model: ModelConfig, states: Mapping[str, str]) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "rota",
            "type": "model",
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(self._since, UTC).isoformat(),
            "aliases": list(model.aliases),
            "status": {"value": states.get(model.name, "unknown")},
        }

    def _find(self, name: str) -> ModelConfig:
        return find(self._controller.config, name)

    def _states(self) -> dict[str, str]:
        return {str(model["name"]): str(model["state"]) for model in self._model_statuses()}

    def _model_statuses(self) -> list[dict[str, object]]:
        return cast("list[dict[str, object]]", self._controller.status()["models"])

    # -- for this machine

    def _admin(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            check_admin(request, self._controller.config.host)
            return await handler(request)

        return guarded

    async def _status(self, request: Request) -> Response:
        status = self._controller.status()
        if self._reloader is not None:
            status["configuration"] = self._reloader.status()
        return JSONResponse(status)

    async def _queue(self, request: Request) -> Response:
        return JSONResponse(self._controller.queue())

    async def _explain(self, request: Request) -> Response:
        return JSONResponse(await self._controller.explain(request.path_params["id"]))

    async def _plan(self, request: Request) -> Response:
        name = self._find(request.path_params["name"]).name
        return JSONResponse(await self._controller.plan(name))

    async def _save_journal(self, request: Request) -> Response:
        return JSONResponse({"path": str(await self._controller.save_journal())})

    async def _reload(self, request: Request) -> Response:
        """Load the file again; or say what that would change, for the file as it is or for the
        text in the body."""
        is_dry_run = _flag(request, "dry_run")
        text = await read_body(request, FILE_BYTES_MAX)
        if self._reloader is None:
            raise RequestError(
                "this rota was started without a file to load again", code="no_file", status=409
            )
        if is_dry_run:
            return JSONResponse(await self._reloader.preview(text or None))
        if text:
            raise RequestError(
                "what is loaded is rota's own file, not a body; ?dry_run=true says what it would "
                "change",
                code="invalid_request",
                status=400,
            )
        return JSONResponse(await self._reloader.reload())

    async def _load(self, request: Request) -> Response:
        name = self._find(request.path_params["name"]).name
        if not _flag(request, "wait"):
            self._controller.ask_load(name)
            return JSONResponse({"model": name, "state": "asked"}, status_code=202)
        replica = await _while_there(request, self._controller.load(name))
        return JSONResponse({"model": name, "state": "ready", "replica": replica})

    async def _unload(self, request: Request) -> Response:
        asked = request.path_params.get("name")
        name = None if asked is None else self._find(asked).name
        grace_ms = _grace_ms(request)
        wait = _flag(request, "wait")
        unloading = self._controller.unload(name, grace_ms=grace_ms, wait=wait)
        await _while_there(request, unloading)
        state, status = ("unloaded", 200) if wait else ("asked", 202)
        return JSONResponse({"model": name, "state": state}, status_code=status)

    async def _pin(self, request: Request) -> Response:
        return self._set_pinned(request, is_pinned=True)

    async def _unpin(self, request: Request) -> Response:
        return self._set_pinned(request, is_pinned=False)

    def _set_pinned(self, request: Request, *, is_pinned: bool) -> Response:
        name = self._find(request.path_params["name"]).name
        self._controller.pin(name, is_pinned=is_pinned)
        return JSONResponse({"model": name, "pinned": is_pinned})

    async def _running(self, request: Request) -> Response:
        running = [
            _like_llama_swap(str(model["name"]), replica)
            for model in self._model_statuses()
            for replica in cast("list[dict[str, object]]", model["replicas"])
        ]
        return JSONResponse({"running": running})

    async def _unload_like_llama_swap(self, request: Request) -> Response:
        await _while_there(request, self._controller.unload(None))
        return PlainTextResponse("OK")


def _say_offered(config: Config) -> str:
    """The paths that models are asked under."""
    jobs = [entry.jobs for entry in config.models.values() if entry.jobs]
    posts = sorted({*proxy.PATHS, *(shape.submit for shape in jobs)})
    gets = sorted({"/v1/models", *(shape.poll for shape in jobs)})
    sockets = f"a web socket at {REALTIME}?model=NAME"
    return f"POST {', '.join(posts)}, GET {', '.join(gets)} and {sockets}"


def _like_llama_swap(model: str, replica: Mapping[str, object]) -> dict[str, str]:
    command = cast("list[str] | None", replica.get("command"))
    port = replica.get("port")
    return {
        "model": model,
        "state": str(replica["phase"]),
        "cmd": shlex.join(command or []),
        "proxy": "" if port is None else f"http://127.0.0.1:{port}",
    }


def _flag(request: Request, name: str) -> bool:
    raw = request.query_params.get(name, "false").lower()
    if raw in ("true", "1", ""):
        return True
    if raw in ("false", "0"):
        return False
    raise RequestError(
        f"{name} must be true or false, not {raw!r}", code="invalid_request", status=400
    )


def _grace_ms(request: Request) -> int | None:
    raw = request.query_params.get("grace_s")
    if raw is None:
        return None
    try:
        grace_s = float(raw)
    except ValueError:
        grace_s = -1
    if not 0 <= grace_s <= GRACE_S_MAX:
        raise RequestError(
            f"grace_s must be seconds from 0 to {GRACE_S_MAX}, not {raw!r}",
            code="invalid_request",
            status=400,
        )
    return int(grace_s * 1_000)


async def _while_there(request: Request, work: Awaitable[T]) -> T:
    """The outcome of `work`, which is called off if the client leaves."""
    with Watch(request.receive):
        return await work


def _request_id(request: Request) -> str:
    return str(request.scope["state"]["request_id"])


def _error_response(
    request: Request, error: RotaError, more_headers: Mapping[str, str] | None = None
) -> Response:
    request_id = _request_id(request)
    body = error_body(error, request_id)
    response = Response(body, status_code=error.status)
    response.raw_headers = error_headers(error, request_id, len(body))
    response.headers.update(more_headers or {})
    return response


async def _on_rota_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RotaError)
    return _error_response(request, error)


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_mistake(request: Request, error: Exception) -> Response:
    return _error_response(request, internal_error(_request_id(request)))


def _only_as_socket() -> RequestError:
    return RequestError(
        f"{REALTIME} is a web socket; ask to upgrade the connection",
        code="upgrade_required",
        status=426,
    )


def _not_allowed(allowed: str) -> RequestError:
    return RequestError(f"this path takes {allowed} only", code="method_not_allowed", status=405)
