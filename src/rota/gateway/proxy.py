"""The data path: one request from its body to the last byte of its answer.

Plain ASGI, no framework: read the body, wait for a grant, pass bytes through both ways. The
request's body is sent as it came and the answer's as it comes; nothing is parsed, joined or
held back, because each microsecond here is paid per request or per token.

From the moment the body is complete the client is watched. When it leaves, the request's task
is cancelled wherever it stands (in the queue, before the first byte, streaming, or stopped by
a reader that does not read), and the engine sees its connection close.

An engine that breaks off never looks like a normal end (llama-swap and others did that):
before the first byte it is a JSON 502; inside an event stream it is an error event, then the
end; inside any other body the client's connection is broken too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import urllib.parse
from collections.abc import Mapping
from functools import lru_cache

from starlette.types import Receive, Scope, Send

from rota.core.events import Outcome
from rota.errors import CapacityError, ReplicaError, RotaError
from rota.gateway.client import (
    BrokenOffError,
    Client,
    Headers,
    Response,
    UnreachableError,
)
from rota.gateway.errors import error_event, internal_error, send_error
from rota.gateway.intake import (
    Intake,
    Uploads,
    declared_wait_ms,
    given_request_id,
    identify_caller,
    read_intake,
    stated_ms,
)
from rota.gateway.keys import Terms, key_of, terms_for
from rota.gateway.surface import Controller, GrantHandle
from rota.gateway.watch import ClientGoneError, Watch

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})

# Meant for one connection, not for the message (RFC 9110, 7.6.1).
_HOP_BY_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
# Ours to say towards the engine, or a secret between the client and rota.
_NOT_SENT = frozenset(
    _HOP_BY_HOP
    | {b"host", b"content-length", b"expect", b"authorization", b"x-api-key", b"cookie"}
)  # fmt: skip
# Ours to say towards the client: the server states its own date, and a rota behind a rota is
# not the one that was asked.
_NOT_RETURNED = frozenset(
    _HOP_BY_HOP
    | {
        b"date", b"x-request-id", b"x-rota-model", b"x-rota-model-loaded", b"x-rota-wait-ms",
        b"x-qm-model", b"x-qm-model-loaded", b"x-qm-wait-ms",
    }
)  # fmt: skip

_PLAIN_CONNECTION = {b"keep-alive", b"close"}

_TAIL_BYTES = 16  # of an event stream: enough for `data: [DONE]` and its blank line
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")

# What `Node.endpoint` calls a replica that ended between its grant and its first byte.
_GONE = "replica_gone"

# Looked for in each piece as it passes; one that is cut in two there goes unseen, and costs its
# caller the longer of two holds.
_ENDS_IN_TOOL_CALL = re.compile(rb'"finish_reason"\s*:\s*"tool_calls"')

_log = logging.getLogger(__name__)


class Proxy:
    """The ASGI application behind `PATHS`.

    Args:
        controller: grants slots.
        client: speaks to the engines; shared, so that connections are.
    """

    def __init__(self, controller: Controller, client: Client) -> None:
        self._controller = controller
        self._client = client
        config = controller.config
        self._uploads = Uploads(max(config.queue_bytes_max, config.body_bytes_max))
        self._run = os.urandom(4).hex()
        self._count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = f"{self._run}-{next(self._count)}"
        call = _Call(self._controller, self._client, request, scope, send)
        await call.run(receive, self._uploads)


class _Call:
    """One request. `run` decides how it ends; the others do the parts."""

    __slots__ = (
        "_client", "_controller", "_events_tail", "_given_id", "_headers", "_loaded", "_model",
        "_request", "_scope", "_send", "_started", "_waited_ms",
    )  # fmt: skip

    def __init__(
        self, controller: Controller, client: Client, request: str, scope: Scope, send: Send
    ) -> None:
        self._controller = controller
        self._client = client
        self._scope = scope
        self._send = send
        self._headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self._given_id = given_request_id(self._headers)
        # Ours is unique, what the client gave may not be; the story is found by either.
        self._request = request if self._given_id is None else f"{self._given_id}~{request}"
        self._model: str | None = None  # once it is known to be one of ours
        self._loaded = False
        self._waited_ms = 0
        self._started = False  # whether the answer's head has been sent
        self._events_tail: bytes | None = None  # of an answer that can carry an error event

    async def run(self, receive: Receive, uploads: Uploads) -> None:
        """Serve it. Whatever happens, it ends in one of these ways:

        1. passed through to its end, or broken off as this file's header says;
        2. refused, by us or by the controller, with an error's own status;
        3. the client left: nothing is sent, and whatever was under way is called off;
        4. the server is stopping and waits no longer;
        5. a mistake of ours: 500, and the log knows.
        """
        limit = self._controller.config.body_bytes_max
        try:
            intake = await read_intake(self._scope, self._headers, receive, limit, uploads)
            with Watch(receive):
                await self._serve(intake)  # 1
        except RotaError as error:
            await self._refuse(error)  # 2
        except ClientGoneError:
            _log.debug("%s: the client left", self._request)  # 3
        except asyncio.CancelledError:
            stopping = "rota is stopping"
            await self._refuse(CapacityError(stopping, code="shutting_down", status=503))  # 4
            raise
        except Exception:  # noqa: BLE001 - the last line of defence
            _log.exception("%s failed", self._request)
            await self._refuse(internal_error(self._request_id))  # 5

    @property
    def _request_id(self) -> str:
        return self._given_id or self._request

    async def _serve(self, intake: Intake) -> None:
        """Wait for a grant and use it; once more if the replica was gone before it heard."""
        try:
            await self._serve_once(intake)
        except ReplicaError as error:
            if error.code != _GONE:
                raise
            _log.info("%s: %s; asking once more", self._request, error.message)
            await self._serve_once(intake)

    async def _serve_once(self, intake: Intake) -> None:
        config = self._controller.config
        name = config.resolve(intake.model)
        entry = config.models.get(name)
        activation_wait_ms = queue_wait_ms = None
        terms = Terms()
        if entry is not None:
            self._model = name
            terms = terms_for(
                key_of(self._scope),
                entry.model,
                stated_ms(self._headers, b"hold"),
                stated_ms(self._headers, b"patience"),
            )
            declared_ms = declared_wait_ms(self._headers)
            if declared_ms is not None:
                activation_wait_ms = min(entry.model.activation_wait_ms, declared_ms)
                queue_wait_ms = min(entry.model.queue_wait_ms, declared_ms)
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        grant: GrantHandle | None = None
        try:
            async with self._controller.grant(
                request=self._request,
                model=name,
                caller=identify_caller(self._scope, self._headers),
                body_bytes=len(intake.body),
                activation_wait_ms=activation_wait_ms,
                queue_wait_ms=queue_wait_ms,
                hold_ms=terms.hold_ms,
                patience_ms=terms.patience_ms,
                priority=terms.priority,
            ) as grant:
                self._loaded, self._waited_ms = grant.loaded, grant.waited_ms
                _log.debug(
                    "%s: %s after %d ms %s",
                    self._request,
                    grant.replica,
                    grant.waited_ms,
                    grant.why,
                )
                await self._pass_through(grant, intake)
        except RotaError as error:
            if grant is None:
                self._loaded = error.loading is not None
                self._waited_ms = int((clock() - asked_at) * 1_000)
            raise

    async def _pass_through(self, grant: GrantHandle, intake: Intake) -> None:
        try:
            response = await self._ask(grant, intake)
            try:
                await self._relay(grant, response)
            finally:
                response.close()
        except UnreachableError as error:
            grant.end(Outcome.UNREACHABLE)
            raise self._unreachable(grant, error) from error
        except BrokenOffError as error:
            grant.end(Outcome.FAILED)
            _log.warning("%s: the engine of %s %s", self._request, grant.replica, error)
            raise ReplicaError(
                f"the engine of {grant.model!r} {error}", code="engine_failed", status=502
            ) from error

    def _unreachable(self, grant: GrantHandle, error: UnreachableError) -> RotaError:
        endpoint = grant.endpoint
        where = f"{endpoint.scheme}://{endpoint.host}:{endpoint.port}"
        message = f"{grant.model!r} does not answer at {where}: {error}"
        _log.warning("%s: %s", self._request, message)
        entry = self._controller.config.models.get(grant.model)
        if entry is not None and entry.model.is_external:
            return CapacityError(message, code="no_endpoint", status=503)
        return ReplicaError(message, code=_GONE, status=502)

    async def _ask(self, grant: GrantHandle, intake: Intake) -> Response:
        """Send the request on. Its body is let go of once the answer has begun."""
        query = self._scope["query_string"].decode("latin-1")  # as it came, byte for byte
        path: str = self._scope["path"]
        if grant.endpoint.base_path.endswith("/v1"):  # a URL as SDKs want it
            path = path.removeprefix("/v1")
        target = f"{path}?{query}" if query else path
        headers = _end_to_end(self._scope["headers"], _NOT_SENT)
        response = await self._client.send(grant.endpoint, "POST", target, headers, intake.body)
        intake.body = b""
        return response

    async def _relay(self, grant: GrantHandle, response: Response) -> None:
        """Send the answer as it comes. The slot is given back when the engine is done, though
        the client may have yet to take the last bytes."""
        await self._start(response)
        is_tool_call = False
        while True:
            piece = await response.read()
            if b'"tool_calls"' in piece and _ENDS_IN_TOOL_CALL.search(piece):
                is_tool_call = True
            if self._events_tail is not None:
                self._events_tail = (self._events_tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            is_last = response.at_end
            if is_last and self._is_cut(response):
                await self._send_body(piece, more=True)
                raise BrokenOffError("closed the connection before [DONE]", begun=True)
            if is_last:
                outcome = Outcome.FAILED if response.status >= 500 else Outcome.OK
                grant.end(outcome, is_tool_call=is_tool_call)
            await self._send_body(piece, more=not is_last)
            if is_last:
                return

    async def _start(self, response: Response) -> None:
        headers = _end_to_end(response.headers, _NOT_RETURNED)
        if response.status in (204, 304):  # a length there promises nothing; uvicorn believes it
            headers = [header for header in headers if header[0] != b"content-length"]
        names = dict(headers)
        if names.get(b"content-type", b"").lower().startswith(b"text/event-stream"):
            # Said to proxies between us and the client (nginx gathers answers otherwise).
            if b"x-accel-buffering" not in names:
                headers.append((b"x-accel-buffering", b"no"))
            if b"cache-control" not in names:
                headers.append((b"cache-control", b"no-cache"))
            if b"content-length" not in names and b"content-encoding" not in names:
                self._events_tail = b""
        headers += self._own_headers()
        headers.append((b"x-request-id", self._request_id.encode("ascii")))
        self._started = True
        await self._send(
            {"type": "http.response.start", "status": response.status, "headers": headers}
        )

    def _is_cut(self, response: Response) -> bool:
        """An event stream whose end nothing marks is whole only if it says so itself."""
        tail = self._events_tail
        return not response.is_delimited and tail is not None and b"[DONE]" not in tail

    async def _send_body(self, piece: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def _refuse(self, error: RotaError) -> None:
        """Answer with an error: as an answer, else inside the answer, else by breaking it.

        uvicorn closes the connection of an answer that was begun and not completed; its
        client sees a body cut short.
        """
        if not self._started:
            self._started = True
            await send_error(self._send, error, self._request_id, self._own_headers())
        elif self._events_tail is not None:
            is_between = not self._events_tail or self._events_tail.endswith(_BLANK_LINES)
            fence = b"" if is_between else b"\n\n"
            await self._send_body(fence + error_event(error), more=False)

    def _own_headers(self) -> Headers:
        loaded = b"1" if self._loaded else b"0"
        waited_ms = b"%d" % self._waited_ms
        headers = [
            (b"x-rota-model-loaded", loaded),
            (b"x-rota-wait-ms", waited_ms),
            (b"x-qm-model-loaded", loaded),
            (b"x-qm-wait-ms", waited_ms),
        ]
        if self._model is not None:
            name = _header_text(self._model)
            headers += ((b"x-rota-model", name), (b"x-qm-model", name))
        return headers


def _end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers that are for the other end: all but `dropped` and what `Connection` names."""
    kept: Headers = []
    named: set[bytes] = set()
    for raw_name, value in headers:
        name = raw_name.lower()
        if name == b"connection":
            named.update(token.strip() for token in value.lower().split(b","))
        elif name not in dropped:
            kept.append((name, value))
    if named - _PLAIN_CONNECTION:
        return [header for header in kept if header[0] not in named]
    return kept


@lru_cache(maxsize=1_024)
def _header_text(text: str) -> bytes:
    """A name as a header can carry it: printable ASCII, the rest percent-encoded."""
    if text.isascii() and text.isprintable():
        return text.encode("ascii")
    return urllib.parse.quote(text, safe="/: ").encode("ascii")
