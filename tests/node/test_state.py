"""What is kept in the state directory: the lock that keeps a second rota off it, and records.
Real locks between real processes; leftovers are real processes that carry the mark.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rota.errors import ConfigError
from rota.node import processes
from rota.node.lock import StateLock
from rota.node.records import Records
from tests.node.support import fake, identities, model, scene, until


def test_a_second_rota_is_kept_off_and_told_by_whom(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    with StateLock(state, "127.0.0.1:8080"), pytest.raises(ConfigError) as refused:
        StateLock(state, "127.0.0.1:9090").acquire()
    assert f"another rota (pid {os.getpid()}, listening on 127.0.0.1:8080)" in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    with StateLock(state, "127.0.0.1:9090"):
        pass


def test_the_lock_goes_with_its_holder_however_it_ends(tmp_path: Path) -> None:
    text = (
        "import sys, time; from pathlib import Path; from rota.node.lock import StateLock\n"
        "lock = StateLock(Path(sys.argv[1]), 'here'); lock.acquire(); print('held', flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", text, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"pid {holder.pid}"):
            StateLock(tmp_path, "there").acquire()
        holder.kill()
    with StateLock(tmp_path, "there"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} there\n"


def test_a_full_disk_does_not_keep_from_the_lock(tmp_path: Path) -> None:
    text = (
        "import resource, sys; from pathlib import Path; from rota.node.lock import StateLock\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # each write fails, as on a full disk\n"
        "StateLock(Path(sys.argv[1]), 'here').acquire(); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", text, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another rota uses the state directory"):
            StateLock(tmp_path, "there").acquire()
        holder.kill()


async def test_the_lock_is_not_inherited_by_guards_or_engines(tmp_path: Path) -> None:
    lock = StateLock(tmp_path, "here")
    lock.acquire()
    async with scene(tmp_path, model("a", fake())) as it:
        await it.up("a")
        lock.release()
        with StateLock(tmp_path, "there"):
            pass


def test_a_directory_that_cannot_be_used_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the state directory"):
        StateLock(tmp_path / "file" / "state", "here").acquire()


def test_the_state_is_its_owners_alone(tmp_path: Path) -> None:
    with StateLock(tmp_path / "state", "here"):
        assert (tmp_path / "state").stat().st_mode & 0o077 == 0


async def test_a_record_names_the_live_engine(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a/b", fake())) as it:
        replica = await it.up("a/b")
        (path,) = (tmp_path / "replicas").iterdir()
        record = json.loads(path.read_text())
        assert record["pid"] == it.pid(replica)
        assert record["start"] == processes.start_ticks(record["pid"])
        it.stop(replica)
        await it.stopped()
        assert not list((tmp_path / "replicas").iterdir())


def test_the_sweep_ends_what_is_recorded_or_marked_and_nobody_else(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert records.sweep() == set()
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    marks = {
        "recorded": {},
        "marked": {processes.MARK: records.mark("r1")},
        "bystander": {processes.MARK: "/elsewhere#r1"},
        "stranger": {},
    }
    children = {
        name: subprocess.Popen(sleeper, env={**os.environ, **mark}) for name, mark in marks.items()
    }
    try:
        records.add("r0", children["recorded"].pid)
        stale = json.loads((tmp_path / "replicas" / "r0.json").read_text())
        stale |= {"pid": children["stranger"].pid, "start": 1}  # a pid that is someone else's now
        (tmp_path / "replicas" / "stale.json").write_text(json.dumps(stale))
        (tmp_path / "replicas" / "broken.json").write_text("{")
        _wait_until_marked(children["marked"].pid, records.mark("r1"))
        assert records.sweep() == set()
        assert children["recorded"].wait() == -signal.SIGKILL
        assert children["marked"].wait() == -signal.SIGKILL
        assert children["bystander"].poll() is None
        assert children["stranger"].poll() is None
        assert not list((tmp_path / "replicas").iterdir())
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def _wait_until_marked(pid: int, mark: str) -> None:
    while pid not in processes.marked(mark):  # until it has become the sleeper by exec
        os.sched_yield()


async def test_leftovers_are_ended_before_anything_starts(tmp_path: Path) -> None:
    mark = Records(tmp_path).mark("old")
    leftover = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, processes.MARK: mark},
    )
    try:
        await until(lambda: leftover.pid in processes.marked(mark), "the leftover")
        (identity,) = identities([leftover.pid])
        async with scene(tmp_path):
            assert not identity.is_alive()
    finally:
        leftover.kill()
        leftover.wait()
