"""The answering half of a call: an engine's answer passed on as it comes, or an error in
whatever form the moment still allows.

Nothing is parsed, joined or held back, because each microsecond here is paid per token. Who
wants to know what passes is shown each piece, and keeps what it needs.

An engine that breaks off never looks like a normal end (llama-swap and others did that):
before the first byte it is a JSON 502; inside an event stream it is an error event, then the
end; inside any other body the client's connection is broken too.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections.abc import Callable, Coroutine
from functools import lru_cache

from starlette.types import Send

from rota.errors import CapacityError, RotaError
from rota.gateway.client import BrokenOffError, Headers, Response
from rota.gateway.errors import error_event, internal_error, send_error
from rota.gateway.upstream import NOT_RETURNED, end_to_end
from rota.gateway.watch import ClientGoneError

_TAIL_BYTES = 16  # of an event stream: enough for `data: [DONE]` and its blank line
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")

_log = logging.getLogger(__name__)


class Answer:
    """What one client is answered.

    Args:
        send: towards the client.
        request: our id of the call, for the log.
        request_id: the id the client is told.

    Attributes:
        model: once it is known to be one of ours.
        loaded, waited_ms: what the call met on its way to a slot.
    """

    __slots__ = (
        "_events_tail", "_request", "_request_id", "_send", "_started", "loaded", "model",
        "waited_ms",
    )  # fmt: skip

    def __init__(self, send: Send, request: str, request_id: str) -> None:
        self._send = send
        self._request = request
        self._request_id = request_id
        self._started = False  # whether the answer's head has been sent
        self._events_tail: bytes | None = None  # of an answer that can carry an error event
        self.model: str | None = None
        self.loaded = False
        self.waited_ms = 0

    async def settle(self, serving: Coroutine[None, None, None]) -> None:
        """Serve a call. Whatever happens, it ends in one of these ways:

        1. passed through to its end, or broken off as this file's header says;
        2. refused, by us or by the controller, with an error's own status;
        3. the client left: nothing is sent, and whatever was under way is called off;
        4. the server is stopping and waits no longer;
        5. a mistake of ours: 500, and the log knows.
        """
        try:
            await serving  # 1
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

    async def relay(
        self,
        response: Response,
        *,
        on_piece: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """Pass an engine's answer on as it comes.

        Args:
            on_piece: is shown each piece before it is sent.
            on_end: called when the engine is done, though the client may have yet to take the
                last bytes.

        Raises:
            BrokenOffError: the engine broke off; what came before has been sent.
        """
        await self._begin(response)
        while True:
            piece = await response.read()
            on_piece(piece)
            if self._events_tail is not None:
                self._events_tail = (self._events_tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            is_last = response.at_end
            if is_last and self._is_cut(response):
                await self._send_body(piece, more=True)
                raise BrokenOffError("closed the connection before [DONE]", begun=True)
            if is_last:
                on_end()
            await self._send_body(piece, more=not is_last)
            if is_last:
                return

    async def _begin(self, response: Response) -> None:
        headers = end_to_end(response.headers, NOT_RETURNED)
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
        await self.start(response.status, headers)

    async def start(self, status: int, headers: Headers) -> None:
        """Send an answer's head, with what rota says of the call."""
        own = [*self._own_headers(), (b"x-request-id", self._request_id.encode("ascii"))]
        self._started = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": headers + own}
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
        """What rota says of the call, in its own names and those of Quartermaster's clients."""
        loaded = b"1" if self.loaded else b"0"
        waited_ms = b"%d" % self.waited_ms
        headers = [
            (b"x-rota-model-loaded", loaded),
            (b"x-rota-wait-ms", waited_ms),
            (b"x-qm-model-loaded", loaded),
            (b"x-qm-wait-ms", waited_ms),
        ]
        if self.model is not None:
            name = _header_text(self.model)
            headers += ((b"x-rota-model", name), (b"x-qm-model", name))
        return headers


@lru_cache(maxsize=1_024)
def _header_text(text: str) -> bytes:
    """A name as a header can carry it: printable ASCII, the rest percent-encoded."""
    if text.isascii() and text.isprintable():
        return text.encode("ascii")
    return urllib.parse.quote(text, safe="/: ").encode("ascii")
