"""Noticing that a client has left, while something is done for it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGoneError(Exception):
    """The client left: nobody is there to answer."""


class Watch:
    """Cancels the task inside the `with` when its client leaves.

    uvicorn drops what is sent to a client that has gone and says nothing; `receive()` is the
    only witness, so it is awaited beside the work. What is left of a body is thrown away.

    Raises:
        ClientGoneError: out of the `with`, in place of that cancellation.
    """

    __slots__ = ("_is_gone", "_served_by", "_watching")

    def __init__(self, receive: Receive) -> None:
        served_by = asyncio.current_task()
        assert served_by is not None, "a watch is kept inside the task that serves"
        self._served_by = served_by
        self._is_gone = False
        self._watching = asyncio.ensure_future(_departure(receive))

    def __enter__(self) -> None:
        self._watching.add_done_callback(self._left)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watching.remove_done_callback(self._left)
        self._watching.cancel()
        if self._is_gone and not self._served_by.uncancel() and kind is asyncio.CancelledError:
            raise ClientGoneError from error

    def _left(self, watching: asyncio.Future[None]) -> None:
        if not watching.cancelled():
            watching.exception()  # a server that cannot tell any more has lost the client too
            self._is_gone = True
            self._served_by.cancel()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
