"""One rota per state directory.

A lock of the kernel's (flock), which no kind of death leaves behind; what stands in the file
only says who holds it. Refused: a pid file, which does outlive its writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from rota.errors import ConfigError


class StateLock:
    """The right to use a state directory, held from `acquire` to `release`; a context manager.

    Args:
        state_dir: made if it is missing, for its owner alone: logs may hold what users wrote.
        listen: where this rota answers, told to whoever finds the lock taken.
    """

    def __init__(self, state_dir: Path, listen: str) -> None:
        self._state_dir = state_dir
        self._listen = listen
        self._fd: int | None = None

    def acquire(self) -> None:
        """Raises ConfigError: another rota holds it, or the directory cannot be used."""
        path = self._state_dir / "lock"
        try:
            self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot use the state directory {self._state_dir}: {error.strerror}; "
                "name another with `state:` or --state",
                code="state_unusable",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"{_holder(path)} uses the state directory {self._state_dir}; "
                "end it, or name another directory with `state:` or --state",
                code="state_in_use",
            ) from error
        with contextlib.suppress(OSError):  # a full disk is no reason not to serve
            os.truncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {self._listen}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give it up. The file stays: to remove it would race with whoever opens it now."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _holder(path: Path) -> str:
    pid, _, listen = path.read_text("utf-8", "replace").strip().partition(" ")
    return f"another rota (pid {pid}, listening on {listen})" if pid else "another rota"
