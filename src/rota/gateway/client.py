"""HTTP/1.1 towards the engines: one small client, because this is where a proxy's time goes.

Written straight on `asyncio.Protocol` and httptools (llhttp). Under the same server a proxy on
aiohttp's client took twice the CPU per request, one on httpx thirty times, and what they would
add, this side of a proxy must not do: follow redirects, decode, pool by host, time out a silent
engine (a long prompt is silent for minutes, and that is fine).

One connection carries one request at a time. Whoever reads a `Response` pulls: what has
arrived waits in the connection up to `BUFFER_MAX`, then the socket is left unread and the
engine feels it. So a client that stalls costs a bounded amount of memory.

A connection is kept for the next request when the answer was read to its end and both sides
may keep it. An engine may close a kept connection at the very moment we use it; then, and
only if not one byte of an answer had come, the request is sent again on a fresh connection,
once.

A trap, for whoever edits this: llhttp knows whether a connection may be kept only inside
`on_message_complete`. Asked later, it says no, and every request quietly reconnects.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar, cast

import httptools

from rota.engines.base import Endpoint

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

CONNECT_S_MAX = 5.0  # a machine that is there answers a SYN in far less, from anywhere
BUFFER_MAX = 64 * 1024  # of an answer, unread by us; then the socket is paused
HEAD_MAX = 64 * 1024  # of an answer's head, interim answers included; nginx: 32 KiB
WRITE_MAX = 64 * 1024  # a request up to this size goes out in one write
STALL_S_MAX = 300  # of a connection for something else than requests; as for clients (`server`)
IDLE_S_MAX = 60.0  # a kept connection older than this is not trusted: a NAT may have lost it

# For a remote machine that vanished while we wait for its answer: dead after 60 + 4 x 15 s.
_KEEP_ALIVE_PROBES = (
    ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
    if sys.platform == "linux"
    else ()
)


class UpstreamError(Exception):
    """An engine could not be spoken to."""


class UnreachableError(UpstreamError):
    """No connection could be had: nothing was sent."""


class BrokenOffError(UpstreamError):
    """The connection ended, or spoke something else than HTTP, before the answer was whole.

    Args:
        begun: whether any byte of an answer had come.
    """

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


class Client:
    """A pool of connections to any number of endpoints.

    It has no limit of its own: slots bound how many requests an engine gets.

    Args:
        ssl_context: for `https` endpoints; None = the system's authorities, checked.
    """

    def __init__(self, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self._idle: dict[Endpoint, list[_Connection]] = {}
        self._ssl_context = ssl_context
        self._is_closed = False

    async def send(
        self,
        endpoint: Endpoint,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes = b"",
    ) -> Response:
        """Send a request and wait for the head of its answer, however long that takes.

        Args:
            target: path and query, a character per byte; the endpoint's base path is put
            before it.
            headers: sent as they are, after `Host` and `Content-Length`, which are ours.

        Raises:
            UnreachableError: no connection within `CONNECT_S_MAX`.
            BrokenOffError: it ended before the head of an answer was complete.
        """
        framing = f"content-length: {len(body)}\r\n"
        head = request_head(endpoint, method, target, headers, framing)
        kept = self._take(endpoint)
        if kept is not None:
            try:
                return await kept.exchange(method, head, body)
            except BrokenOffError as error:
                if error.begun:
                    raise
        fresh = await self._connect(endpoint)
        return await fresh.exchange(method, head, body)

    async def open(self, endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection for something else than requests, never kept; its caller closes it.

        Raises:
            UnreachableError: no connection within `CONNECT_S_MAX`.
        """
        tls = self._tls_for(endpoint)
        opening = asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
        reader, writer = await _bounded(opening)
        _notice_death(writer.get_extra_info("socket"), stall_s_max=STALL_S_MAX)
        return reader, writer

    def forget(self, endpoint: Endpoint) -> None:
        """Close what is kept to an endpoint. An engine that ends closes them by itself."""
        for connection in self._idle.pop(endpoint, ()):
            connection.close()

    async def close(self) -> None:
        """Close every kept connection; those in use close with their response."""
        self._is_closed = True
        for endpoint in list(self._idle):
            self.forget(endpoint)
        await asyncio.sleep(0)  # transports let go of their sockets one turn later

    def keep(self, connection: _Connection) -> None:
        """Take a connection back whose answer is complete."""
        if self._is_closed:
            connection.close()
        else:
            self._idle.setdefault(connection.endpoint, []).append(connection)

    def drop(self, connection: _Connection) -> None:
        """Forget a connection that is gone; one that was not kept changes nothing."""
        kept = self._idle.get(connection.endpoint)
        if kept is not None and connection in kept:
            kept.remove(connection)
            if not kept:
                del self._idle[connection.endpoint]

    def _take(self, endpoint: Endpoint) -> _Connection | None:
        """The connection used last: the fewer are used, the sooner the rest time out."""
        kept = self._idle.get(endpoint)
        oldest = asyncio.get_running_loop().time() - IDLE_S_MAX
        while kept:
            connection = kept.pop()
            if connection.is_usable(oldest):
                return connection
            connection.close()
        self._idle.pop(endpoint, None)
        return None

    async def _connect(self, endpoint: Endpoint) -> _Connection:
        loop = asyncio.get_running_loop()
        tls = self._tls_for(endpoint)
        _, connection = await _bounded(
            loop.create_connection(
                lambda: _Connection(self, endpoint, loop), endpoint.host, endpoint.port, ssl=tls
            )
        )
        return connection

    def _tls_for(self, endpoint: Endpoint) -> ssl.SSLContext | None:
        if endpoint.scheme != "https":
            return None
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context


