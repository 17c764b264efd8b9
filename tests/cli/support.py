"""A `rota serve` of its own per test, as a child process, over fake engines.

It listens on a free port, its state is in the test's folder, and it is ended by its pid; its
engines end with it, whatever the test does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rota.cli.admin import Admin, Json

BOUND_S = 60.0  # on every wait; nothing is expected to take this long
FAKE = f"{sys.executable} -m rota.testing.fake_engine --port ${{PORT}} --name ${{MODEL}}"


def write_config(folder: Path, models: str, *, top: str = "") -> Path:
    path = folder / "rota.yaml"
    path.write_text(
        "listen: 127.0.0.1:0\nstate: state\ndevices: {cpu: {memory: 1000MiB}}\n"
        f"{top}models:\n{models}"
    )
    return path


def model(name: str, *, memory: str = "600MiB", scaling: str = "{max: 1}", knobs: str = "") -> str:
    return f'  {name}: {{cmd: "{FAKE} {knobs}", memory: {memory}, scaling: {scaling}}}\n'


class Served:
    """A running `rota serve` and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        listening = self.wait_for(r"listening on (\S+)$")
        self.url = listening[1]
        self.admin = Admin(self.url)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self.lines.append("(ended)")
            self._said.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line with a match, waited for."""
        deadline_s = time.monotonic() + BOUND_S
        with self._said:
            while True:
                for line in self.lines:
                    if match := re.search(pattern, line):
                        return match
                left_s = deadline_s - time.monotonic()
                is_over = self.lines[-1:] == ["(ended)"] or left_s <= 0
                assert not is_over, f"no {pattern!r} in:\n" + "\n".join(self.lines)
                self._said.wait(left_s)

    def model(self, name: str) -> Json:
        (found,) = (m for m in self.admin.status()["models"] if m["name"] == name)
        return dict(found)

    def pids(self) -> list[int]:
        """The engines' processes."""
        models = self.admin.status()["models"]
        return [r["pid"] for m in models for r in m["replicas"] if r["pid"] is not None]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit code, waited for."""
        code = self.process.wait(BOUND_S)
        self._reader.join(BOUND_S)
        return code


# Makes stdin the terminal that the process hears of when it goes.
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, sys.argv[1:])"
)


@contextmanager
def served(path: Path, *options: str, terminal: int | None = None) -> Iterator[Served]:
    """`rota serve`, with a terminal of its own or none."""
    argv = [sys.executable, "-m", "rota.cli", "serve", "--config", str(path), *options]
    if terminal is not None:
        argv = [sys.executable, "-c", _ON_TERMINAL, *argv]
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            yield Served(child)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait(BOUND_S)


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A verb, as a child without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "rota.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


def wait_until_gone(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(_is_alive, pids)))


def wait_until(condition: Callable[[], object]) -> None:
    """Poll a condition, with a bound."""
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline_s, "still not so"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
