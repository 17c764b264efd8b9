"""Web sockets: opened like any request, then two pumps of bytes and a claim on the replica.

The request to upgrade waits for a grant as any other does: it loads the model, its wait is
bounded, and it is refused as an HTTP error. What is sent after the engine's 101 is passed on
as it is, both ways, each side being read only as fast as the other takes it. So sub-protocols,
compression, pings and close codes are the two ends' own affair, a message of any size takes no
more memory than another, and no library is needed. Refused: ending one web socket and
beginning another, which is what an ASGI server's own support amounts to; it would unpack and
repack each message, bound its size by memory, and lose what the two ends agreed upon.

**Slots and leases.** A slot is held while the socket opens, so as many can open at once as the
replica takes requests. Then the grant becomes a lease, in one step. A slot for as long as a
socket is open was refused: a forgotten tab would take it from everyone else, and a barrier
waits for grants as long as they last, while a lease has an end (`lease_ttl_max`). A socket
still in use then takes another lease on the same replica, behind whoever waits for its memory.

**Idle.** After `websocket_idle` with nothing but pings either way the lease is let go; pings are
how libraries look after a connection, not use. The next message is held back until there is a
lease again, on that same replica. If that is gone, the socket is closed with 1012 (service
restart) and a reason, as whenever the engine's side ends without a close of its own: what the
client had there is lost, and connecting again will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote

from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from rota.config.values import ModelConfig
from rota.core.events import Outcome
from rota.core.types import LeaseClaim
from rota.errors import CapacityError, ReplicaError, RequestError, RotaError
from rota.gateway.answer import Answer
from rota.gateway.catalog import find
from rota.gateway.client import Client, Headers, UnreachableError, request_head
from rota.gateway.frames import Frames, close_frame
from rota.gateway.guard import check_admin, check_page
from rota.gateway.intake import given_request_id, identify_caller
from rota.gateway.keys import key_of
from rota.gateway.naming import rename_in_query
from rota.gateway.surface import Controller, GrantHandle
from rota.gateway.terms import terms_of
from rota.gateway.upstream import (
    GONE,
    NOT_RETURNED,
    NOT_SENT,
    end_to_end,
    target_at,
    unreachable,
)
from rota.gateway.watch import Watch

REALTIME = "/v1/realtime"
UPSTREAM = "/upstream/"

PIECE_BYTES = 64 * 1024
OPEN_S_MAX = 60.0  # for an engine to answer the request to upgrade
RETAKE_MS_MAX = 15_000  # for a lease to come back; libraries give a ping 20 s
FAREWELL_S_MAX = 1.0  # for either end to take what is left for it, a close included
SOCKETS_MAX = 1_000
BUSY_RETRY_S = 30
NAME_PARTS_MAX = 16  # of a model's name, between slashes; a path may have tens of thousands
PATH_SHOWN_MAX = 200
QUERY_FIELDS_MAX = 100

SERVICE_RESTART = 1012  # IANA's registry: connecting again makes sense

# Theirs to say towards a page's server; rota has looked at it (see `guard`), and an engine that
# compares it with `Host` would take offence.
_NOT_SENT = NOT_SENT | {b"origin", b"sec-fetch-site"}
_PROTOCOLS = b"sec-websocket-protocol"
_KEY_PROTOCOL = b"openai-insecure-api-key."  # how pages send a key, which is for rota
_UPGRADE = "connection: Upgrade\r\nupgrade: websocket\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?")
# RFC 9110, 5.1 and 5.5: what a client would read as two headers is none.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")

_log = logging.getLogger(__name__)


class ClientSocket(asyncio.StreamReaderProtocol):
    """A client's connection, from the request to upgrade on; `server` sees it among its own.

    Attributes:
        task: serves it.
    """

    def __init__(
        self, transport: asyncio.Transport, connections: set[Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.reader = asyncio.StreamReader(PIECE_BYTES, loop)
        super().__init__(self.reader, loop=loop)
        self.transport = transport
        self.writer = asyncio.StreamWriter(transport, self, self.reader, loop)
        self.task: asyncio.Task[None] | None = None
        self._connections = connections
        self._gone = asyncio.Event()
        connections.add(self)
        transport.set_protocol(self)
        self.connection_made(transport)
        transport.resume_reading()

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    def shutdown(self) -> None:
        """The server is stopping."""
        if self.task is not None:
            self.task.cancel()

    def eof_received(self) -> bool:
        self._gone.set()
        return bool(super().eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._connections.discard(self)
        super().connection_lost(exc)

    async def receive(self) -> Message:
        """As ASGI has it: that the client left."""
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """As ASGI has it: the answer to the request to upgrade, after which nothing follows
        unless it is a 101."""
        if message["type"] == "http.response.start":
            status: int = message["status"]
            lines = [b"HTTP/1.1 %d %b\r\n" % (status, _phrase(status))]
            lines += [b"%b: %b\r\n" % header for header in message["headers"]]
            ending = _UPGRADE.encode() if status == 101 else b"connection: close\r\n"
            self.writer.writelines([*lines, ending, b"\r\n"])
        else:
            self.writer.write(message["body"])
            self.writer.close()


class Sockets:
    """The application behind web sockets.

    Args:
        controller: grants slots, and the leases that follow them.
        client: opens connections to the engines.
    """

    def __init__(self, controller: Controller, client: Client) -> None:
        self._controller = controller
        self._client = client
        self._open = 0
        self._run = os.urandom(4).hex()
        self._count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        near: ClientSocket = scope["extensions"]["rota.socket"]
        request = f"{self._run}-s{next(self._count)}"
        given_id = given_request_id(dict(scope["headers"]))
        answer = Answer(send, request, given_id or request)
        call = _Call(self._controller, self._client, request, scope, near=near, answer=answer)
        self._open += 1
        try:
            await answer.settle(call.run(is_full=self._open > SOCKETS_MAX))
        finally:
            self._open -= 1
            near.writer.close()


class _Wanted(NamedTuple):
    """What a socket is to be opened to: a model, and what to ask its engine for."""

    entry: ModelConfig
    path: str
    query: bytes


class _Call:
    """One web socket."""

    def __init__(
        self,
        controller: Controller,
        client: Client,
        request: str,
        scope: Scope,
        *,
        near: ClientSocket,
        answer: Answer,
    ) -> None:
        self._controller = controller
        self._client = client
        self._request = request
        self._scope = scope
        self._headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self._near = near
        self._answer = answer

    async def run(self, *, is_full: bool) -> None:
        wanted = self._route()
        if is_full:
            raise CapacityError(
                f"as many web sockets are open as may be ({SOCKETS_MAX})",
                code="queue_full",
                status=429,
                retry_after_s=BUSY_RETRY_S,
            )
        self._answer.model = wanted.entry.name
        with Watch(self._near.receive):
            tunnel = await self._open(wanted)
        await tunnel.run()

    def _route(self) -> _Wanted:
        """Which model is meant, and what to ask its engine for. Below `UPSTREAM` that is said as
        the engine has it.

        Raises: RequestError: 400, 403 or 404.
        """
        config = self._controller.config
        path: str = self._scope["raw_path"].decode("latin-1")
        query: bytes = self._scope["query_string"]
        connection = HTTPConnection(self._scope)
        if path.startswith(UPSTREAM):
            check_admin(connection, config.host)
            return _Wanted(*self._beginning(path.removeprefix(UPSTREAM)), query)
        if path != REALTIME:
            raise RequestError(
                f"no web socket is opened at {path[:200]}; rota has {REALTIME}?model=NAME and "
                f"{UPSTREAM}NAME/…",
                code="not_found",
                status=404,
            )
        if key_of(self._scope) is None:  # a page that has one was given it
            check_page(connection, config.host)
        name = _model_in(query)
        if not name:
            raise RequestError(
                f"which model? {REALTIME}?model=NAME", code="invalid_request", status=400
            )
        entry = find(config, name)
        if name != entry.upstream_name:
            query = rename_in_query(query, entry.upstream_name)
        return _Wanted(entry, path, query)

    def _beginning(self, path: str) -> tuple[ModelConfig, str]:
        """The longest beginning of a path that is a model's name, and the rest."""
        parts = path.split("/")
        for count in range(min(len(parts), NAME_PARTS_MAX), 0, -1):
            name = unquote("/".join(parts[:count]))
            if self._controller.config.resolve(name) in self._controller.config.models:
                return find(self._controller.config, name), "/" + "/".join(parts[count:])
        return find(self._controller.config, unquote(parts[0])), "/"

    async def _open(self, wanted: _Wanted) -> _Tunnel:
        """Open it at the engine; once more if the replica was gone before it heard."""
        try:
            return await self._open_once(wanted)
        except ReplicaError as error:
            if error.code != GONE:
                raise
            _log.info("%s: %s; asking once more", self._request, error.message)
            return await self._open_once(wanted)

    async def _open_once(self, wanted: _Wanted) -> _Tunnel:
        async with self._controller.grant(
            request=self._request,
            model=wanted.entry.name,
            caller=identify_caller(self._scope, self._headers),
            **terms_of(self._scope, self._headers, wanted.entry.model),
        ) as grant:
            self._answer.loaded, self._answer.waited_ms = grant.loaded, grant.waited_ms
            try:
                reader, writer = await self._client.open(grant.endpoint)
            except UnreachableError as error:
                grant.end(Outcome.UNREACHABLE)
                refusal = unreachable(self._controller.config, grant, error)
                _log.warning("%s: %s", self._request, refusal.message)
                raise refusal from error
            try:
                headers = await self._upgrade(grant, wanted, reader, writer)
                await self._answer.start(101, headers)
            except BaseException:
                writer.transport.abort()
                raise
            claim = self._claim_from(grant, wanted.entry)
            return _Tunnel(self._near, reader, writer, claim)

    def _claim_from(self, grant: GrantHandle, entry: ModelConfig) -> _Claim:
        """Turn the grant into a lease."""
        config = self._controller.config
        reason = f"web socket {quote(self._scope['path'][:PATH_SHOWN_MAX])}"
        claim = LeaseClaim(f"socket-{self._request}", config.lease_ttl_ms_max, reason)
        caller = identify_caller(self._scope, self._headers)
        grant.end(Outcome.OK, lease=claim)
        idle_s = entry.websocket_idle_ms / 1_000
        return _Claim(self._controller, claim, grant, caller=caller, idle_s=idle_s)

    async def _upgrade(
        self,
        grant: GrantHandle,
        wanted: _Wanted,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> Headers:
        """Ask the engine to upgrade; what its 101 says to the client.

        Raises: ReplicaError: it does not.
        """
        target = target_at(grant.endpoint, wanted.path, wanted.query)
        headers = _without_key(end_to_end(self._scope["headers"], _NOT_SENT))
        writer.write(request_head(grant.endpoint, "GET", target, headers, _UPGRADE))
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                status, answered = await _read_head(reader)
        except TimeoutError as error:
            said = f"did not answer it in {OPEN_S_MAX:g} s"
            raise self._not_opened(grant, said, 504) from error
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise self._not_opened(grant, "broke off before it answered", 502) from error
        if status != 101:
            said = f"answered it with {status}"
            raise self._not_opened(grant, said, status if status >= 400 else 502)
        if dict(answered).get(b"upgrade", b"").lower() != b"websocket":
            raise self._not_opened(grant, "changed to another protocol", 502)
        return end_to_end(answered, NOT_RETURNED)

    def _not_opened(self, grant: GrantHandle, said: str, status: int) -> RotaError:
        """What a client is told whose socket the engine did not open."""
        grant.end(Outcome.FAILED if status >= 500 else Outcome.OK)
        message = f"a web socket was wanted of {grant.model!r}, and its engine {said}"
        _log.warning("%s: %s", self._request, message)
        kind = ReplicaError if status >= 500 else RequestError
        return kind(message, code="socket_refused", status=status)


class _Claim:
    """A socket's right to its replica: a lease while there is use, and another after that.

    Args:
        idle_s: without use for so long it is let go; 0 = never.
    """

    def __init__(
        self,
        controller: Controller,
        claim: LeaseClaim,
        grant: GrantHandle,
        *,
        caller: str,
        idle_s: float,
    ) -> None:
        self._controller = controller
        self._claim = claim
        self._caller = caller
        self._model = grant.model
        self._replica = grant.replica
        self._idle_s = idle_s
        self._lease: str | None = claim.lease
        self._clock = asyncio.get_running_loop().time
        self._used_at = self._clock()
        self._is_held = asyncio.Event()
        self._is_held.set()
        self._is_wanted = asyncio.Event()

    async def use(self) -> None:
        """Note use, and wait until there is a right to it."""
        self._used_at = self._clock()
        if not self._is_held.is_set():
            self._is_wanted.set()
            await self._is_held.wait()

    async def keep(self) -> None:
        """See to it until cancelled.

        Raises: RotaError: it was let go, and cannot be had again.
        """
        while True:
            await self._until_let_go()
            self._lease = None
            self._is_held.clear()
            if self._idle_s:
                await self._is_wanted.wait()
            lease = await self._controller.lease(
                model=self._model,
                caller=self._caller,
                ttl_ms=self._claim.ttl_ms,
                reason=self._claim.reason,
                replica=self._replica,
                activation_wait_ms=RETAKE_MS_MAX,
            )
            self._lease = lease.id
            self._used_at = self._clock()
            self._is_wanted.clear()
            self._is_held.set()

    async def _until_let_go(self) -> None:
        """Wait for the lease's own end, or end it when there has been no use for long."""
        assert self._lease is not None
        ended = self._controller.lease_end(self._lease)
        while not ended.done():
            left_s = self._used_at + self._idle_s - self._clock() if self._idle_s else None
            if left_s is not None and left_s <= 0:
                self._controller.release_lease(self._lease)
                return
            await asyncio.wait({ended}, timeout=left_s)

    def let_go(self) -> None:
        """The socket is closed."""
        if self._lease is not None:
            self._controller.release_lease(self._lease)
            self._lease = None


class _Tunnel:
    """An open web socket: what either end says goes to the other."""

    def __init__(
        self,
        near: ClientSocket,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
        claim: _Claim,
    ) -> None:
        self._near = near
        self._far_reader = far_reader
        self._far_writer = far_writer
        self._claim = claim
        self._up = Frames()
        self._down = Frames()

    async def run(self) -> None:
        """Pass bytes until one end is gone, the claim is lost or the server stops; then end the
        other, with a close of our own where its peer sent none."""
        near = self._near
        up = asyncio.create_task(_pump(near.reader, self._far_writer, self._up, self._claim))
        down = asyncio.create_task(_pump(self._far_reader, near.writer, self._down, self._claim))
        keep = asyncio.create_task(self._claim.keep())
        tasks = (up, down, keep)
        reason: str | None = "rota is stopping"
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = self._reason(keep)
        finally:
            # Everything is let go of before anything is awaited: who stops us may do it twice.
            for task in tasks:
                task.cancel()
            self._claim.let_go()
            self._far_writer.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(self._say_goodbye(reason), self._end_far())

    def _reason(self, keep: asyncio.Task[None]) -> str | None:
        """Why the client's side is to end; None = it ended itself."""
        if keep.done():
            error = keep.exception()
            if not isinstance(error, RotaError):
                assert error is not None, "a claim is kept until it is lost"
                raise error
            return error.message
        return None if self._near.is_gone else "the engine has ended; connect again"

    async def _end_far(self) -> None:
        """Cut the engine's side off, when it has taken what is on its way."""
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(FAREWELL_S_MAX):
                    await self._far_writer.wait_closed()
        finally:
            self._far_writer.transport.abort()

    async def _say_goodbye(self, reason: str | None) -> None:
        """End the client's side: with a close, if there is room for one and none was sent."""
        near = self._near
        if reason is None:
            return
        if not self._down.is_between:
            near.transport.abort()  # half a message must not look like a whole one
            return
        if not self._down.has_closed:
            near.writer.write(close_frame(SERVICE_RESTART, reason))
        # What it still says is read and thrown away: closed with unread bytes, a connection is
        # reset, and the close might never be read.
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            near.writer.write_eof()
            async with asyncio.timeout(FAREWELL_S_MAX):
                while await near.reader.read(PIECE_BYTES):
                    pass


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: Frames, claim: _Claim
) -> None:
    """Pass on what is read, as fast as it is taken; messages only under a claim."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            if frames.read(piece):
                await claim.use()
            writer.write(piece)
            frames.passed()
            await writer.drain()
            if len(piece) == PIECE_BYTES:
                await asyncio.sleep(0)  # whoever sends without a pause leaves others their turn


def _phrase(status: int) -> bytes:
    """What is said beside a status; an engine may have one of its own."""
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""


def _model_in(query: bytes) -> str:
    """The model that a query names; empty = none. Raises: RequestError: it cannot be read."""
    try:
        fields = parse_qs(query.decode("latin-1"), max_num_fields=QUERY_FIELDS_MAX)
    except ValueError as error:
        raise RequestError(
            f"the query has more than {QUERY_FIELDS_MAX} fields", code="invalid_request", status=400
        ) from error
    return fields.get("model", [""])[0]


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, Headers]:
    """Status and headers of an answer, interim ones skipped.

    Raises: EOFError, ValueError, asyncio.LimitOverrunError: it is no such thing.
    """
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        match = _STATUS.fullmatch(lines[0])
        if match is None:
            raise ValueError(lines[0][:100])
        status = int(match[1])
        if status == 101 or status >= 200:
            fields = [_FIELD.fullmatch(line) for line in lines[1:-2]]
            if None in fields:
                raise ValueError("no header")
            return status, [(field[1].lower(), field[2].strip()) for field in fields if field]


def _without_key(headers: Headers) -> Headers:
    """The headers without a key among the sub-protocols that are offered."""
    kept: Headers = []
    for name, value in headers:
        if name != _PROTOCOLS:
            kept.append((name, value))
            continue
        offered = [one.strip() for one in value.split(b",")]
        ours = [one for one in offered if one and not one.startswith(_KEY_PROTOCOL)]
        if ours:
            kept.append((name, b", ".join(ours)))
    return kept
