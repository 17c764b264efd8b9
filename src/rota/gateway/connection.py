"""uvicorn's side of a client's connection, with the bounds and ends that it leaves out.

- What is not a body (a head, the framing of chunks, trailers) is bounded in bytes, and a head
  in time, so that a client that never comes to the point costs neither memory nor, for good, a
  descriptor. Trailers are not added to the headers: what was checked stays what is sent on.
- A client that leaves while it has pipelined requests is noticed, and every request of its
  connection told. uvicorn stops reading then, and tells only the latest.
- Who is refused while still sending hears why: a connection that is to end stays until the
  body is in, since closing it earlier would make the kernel throw the answer away (RST).
- A web socket is handed to the application as the connection that it is (`sockets`).
- What is not HTTP is answered in our shape, and never inside another answer.

Refused: h11, which has such bounds, at three times the CPU per request.
"""

from __future__ import annotations

import asyncio
import os
import urllib.parse
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rota.errors import RequestError
from rota.gateway.errors import error_body, error_headers
from rota.gateway.sockets import ClientSocket

HEAD_BYTES_MAX = 64 * 1024  # nginx takes 32 KiB, node 16 KiB
HEAD_S_MAX = 60.0  # from connecting, or from the first byte, to the end of a head
UNHEARD_S_MAX = 60.0  # for the rest of a body that was refused
PIPELINE_MAX = 64  # requests in line behind the one that is answered

_STATUS_LINES = {
    400: b"HTTP/1.1 400 Bad Request\r\n",
    408: b"HTTP/1.1 408 Request Timeout\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
}


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._is_in_head = True
        self._head_since: float | None = None
        self._beside_bytes = 0  # received since a body's last byte, or an end of a head
        self._refused_since: float | None = None
        self._is_kept = True  # whether the client wants the connection after this request
        self._answering: RequestResponseCycle | None = None

    def turn_away_if_slow(self, now: float) -> None:
        """End it if a head takes too long. To be called now and then: a timer for each would
        cost every request."""
        if self._head_since is not None and now - self._head_since > HEAD_S_MAX:
            self._turn_away(408, f"no whole head of a request came in {HEAD_S_MAX:g} s")
        elif self._refused_since is not None and now - self._refused_since > UNHEARD_S_MAX:
            self.transport.close()

    # -- what the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head and self._head_since is None:
            self._head_since = self.loop.time()
        self._beside_bytes += len(data)
        super().data_received(data)
        if self._beside_bytes > HEAD_BYTES_MAX:
            self._turn_away(431, f"the head is larger than {HEAD_BYTES_MAX} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_since = None
        for cycle in (self._answering, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    # -- what the parser tells

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_since = None
        self._beside_bytes = 0
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            return  # `handle_websocket_upgrade` is next
        self.headers = []  # another list than the request's: trailers land here
        self._is_kept, self.cycle.keep_alive = self.cycle.keep_alive, True
        if self.pipeline:
            self.flow.resume_reading()  # or its leaving would not be seen
        if len(self.pipeline) > PIPELINE_MAX:
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._beside_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._should_upgrade():
            return
        self._is_in_head = True
        self._beside_bytes = 0
        self._refused_since = None
        self.cycle.keep_alive &= self._is_kept
        super().on_message_complete()
        if self.cycle.response_complete and not self.cycle.keep_alive:
            self.transport.close()

    def on_response_complete(self) -> None:
        if not self._is_in_head and self._answering is self.cycle:
            self._refused_since = self.loop.time()
        super().on_response_complete()

    # -- web sockets

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() == b"websocket" and self.parser.get_method() == b"GET"

    def handle_websocket_upgrade(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._turn_away(400, "a web socket cannot be asked for behind another request")
            return
        try:
            url = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            self._turn_away(400, "this is not a path")
            return
        self.connections.discard(self)
        near = ClientSocket(self.transport, self.connections, self.loop)
        scope = self.scope | {
            "type": "websocket",
            "path": urllib.parse.unquote(url.path.decode("ascii")),
            "raw_path": url.path,
            "query_string": url.query or b"",
            "extensions": {"rota.socket": near},
        }
        near.task = self.loop.create_task(self.app(scope, near.receive, near.send))
        near.task.add_done_callback(self.tasks.discard)
        self.tasks.add(near.task)

    # -- ends

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self._turn_away(400, "this is not a request of HTTP/1.1")

    def _turn_away(self, status: int, message: str) -> None:
        """Close, with an answer unless one is under way."""
        if self.transport.is_closing():
            return
        cycle = self._answering
        if cycle is None or cycle.response_complete or not cycle.response_started:
            error = RequestError(message, code="invalid_request", status=status)
            request_id = os.urandom(8).hex()
            body = error_body(error, request_id)
            headers = error_headers(error, request_id, len(body), is_last=True)
            lines = [b"%s: %s\r\n" % header for header in headers]
            self.transport.write(b"".join([_STATUS_LINES[status], *lines, b"\r\n", body]))
        self.transport.close()
