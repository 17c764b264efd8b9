"""Rota's end of the guards (`guard.py`): start the guard server, and one `Child` per engine.

A `Child` is the protocol of its own socket: what the guard says becomes three futures
(started, exited, gone) and a ring of output lines. There is no task and no queue to own, and
nothing here can raise into a caller: each future always gets a result, at the latest when
the socket ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from rota.engines.base import Launch
from rota.node import guard

Result = TypeVar("Result")

LINES_MAX = 500
LINE_CHARS_MAX = 2_000
LOG_BYTES_MAX = 4 * 1024 * 1024
SERVER_END_S = 15.0  # above what a guard takes at most


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine could not be started.

    Args:
        permanent: trying again cannot help until someone changes something.
        guard_lost: the engine had no part in it.
    """

    error: str
    permanent: bool = False
    guard_lost: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """How the engine's own process ended. Both None: its guard was lost, nobody saw it.

    Args:
        tail: the last lines it wrote, of the last 4 KiB.
    """

    code: int | None = None
    signal: int | None = None
    tail: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.code is not None:
            return f"exited with code {self.code}"
        if self.signal is not None:
            return f"was killed by {_signal_name(self.signal)}"
        return "was lost: the process that guarded it is gone"


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing of the engine is left, as far as its guard could see.

    Args:
        seen: the guard said so; False = the guard itself was lost.
        forced: it took SIGKILL.
        left: what even SIGKILL did not end.
        stop_failed: what became of the command that was to end it, if it took SIGTERM instead.
    """

    seen: bool
    forced: bool = False
    left: tuple[int, ...] = ()
    stop_failed: str = ""


class Child(asyncio.Protocol):
    """One engine process under its guard.

    Attributes:
        started: None, or why it could not be.
        exited: how the engine's own process ended, as soon as it did.
        gone: nothing of it is left; always last.
        wrote_at: when output of it last came, on the clock of `time.monotonic`.
    """

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch = launch
        self.log = log
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[Failure | None] = loop.create_future()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.gone: asyncio.Future[Gone] = loop.create_future()
        self.pid: int | None = None
        self.guard_pid: int | None = None
        self.wrote_at = -math.inf
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._line = ""  # what has no end yet
        self._heard = b""
        self._transport: asyncio.Transport | None = None

    def stop(self, grace_ms: int) -> None:
        """SIGTERM now (or its own command), SIGKILL after `grace_ms`. Asked again, the earlier
        end counts."""
        self._send({"stop": grace_ms})

    def abandon(self) -> None:
        """Give up on a guard that does not answer. Its end takes the engine along; of what was
        below the engine the guard server takes care."""
        if self._transport is not None:
            if self.guard_pid is not None:  # it holds the socket, so the pid is still its own
                os.kill(self.guard_pid, signal.SIGKILL)
            self._transport.abort()

    def tail(self, lines: int) -> list[str]:
        """The last lines it wrote, oldest first; at most `LINES_MAX` are kept."""
        kept = [*self._lines, self._line] if self._line else [*self._lines]
        return kept[-lines:] if lines > 0 else []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._send(
            {
                "argv": self.launch.argv,
                "stop_argv": self.launch.stop_argv,
                "env": dict(self.launch.env),
                "cwd": None if self.launch.cwd is None else str(self.launch.cwd),
                "log": str(self.log),
                "log_bytes_max": LOG_BYTES_MAX,
            }
        )

    def data_received(self, data: bytes) -> None:
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        _settle(self.started, Failure("the process that was to guard it ended", guard_lost=True))
        _settle(self.exited, Exit(tail=tuple(self.tail(20))))
        _settle(self.gone, Gone(seen=False))

    def _hear(self, said: dict[str, object]) -> None:
        match said:
            case {"kind": "started", "pid": int(pid), "guard": int(guard_pid)}:
                self.pid, self.guard_pid = pid, guard_pid
                _settle(self.started, None)
            case {"kind": "failed", "error": str(error), "permanent": bool(permanent)}:
                _settle(self.started, Failure(error, permanent))
                _settle(self.gone, Gone(seen=True))
            case {"kind": "output", "text": str(text), "dropped": int(dropped)}:
                self.wrote_at = time.monotonic()
                if dropped:
                    self._write(f"\n[rota: {dropped} bytes are only in the log file]\n")
                self._write(text)
            case {"kind": "exit", "code": code, "signal": number, "tail": str(tail)}:
                assert code is None or isinstance(code, int)
                assert number is None or isinstance(number, int)
                lines = tuple(_shown(line) for line in tail.split("\n"))
                _settle(self.exited, Exit(code, number, lines))
            case {"kind": "gone", "forced": bool(forced), "left": list(left)}:
                stop_failed = str(said["stop_failed"])
                _settle(self.gone, Gone(True, forced, tuple(left), stop_failed))
            case _:
                raise AssertionError(said)

    def _write(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        self._lines.extend(_shown(line) for line in lines)
        self._line = self._line[-LINE_CHARS_MAX:]

    def _send(self, order: dict[str, object]) -> None:
        if self._transport is not None:
            self._transport.write(json.dumps(order).encode() + b"\n")


class Guards:
    """The guard server: started when first needed, and again should someone kill it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def open(self) -> socket.socket:
        """Have the server ready, so that the first start does not wait for an interpreter."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", guard.__file__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        return ours

    async def guard(self, child: Child) -> None:
        """Put `child` under a guard of its own. What comes of it is told by its futures."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._hand_over(theirs)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: child, sock=ours)
        except BaseException:
            ours.close()  # which tells the guard
            child.connection_lost(None)
            raise

    async def close(self) -> None:
        """Let the server go and wait for it: it ends when its last guard has."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(_reap, server)

    def _hand_over(self, end: socket.socket) -> None:
        server = self._socket or self.open()
        try:
            socket.send_fds(server, [b"+"], [end.fileno()])
        except OSError:  # dead, or too stuck to take one byte
            socket.send_fds(self._replace(), [b"+"], [end.fileno()])

    def _replace(self) -> socket.socket:
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.kill()  # its guards go on
            self._server.wait()
        return self.open()


def _settle(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _shown(line: str) -> str:
    """A line as a terminal would leave it: of a progress bar, the last state."""
    return line.rstrip("\r").rpartition("\r")[2][-LINE_CHARS_MAX:]


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _reap(server: subprocess.Popen[bytes]) -> None:
    try:
        server.wait(SERVER_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
