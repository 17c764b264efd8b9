"""What /proc knows of processes: who is still the same one, who carries our mark, who listens.

A pid alone names nobody for long, so identity here is a pid with its start time, or the mark
that every engine and all it starts carry in their environment (`ROTA_REPLICA`), or descent
from a guard that lives. Where there is no /proc every answer is "not known", and callers go
on without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rota.node.guard import descendants

MARK = "ROTA_REPLICA"
END_WAIT_S = 5.0
CONTAINER_PROXIES = {"docker-proxy", "dockerd", "rootlessport", "pasta", "slirp4netns", "conmon"}

_PROC = Path("/proc")
_LISTEN = "0A"  # include/net/tcp_states.h
_LOOPBACK = {  # local addresses that take what is sent to 127.0.0.1, as /proc/net/tcp writes them
    "0100007F",
    "00000000",
    "00000000000000000000000000000000",
    "0000000000000000FFFF00000100007F",
}


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None = there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def boot_id() -> str:
    """Which boot of the machine this is; '' where it cannot be told."""
    with contextlib.suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def marked(mark: str) -> set[int]:
    """Processes whose environment holds `ROTA_REPLICA` with a value that starts with `mark`."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            environ = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if any(entry.startswith(wanted) for entry in environ):
                found.add(pid)
    return found


def end_all(find: Callable[[], set[int]]) -> set[int]:
    """SIGKILL what `find` finds, with all below it, until it finds nobody. Blocks.

    Returns those left after five seconds, which even SIGKILL does not end.
    """
    deadline = time.monotonic() + END_WAIT_S
    while True:
        found = {pid for pid in find() if start_ticks(pid) is not None}
        if not found or time.monotonic() > deadline:
            return found
        below = {pid for root in found for pid in descendants(root)}
        for pid in found | below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def foreign_holder(port: int, guard_pid: int) -> Holder | None:
    """Who, other than the engine under `guard_pid`, answers on `port` of loopback.

    Returns None when it is ours and also when it cannot be told: no /proc, no permission, or
    a container's proxy, which stands in for an engine that runs beside and not below us.
    """
    inodes = _listening(port)
    ours = {guard_pid, *descendants(guard_pid)}
    if _find_holder(inodes, ours) is not None:
        return None  # looked for first: to look through everyone is slow on a large machine
    found = _find_holder(inodes, _pids() - ours)
    return None if found is None or found.name in CONTAINER_PROXIES else found


def holder_of(port: int) -> Holder | None:
    """Who listens on `port` of loopback; None = nobody, or nobody whom we may look at."""
    return _find_holder(_listening(port), _pids())


def is_free(port: int) -> bool:
    """Whether a server could bind `port` on loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that was free a moment ago. Whoever binds it late may find it taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listening(port: int) -> set[str]:
    """The inodes of the sockets that listen on `port` where 127.0.0.1 reaches them."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "self/net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == _LISTEN and int(number, 16) == port and address in _LOOPBACK:
                    inodes.add(fields[9])
    return inodes


def _find_holder(inodes: set[str], among: set[int]) -> Holder | None:
    if not inodes:
        return None
    links = {f"socket:[{inode}]" for inode in inodes}
    for pid in among:
        with contextlib.suppress(OSError):
            for fd in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()) in links:
                        return Holder(pid, (_PROC / str(pid) / "comm").read_text().strip())
    return None


def _pids() -> set[int]:
    with contextlib.suppress(OSError):
        return {int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()}
    return set()