async def _bounded(connecting: Coroutine[Any, Any, T]) -> T:
    """Connect. Raises: UnreachableError: no connection within `CONNECT_S_MAX`."""
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            return await connecting
    except TimeoutError as error:
        raise UnreachableError(f"no connection within {CONNECT_S_MAX:g} s") from error
    except (OSError, ValueError) as error:  # the latter: a host that cannot be one
        raise UnreachableError(str(error)) from error


class Response:
    """An engine's answer as it arrives.

    Args (of use once `Client.send` has returned it):
        status, headers: as received, interim answers skipped.
        is_delimited: whether its end is marked. An answer that ends with its connection cannot
            be told from one that was cut off.
    """

    __slots__ = (
        "_connection", "_error", "_pieces", "_waiter", "has_head", "headers", "is_complete",
        "is_delimited", "status",
    )  # fmt: skip

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.has_head = False
        self.is_complete = False
        self.is_delimited = True
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: BrokenOffError | None = None

    @property
    def is_decided(self) -> bool:
        """Whether the rest of the request cannot matter any more."""
        return self.is_complete or self.status >= 300

    @property
    def at_end(self) -> bool:
        """Whether it is complete and `read` has given all of it."""
        return self.is_complete and not self._pieces

    async def read(self) -> bytes:
        """All that has arrived, or else the next piece; empty only at the end.

        Raises:
            BrokenOffError: it was cut off, and everything before the cut has been read.
        """
        while not self._pieces and not self.is_complete:
            await self.progress()
        pieces, self._pieces = self._pieces, []
        if self._connection is not None:
            self._connection.drained()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Let go. An answer that is not complete takes its connection with it: the engine
        sees the close at once and can stop."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def progress(self) -> None:
        """Wait until something has changed. Raises: BrokenOffError: nothing more will come."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def finish(self) -> None:
        self.is_complete = True
        self._connection = None
        self.wake()

    def fail(self, error: BrokenOffError) -> None:
        self._error = error
        self._connection = None
        self.wake()


class _Connection(asyncio.Protocol):
    """One connection and its parser; used by one request at a time."""

    def __init__(self, client: Client, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self._client = client
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._used_at = 0.0
        self._is_reading = True
        self._is_writable = True
        self._begin(None, "")

    def _begin(self, response: Response | None, method: str) -> None:
        self._response = response
        self._is_head_request = method == "HEAD"
        self._is_sent = False
        self._is_interim = False
        self._may_keep = False
        self._received = 0  # bytes, of this answer, until its head is complete
        self._buffered = 0  # bytes, of the body, that nobody has read yet
        self._headers: Headers = []

    # -- what the client and the response ask for

    def is_usable(self, oldest: float) -> bool:
        return self._used_at >= oldest and not self._transport.is_closing()

    async def exchange(self, method: str, head: bytes, body: bytes) -> Response:
        """Send a request; its answer once the head is complete."""
        response = Response(self)
        self._begin(response, method)
        try:
            if len(body) <= WRITE_MAX:
                self._transport.write(head + body)
                self._is_sent = True
            else:
                self._transport.write(head)
                self._is_sent = await self._upload(response, body)
            while not response.has_head:
                await response.progress()
        except BaseException:
            self.close()
            raise
        return response

    async def _upload(self, response: Response, body: bytes) -> bool:
        """Write a large body as fast as it is taken; whether all of it was sent.

        Written whole, it would be copied into the transport. An engine that has refused it
        already (413) is sent no more.
        """
        view = memoryview(body)
        for start in range(0, len(view), WRITE_MAX):
            if response.is_decided:
                return False
            self._transport.write(view[start : start + WRITE_MAX])
            while not self._is_writable and not response.is_decided:
                await response.progress()
        return True

    def drained(self) -> None:
        self._buffered = 0
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()

    def close(self) -> None:
        self._client.drop(self)
        self._transport.abort()

    # -- what the transport tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _notice_death(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # it speaks out of turn: not to be trusted with a request
            self.close()
            return
        if not response.has_head:
            self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # Bytes beyond a complete answer spoil the connection, not the answer.
            if not response.is_complete:
                reason = error.__context__ or error
                self._break(f"answered something that is not HTTP ({reason})")
            self.close()
            return
        if response.is_complete:
            self._settle()
        elif not response.has_head and self._received > HEAD_MAX:
            self._break(f"answered with a head of more than {HEAD_MAX} bytes")
            self.close()
        else:
            response.wake()

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        if self._response is not None:
            self._response.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.drop(self)
        response = self._response
        if response is None:
            return
        if response.has_head and not response.is_delimited and exc is None:
            self._response = None
            response.finish()
        else:
            when = "in the middle of its answer" if response.has_head else "before it answered"
            self._break(f"closed the connection {when}" + (f" ({exc})" if exc else ""))

    # -- what the parser tells

    def on_message_begin(self) -> None:
        if self._response is None or self._response.is_complete:
            raise ValueError("more than one answer")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))  # trailers land here too, and are not passed on

    def on_headers_complete(self) -> None:
        response = self._response
        assert response is not None
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200 and status != 101
        if self._is_interim:
            return
        if not 200 <= status <= 599:
            raise ValueError(f"status {status}")
        response.status = status
        response.headers = self._headers
        response.has_head = True
        self._headers = []
        if self._is_head_request:
            response.is_complete = True  # llhttp would wait for the body it announces
        elif status not in (204, 304):
            response.is_delimited = _is_delimited(response.headers)

    def on_body(self, body: bytes) -> None:
        response = self._response
        if response is None or self._is_head_request:
            return
        response.take(body)
        self._buffered += len(body)
        if self._buffered > BUFFER_MAX and self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._is_interim or self._response is None:
            return
        self._may_keep = self._parser.should_keep_alive() and not self._is_head_request
        self._response.is_complete = True

    # -- ends

    def _settle(self) -> None:
        """The answer is complete: keep the connection, or close it."""
        response, self._response = self._response, None
        assert response is not None
        if self._may_keep and self._is_sent and not self._transport.is_closing():
            self.drained()  # an idle connection is read, or its end would not be seen
            self._used_at = self._loop.time()
            self._client.keep(self)
        else:
            self.close()
        response.finish()

    def _break(self, message: str) -> None:
        response, self._response = self._response, None
        assert response is not None
        begun = response.has_head or self._received > 0
        response.fail(BrokenOffError(message, begun=begun))


def _notice_death(connected: socket.socket | None, *, stall_s_max: int | None = None) -> None:
    """Let the kernel end a connection whose other end is gone.

    Args:
        stall_s_max: also one that takes nothing of what is sent for so long; None = never.
    """
    if connected is None:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE_PROBES:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    if stall_s_max is not None and sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_s_max * 1_000)


def _is_delimited(headers: Headers) -> bool:
    """Whether a length or chunks mark the end of the body (RFC 9112, 6.3)."""
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length":
            return True
        if lower == b"transfer-encoding":
            return value.lower().rstrip().endswith(b"chunked")
    return False


def request_head(
    endpoint: Endpoint,
    method: str,
    target: str,
    headers: Iterable[tuple[bytes, bytes]],
    framing: str,
) -> bytes:
    """A request up to its body.

    Args:
        framing: header lines, each with its end, that say what comes after.
    """
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    lines = [
        f"{method} {endpoint.base_path}{target} HTTP/1.1\r\n"
        f"host: {host}:{endpoint.port}\r\n{framing}".encode("latin-1")
    ]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
