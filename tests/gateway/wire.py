"""A client that reads and writes exact bytes, for tests: what an SDK hides is what we look at.

Every wait is bounded; a bound that strikes is a hang, and fails the test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HANG_S = 60.0  # far beyond anything measured; striking means a hang


@dataclass
class Answer:
    """A response as it came. `is_whole`: its body ended as its framing says it should."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    is_whole: bool = False

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name.lower()]
        assert len(values) <= 1, (name, values)
        return values[0] if values else None

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Wire:
    """One connection to a server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answer: Answer = field(default_factory=lambda: Answer(0, []))

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), HANG_S)

    async def read_head(self) -> Answer:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), HANG_S)
        lines = raw.decode("latin-1").split("\r\n")
        headers = [line.split(": ", 1) for line in lines[1:] if line]
        self.answer = Answer(
            int(lines[0].split(" ")[1]), [(name.lower(), value) for name, value in headers]
        )
        return self.answer

    async def read_piece(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        line = await asyncio.wait_for(self.reader.readuntil(b"\r\n"), HANG_S)
        size = int(line, 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), HANG_S)
        return data[:-2]

    async def read_body(self) -> Answer:
        """The rest, whatever its framing; `is_whole` says whether it was cut."""
        answer = self.answer
        try:
            if answer.header("transfer-encoding") == "chunked":
                while piece := await self.read_piece():
                    answer.body += piece
            else:
                length = int(answer.header("content-length") or 0)
                answer.body = await asyncio.wait_for(self.reader.readexactly(length), HANG_S)
            answer.is_whole = True
        except asyncio.IncompleteReadError as error:
            if answer.header("transfer-encoding") != "chunked":
                answer.body += error.partial
        except ConnectionError:
            pass
        return answer

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError, BrokenPipeError):
            await asyncio.wait_for(self.writer.wait_closed(), HANG_S)

    def abort(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def connect(port: int, *, limit: int = 2**16) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection("127.0.0.1", port, limit=limit), HANG_S
    )
    wire = Wire(reader, writer)
    try:
        yield wire
    finally:
        await wire.close()


def request_bytes(
    method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    lines = {"host": "127.0.0.1", **(headers or {})}
    if body is not None:
        lines.setdefault("content-length", str(len(body)))
    head = f"{method} {target} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in lines.items()
    )
    return head.encode("latin-1") + b"\r\n" + (body or b"")


async def ask(
    port: int,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request on a connection of its own, and its whole answer."""
    async with connect(port) as wire:
        await wire.write(request_bytes(method, target, body, headers))
        answer = await wire.read_head()
        return answer if method == "HEAD" else await wire.read_body()


CHAT = "/v1/chat/completions"


def chat(model: str = "m", **more: object) -> bytes:
    return json.dumps({"model": model, "messages": [], **more}).encode()
