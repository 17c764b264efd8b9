"""Leases as they are remembered: across a restart, across a disk that fails, and how many.

How: a real database in the test's folder, opened, closed and damaged; a clock that is set.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rota.errors import ConfigError
from rota.store import LeaseRecord, LeaseStore, leases
from rota.store.database import FILE

BOUND_S = 30.0


class Clock:
    """Seconds since 1970, as set."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def take(store: LeaseStore, lease: str, *, ttl_ms: int = 60_000) -> None:
    store.taken(lease, "video", "r1", "peer:127.0.0.1", "a render", ttl_ms)


def rows(folder: Path) -> dict[str, tuple[int | None, str]]:
    with closing(sqlite3.connect(folder / FILE)) as connection:
        found = connection.execute("SELECT lease, ended_ms, why FROM leases").fetchall()
    return {lease: (ended_ms, why) for lease, ended_ms, why in found}


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_lease_is_remembered_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    clock = Clock()
    with LeaseStore(tmp_path, clock=clock) as store:
        take(store, "a")
        took = LeaseRecord(
            "a", "video", "r1", "peer:127.0.0.1", "a render", 1_000_000, expires_ms=1_060_000
        )
        assert store.find("a") == took
        clock.now_s += 30
        store.renewed("a", 120_000)
        found = store.find("a")
        assert found is not None
        assert (found.taken_ms, found.expires_ms) == (1_000_000, 1_150_000)
        assert store.recently_ended() == []
        clock.now_s += 5
        store.ended("a", "released")
        found = store.find("a")
        assert found is not None
        assert (found.ended_ms, found.why) == (1_035_000, "released")
        assert store.recently_ended() == [found]
    with LeaseStore(tmp_path, clock=clock) as store:
        assert store.recently_ended() == [found]


def test_what_is_not_known_changes_nothing(tmp_path: Path) -> None:
    with LeaseStore(tmp_path) as store:
        store.renewed("a", 1)
        store.ended("a", "released")
        take(store, "a")
        store.ended("a", "released")
        store.ended("a", "expired")
        store.renewed("a", 1)
        (record,) = store.recently_ended()
        assert record.why == "released"
        assert store.find("b") is None


def test_leases_that_a_former_rota_left_open_are_over(tmp_path: Path) -> None:
    clock = Clock()
    with LeaseStore(tmp_path, clock=clock) as store:
        take(store, "old")
        store.ended("old", "expired")
        take(store, "open")
    assert rows(tmp_path) == {"old": (1_000_000, "expired"), "open": (None, "")}
    clock.now_s += 7
    with LeaseStore(tmp_path, clock=clock) as store:
        said = [(record.lease, record.why) for record in store.recently_ended()]
        assert said == [("open", "rota was restarted"), ("old", "expired")]
        assert store.recently_ended(1)[0].ended_ms == 1_007_000
    assert rows(tmp_path)["open"] == (1_007_000, "rota was restarted")


def test_as_many_are_remembered_as_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "ENDED_MAX", 3)
    clock = Clock()
    with LeaseStore(tmp_path, clock=clock) as store:
        take(store, "kept")
        for n in range(6):
            clock.now_s += 1
            take(store, f"l{n}")
            store.ended(f"l{n}", "released")
        assert [record.lease for record in store.recently_ended()] == ["l5", "l4", "l3"]
        assert store.find("l2") is None
    assert set(rows(tmp_path)) == {"kept", "l3", "l4", "l5"}
    with LeaseStore(tmp_path, clock=clock) as store:
        assert [record.lease for record in store.recently_ended()] == ["kept", "l5", "l4"]


def test_nobody_waits_for_a_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone else keeps the file: what is told is known at once, and written when it may be."""
    monkeypatch.setattr("rota.store.database.BUSY_S_MAX", 0.01)
    monkeypatch.setattr(leases, "RETRY_S", 0.01)
    caplog.set_level(logging.INFO, "rota.store")
    with LeaseStore(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for n in range(100):
                take(store, f"l{n}")
                store.ended(f"l{n}", "released")
            assert len(store.recently_ended()) == 100
            until(lambda: "database is locked" in caplog.text)
            assert rows(tmp_path) == {}
        until(lambda: "written down again" in caplog.text)
        assert len(rows(tmp_path)) == 100
    assert caplog.text.count("for now") == 1


def test_a_full_notebook_leaves_out_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.store.database.BUSY_S_MAX", 0.01)
    monkeypatch.setattr(leases, "RETRY_S", 0.01)
    monkeypatch.setattr(leases, "UNWRITTEN_MAX", 2)
    with LeaseStore(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for lease in "abc":
                take(store, lease)
        assert store.find("a") is not None
    assert set(rows(tmp_path)) == {"b", "c"}


def test_the_last_words_are_written_before_it_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    with LeaseStore(tmp_path) as store:
        for n in range(500):
            take(store, f"l{n}")
    assert len(rows(tmp_path)) == 500
    assert threading.active_count() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]  # no -wal, no -shm


def test_the_file_is_its_owner_s_alone(tmp_path: Path) -> None:
    with LeaseStore(tmp_path) as store:
        take(store, "a")
        for path in tmp_path.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught, LeaseStore(folder):
        pass
    assert caught.value.code == "state_unusable"
    return caught.value.message.replace(str(folder / FILE), "PATH")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database, and long enough to be looked at" * 100)
    assert refused(tmp_path) == (
        "the database PATH is damaged (file is not a database); "
        "move it away, and rota begins a new one"
    )


def test_a_damaged_database(tmp_path: Path) -> None:
    with LeaseStore(tmp_path) as store:
        for n in range(500):
            take(store, f"l{n}")
            store.ended(f"l{n}", "released")
    path = tmp_path / FILE
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 4))
    assert refused(tmp_path).startswith("the database PATH is damaged (")


def test_a_database_without_its_tables(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute("PRAGMA user_version = 1")
    assert refused(tmp_path) == "the database PATH cannot be used: no such table: leases"


def test_a_newer_rota_s_database(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute("PRAGMA user_version = 99")
    assert refused(tmp_path) == "the database PATH was written by a newer rota"


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    assert refused(tmp_path) == "the database PATH cannot be opened: Is a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everything")
def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / FILE).touch(0o400)
    assert refused(tmp_path) == "the database PATH cannot be opened: Permission denied"


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    assert refused(tmp_path) == "the database PATH cannot be used: disk I/O error"


@pytest.mark.parametrize(
    "mistake",
    [
        "taken_ms = 'noon'",
        "taken_ms = 1.5",
        "expires_ms = x'00'",
        "ended_ms = 9223372036854775807",
        "ended_ms = -9223372036854775808",
        "reason = x'ff00'",
    ],
)
def test_a_record_that_rota_did_not_write_so(tmp_path: Path, mistake: str) -> None:
    """Sound for SQLite; believed, it would fail each list of leases from now on."""
    with LeaseStore(tmp_path) as store:
        take(store, "odd")
        store.ended("odd", "released")
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute(f"UPDATE leases SET {mistake}")
        connection.commit()
    assert refused(tmp_path) == (
        "the database PATH is damaged (a lease is recorded that cannot have been, 'odd'); "
        "move it away, and rota begins a new one"
    )


def test_a_clock_at_the_end_of_all_calendars(tmp_path: Path) -> None:
    clock = Clock()
    clock.now_s = 1e15
    with LeaseStore(tmp_path, clock=clock) as store:
        take(store, "late")
    with LeaseStore(tmp_path, clock=clock) as store:
        (record,) = store.recently_ended()
        assert record.ended_ms == leases.TIME_MS_MAX
