"""How much of a machine's memory engines on the CPU may share when nobody has said."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RESERVE_MIB = 1024  # for the system, rota itself and what the measuring missed
_MIB = 1024 * 1024


def available_mib() -> int:
    """RAM that is free now less 1 GiB, at least 0; under a cgroup's limit, what that leaves.

    From `MemAvailable` (proc(5): what can be had without swapping) and cgroup v2's
    `memory.max - memory.current`; without /proc, 80 % of the physical memory.
    """
    budgets = [budget for budget in (_machine(), _cgroup()) if budget is not None]
    if not budgets:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 8 // 10 // _MIB
    return max(0, min(budgets) - RESERVE_MIB)


def _machine() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return None


def _cgroup() -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or its limit is "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        return (limit - int((group / "memory.current").read_text())) // _MIB
    return None
