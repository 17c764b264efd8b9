"""What /proc knows of processes: who is still the same one, and who carries our mark.

A pid alone names nobody for long, so identity here is a pid with its start time, or the mark
that every engine and all it starts carry in their environment (`ROTA_REPLICA`), or descent
from a guard that lives. Where there is no /proc every answer is "not known", and callers go
on without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rota.node.guard import descendants

MARK = "ROTA_REPLICA"
END_WAIT_S = 5.0
PROC = Path("/proc")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None = there is no such process."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def boot_id() -> str:
    """Which boot of the machine this is; '' where it cannot be told."""
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def marked(mark: str) -> set[int]:
    """Processes whose environment holds `ROTA_REPLICA` with a value that starts with `mark`."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for pid in all_pids():
        with contextlib.suppress(OSError):
            environ = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
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


def all_pids() -> set[int]:
    """Every process on the machine that we can see; empty where there is no /proc."""
    with contextlib.suppress(OSError):
        return {int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()}
    return set()
