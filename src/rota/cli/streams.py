"""The standard streams of a process that serves: they may be missing, full, or read by nobody.

The log is written by a thread of its own. A terminal that is stopped, or a pipe whose reader
is, blocks whoever writes to it, and that must never be the event loop: every request would
wait with it. Lines that find `LINES_MAX` before them are dropped and counted.

Refused: making stderr non-blocking, which would reach every other process that has it open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import sys
import threading
from collections.abc import Iterator

from rota.cli.text import OneLine

LINES_MAX = 10_000
LAST_WORDS_S_MAX = 1.0  # for what is still unwritten when the process ends


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """One line per effect on stderr until the block is left; nowhere, where there is none."""
    if sys.stderr is None:
        yield
        return
    writer = LogWriter(sys.stderr.fileno())
    writer.setFormatter(
        OneLine("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.addHandler(writer)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(writer)
        writer.end()


class LogWriter(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor; never waits for it."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_MAX)
        self._dropped = 0
        # A daemon: a reader that never reads must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - a record that cannot be formatted is logging's to tell
            self.handleError(record)

    def end(self) -> None:
        """Write what is left, within `LAST_WORDS_S_MAX`."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(LAST_WORDS_S_MAX)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._write(f"[{dropped} lines of the log were dropped: nobody read it]\n")
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        """Straight to the descriptor: `sys.stderr` has a lock, and the interpreter cannot end
        while a thread that is stuck holds it."""
        data = text.encode("utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever gave us the descriptor wanted it so
                select.select([], [self._fd], [])
            except OSError:  # the reader is gone, or the disk is full: the line is lost
                return


def open_missing() -> None:
    """Put /dev/null where a standard stream was closed.

    Else the next file or socket gets its number, and is written to as if it were the log;
    libuv ends the process when it is to close one of these.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == fd, (opened, fd)  # the lowest that is free
            os.set_inheritable(fd, True)
