"""What every kind of engine offers the node: how to launch it, and where it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica answers HTTP. `base_path` is '' or starts with '/', without a last '/'."""

    host: str
    port: int
    scheme: str = "http"
    base_path: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """One concrete start of an engine: everything filled in.

    Args:
        argv: the command and its arguments; no shell.
        stop_argv: what is run to end it, `${PID}` being its process; none = SIGTERM.
        env: the whole environment of the child.
        port: the port the child is to bind on loopback.
        ready: the path that answers 200 when it can serve; None = ready at once.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    ready: str | None
    cwd: Path | None = None
    stop_argv: tuple[str, ...] = ()
    files: tuple[Path, ...] = field(default=())  # must exist before a start makes sense
