"""What every bench prints first, and how it sums up: machine, versions, n, median and p95."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path


def header(*packages: str) -> str:
    """The machine, the interpreter, the commit and the versions of what is measured."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return (
        f"{cpu}, {os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}, rota {commit or 'unknown'}; {versions}"
    )


def row(name: str, seen_ms: Sequence[float]) -> str:
    """One line: n, median and p95 of some milliseconds."""
    p95 = statistics.quantiles(seen_ms, n=20)[-1] if len(seen_ms) > 1 else seen_ms[0]
    return f"{name:<44} n={len(seen_ms):<4} {statistics.median(seen_ms):9.1f} {p95:9.1f}"
