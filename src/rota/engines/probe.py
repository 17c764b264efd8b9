"""One question to a server: does it answer this path, and with what status?

Written on asyncio streams: an HTTP client library costs more to load than all of this, and
must not be let near an engine that answers half a response and hangs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from rota.engines.base import Endpoint


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe met.

    Args:
        connected: something listens there.
        status: the HTTP status; None = it gave none in time, or something else than HTTP.
    """

    connected: bool
    status: int | None = None


async def probe(
    endpoint: Endpoint,
    path: str | None,
    *,
    timeout_s: float,
    on_connect: Callable[[], None] = lambda: None,
) -> Answer:
    """GET `path`, or only connect when it is None. Never raises, never outlasts `timeout_s`.

    Args:
        on_connect: called as soon as it is connected, for a caller who may not hear the end.
    """
    connected = False
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            tls = ssl.create_default_context() if endpoint.scheme == "https" else None
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
            connected = True
            on_connect()
            if path is None:
                return Answer(connected)
            writer.write(
                f"GET {endpoint.base_path}{path} HTTP/1.1\r\n"
                f"Host: {endpoint.host}:{endpoint.port}\r\nConnection: close\r\n\r\n".encode()
            )
            return Answer(connected, _status(await reader.readline()))
    except (OSError, ValueError, TimeoutError):  # ValueError: an endless first line
        return Answer(connected)
    finally:
        if writer is not None:
            writer.transport.abort()


def _status(line: bytes) -> int | None:
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    return int(code) if version.startswith(b"HTTP/1.") and code.isdigit() else None
