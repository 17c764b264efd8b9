"""What the whole of rota costs per request and per token, beside the same engine asked directly.

The engine is the cheapest there can be (a few lines on a raw socket, in a process of its own),
so what is measured is rota: gateway, controller and scheduler as `rota serve` runs them, with
the engine as a `url:` model. CPU comes from the process's own accounts, which other load on the
machine does not change; latencies are taken by turns, direct and through rota, in one run.

    python bench/gateway_overhead.py [--requests 4000] [--streams 200] [--seconds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from _machine import header
from rota.gateway.server import loop_factory

BOUND_S = 60.0
CHUNKS_A_SECOND = 10
ENOUGH = b'"end"}'
ANSWER = b'{"choices": [], "by": "end"}'
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": " token"}}]}\n\n'
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start the engine and rota, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--be-the-engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if options.be_the_engine:
            runner.run(be_the_engine())
        else:
            print(header("uvicorn", "httptools", "uvloop"))
            with running_rota() as rota:
                runner.run(measure(rota, options))


@dataclass(frozen=True, slots=True)
class Rota:
    """What is measured, and where."""

    pid: int
    port: int
    engine_port: int

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(rota: Rota, options: argparse.Namespace) -> None:
    """Each figure in turn; the first requests of each kind warm up and are not counted."""
    small = request(100)
    await ask_in_turn(rota.port, small, 200)
    print(f"{'idle, resident MiB':<52}{rota.resident_mib():10.0f}")

    direct, through = [], []
    for _ in range(10):  # by turns, so that what else the machine does strikes both
        direct += await ask_in_turn(rota.engine_port, small, options.requests // 20)
        through += await ask_in_turn(rota.port, small, options.requests // 20)
    added_us = (statistics.median(through) - statistics.median(direct)) * 1e6
    print(f"{f'1 client, added at the median, µs (n={len(through)})':<52}{added_us:10.0f}")

    for clients, body_bytes in ((16, 100), (64, 100), (16, 256 * 1024)):
        count = options.requests if body_bytes < 1024 else options.requests // 8
        asked = request(body_bytes)
        await ask_together(rota.port, asked, clients, count // 8)
        before = rota.cpu_s()
        await ask_together(rota.port, asked, clients, count)
        cpu_ms = (rota.cpu_s() - before) * 1e3 / count
        name = f"{clients} clients, {body_bytes} bytes, CPU ms a request (n={count})"
        print(f"{name:<52}{cpu_ms:10.3f}")

    await stream(rota, options.streams, options.seconds)


async def stream(rota: Rota, streams: int, seconds: float) -> None:
    """Streams of ten events a second, all at once: what each event costs, and the memory."""
    loop = asyncio.get_running_loop()
    asked = request(100, f"?events={int(seconds * CHUNKS_A_SECOND)}")
    readers = [
        (await loop.create_connection(lambda: Asker(asked, b"[DONE]"), "127.0.0.1", rota.port))[1]
        for _ in range(streams)
    ]
    whole = [asyncio.ensure_future(reader.ask()) for reader in readers]
    await asyncio.sleep(seconds / 4)
    before, since = rota.cpu_s(), sum(reader.events for reader in readers)
    await asyncio.sleep(seconds / 2)
    cpu_us = (rota.cpu_s() - before) * 1e6
    events = sum(reader.events for reader in readers) - since
    resident = rota.resident_mib()
    await asyncio.wait_for(asyncio.gather(*whole), BOUND_S)
    for reader in readers:
        reader.close()
    print(f"{f'{streams} streams, CPU µs an event (n={events})':<52}{cpu_us / events:10.0f}")
    print(f"{f'{streams} streams, resident MiB':<52}{resident:10.0f}")


def request(body_bytes: int, query: str = "") -> bytes:
    body = b'{"model": "m", "pad": "%b"}' % (b"x" * body_bytes)
    head = f"POST /v1/chat/completions{query} HTTP/1.1\r\nHost: x\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Asker(asyncio.Protocol):
    """The cheapest client: it sends bytes and reads until it has seen the end of an answer."""

    def __init__(self, asked: bytes, enough: bytes = ENOUGH) -> None:
        self._asked = asked
        self._enough = enough
        self._tail = b""
        self._answered: asyncio.Future[None]
        self._transport: asyncio.Transport
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast("asyncio.Transport", transport)

    async def ask(self) -> None:
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(self._asked)
        await self._answered

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self._tail = (self._tail + data)[-64:]
        if self._enough in self._tail:
            self._tail = b""
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_exception(ConnectionError(f"cut off: {exc}"))

    def close(self) -> None:
        self._transport.close()


async def ask_in_turn(port: int, asked: bytes, count: int) -> list[float]:
    """Seconds each of `count` requests took, one after the other on one connection."""
    loop = asyncio.get_running_loop()
    _, asker = await loop.create_connection(lambda: Asker(asked), "127.0.0.1", port)
    took_s = []
    for _ in range(count):
        since = time.perf_counter()
        await asker.ask()
        took_s.append(time.perf_counter() - since)
    asker.close()
    return took_s


async def ask_together(port: int, asked: bytes, clients: int, count: int) -> None:
    turns = [ask_in_turn(port, asked, count // clients) for _ in range(clients)]
    await asyncio.wait_for(asyncio.gather(*turns), BOUND_S)


class Engine(asyncio.Protocol):
    """Answers a whole request with fixed bytes, or with as many events as its query asks."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, blank, body = self._buffer.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not blank or len(body) < int(length):
            return
        self._buffer = b""
        events = head.partition(b"?events=")[2].partition(b" ")[0]
        if events:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            self._send_event(int(events))
        else:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
            )

    def _send_event(self, left: int) -> None:
        event = EVENT if left else b"data: [DONE]\n\n"
        last = b"" if left else b"0\r\n\r\n"
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, last))
        if left:
            loop = asyncio.get_running_loop()
            loop.call_later(1 / CHUNKS_A_SECOND, self._send_event, left - 1)


async def be_the_engine() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started us is gone


@contextlib.contextmanager
def running_rota() -> Iterator[Rota]:
    """The engine and `rota serve` before it, each a process, both ended at the end."""
    engine = subprocess.Popen(
        [sys.executable, __file__, "--be-the-engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine_port = int(engine.stdout.readline())
            with free_port() as port:
                config = Path(folder) / "rota.yaml"
                config.write_text(
                    f"listen: 127.0.0.1:{port}\nstate: {folder}/state\n"
                    f"models:\n  m: {{url: 'http://127.0.0.1:{engine_port}', concurrency: 1000}}\n"
                )
            command = [sys.executable, "-m", "rota.cli", "serve", "--config", str(config)]
            log = (Path(folder) / "log").open("w")
            rota = subprocess.Popen(command, stderr=log)
            try:
                wait_until_served(port, rota)
                yield Rota(rota.pid, port, engine_port)
            finally:
                rota.terminate()
                rota.wait(BOUND_S)
                log.close()
        finally:
            engine.communicate("")


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        yield probe.getsockname()[1]


def wait_until_served(port: int, rota: subprocess.Popen[bytes]) -> None:
    import http.client

    until = time.monotonic() + BOUND_S
    while time.monotonic() < until and rota.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        with contextlib.suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        connection.close()
        time.sleep(0.02)
    raise SystemExit("rota did not start")


if __name__ == "__main__":
    main()
