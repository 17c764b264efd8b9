"""What a shell hands to `rota serve`: streams that nobody reads, or that are missing; limits.

How: `rota serve` as a child whose streams are as a shell would set them; it is found by what
stands in its lock. The writer by itself on a pipe that is full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rota.cli.admin import Admin
from rota.cli.streams import LINES_MAX, LogWriter
from rota.errors import RotaError
from tests.cli.support import BOUND_S, model, write_config

LINES = 2_000  # more than a pipe of 64 KiB holds, beyond what is queued


@contextmanager
def _served(
    folder: Path, redirection: str = "", fd: int | None = None, *, before: str = ""
) -> Iterator[Admin]:
    """`rota serve` with its streams redirected; it has to end with 0."""
    path = write_config(folder, model("a"))
    command = f'{before} exec "$0" -m rota.cli serve --config "$1" {redirection}'
    argv = ["bash", "-c", command, sys.executable, str(path)]
    kept = () if fd is None else (fd,)
    with subprocess.Popen(argv, pass_fds=kept, start_new_session=True) as child:
        try:
            yield _find(folder / "state" / "lock", child)
            child.terminate()
            assert child.wait(BOUND_S) == 0
        finally:
            if child.poll() is None:
                child.kill()


def _find(lock: Path, child: subprocess.Popen[bytes]) -> Admin:
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        assert child.poll() is None, child.returncode
        try:
            admin = Admin(lock.read_text().split()[1])
            admin.status()
        except (OSError, IndexError, RotaError):
            time.sleep(0.02)
        else:
            return admin
    raise AssertionError("it does not answer")


@pytest.mark.parametrize("redirection", ["2>&-", "0<&- 1>&- 2>&-", "2>/dev/full", "1>&-"])
def test_streams_that_are_missing_or_full(tmp_path: Path, redirection: str) -> None:
    with _served(tmp_path, redirection) as admin:
        assert admin.load("a").result()["state"] == "ready"


def test_a_reader_that_left(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with _served(tmp_path, f"2>&{writes}", writes) as admin:
        os.close(writes)
        os.close(reads)
        assert admin.load("a").result()["state"] == "ready"


def test_a_reader_that_does_not_read(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "wb", 0) as stuck, os.fdopen(reads, "rb"):
        os.set_blocking(writes, False)
        while stuck.write(b"x" * 65_536):  # None once it is full
            pass
        os.set_blocking(writes, True)
        with _served(tmp_path, f"2>&{writes}", writes) as admin:
            assert admin.load("a").result()["state"] == "ready"


def test_more_clients_than_the_soft_limit_has_descriptors(tmp_path: Path) -> None:
    with _served(tmp_path, before="ulimit -Sn 64;") as admin, contextlib.ExitStack() as clients:
        host, port = admin.url.removeprefix("http://").split(":")
        for _ in range(100):
            clients.enter_context(socket.create_connection((host, int(port)), BOUND_S))
        assert admin.load("a").result()["state"] == "ready"


def test_verbs_without_streams(tmp_path: Path) -> None:
    with _served(tmp_path) as admin:
        for verb in ("load a >&- 2>&-", "ps <&- >&-"):
            command = f'exec "$0" -m rota.cli {verb} --url {admin.url}'
            done = subprocess.run(["bash", "-c", command, sys.executable], timeout=BOUND_S)
            assert done.returncode == 0, verb


def test_lines_beyond_the_bound_are_counted() -> None:
    reads, writes = os.pipe()
    writer = LogWriter(writes)
    for n in range(LINES_MAX + LINES):
        writer.emit(logging.makeLogRecord({"msg": f"line {n} " + "x" * 80}))
    with os.fdopen(reads, "rb") as reader:
        assert reader.readline() == b"line 0 " + b"x" * 80 + b"\n"
        assert any(b"lines of the log were dropped" in line for line in reader)
    writer.end()  # nobody reads the rest, so it is soon over
    os.close(writes)
