"""Who had which replica, since when, and how that ended: leases as they are remembered.

Memory answers, the file outlives. Each change is noted in memory at once, which is what is read
back, and written by a thread of its own, so no request waits for a disk. What is written is always
the whole record, and what could not be written stays noted: a disk that was full for a while
costs nothing but lateness. A queue of SQL statements was refused: it has to be bounded, and
then a lost one leaves a record wrong for ever.

Times are the wall clock's (milliseconds since 1970), since they are for people and outlive the
process; the scheduler counts on another clock and knows nothing of this one.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Protocol, Self

from rota.store.database import open_database

ENDED_MAX = 1_000
"""Leases that are over and still remembered."""
UNWRITTEN_MAX = 10_000
"""Records that wait to be written; over it the oldest are not written until they change."""
RETRY_S = 5.0
"""After a write that failed."""
CLOSE_S_MAX = 10.0
"""What closing waits for the last write: SQLite's own patience with a busy file, and a disk."""
TIME_MS_MAX = 253_402_300_799_000
"""The end of the year 9999; calendars and their formats end there."""
RESTARTED = "rota was restarted"

log = logging.getLogger("rota.store")


class LeaseKeeper(Protocol):
    """Whom the controller tells of leases. Each call returns at once."""

    def taken(
        self, lease: str, model: str, replica: str, caller: str, reason: str, ttl_ms: int
    ) -> None:
        """A lease begins, to end in `ttl_ms` unless it is renewed."""

    def renewed(self, lease: str, ttl_ms: int) -> None:
        """A lease now ends in `ttl_ms`."""

    def ended(self, lease: str, why: str) -> None:
        """A lease is over, for a reason in words."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease, as remembered.

    Args:
        expires_ms: when it ends, or would have.
        ended_ms: None = it is not over.
        why: why it ended, in words; empty = it is not over.
    """

    lease: str
    model: str
    replica: str
    caller: str
    reason: str
    taken_ms: int
    expires_ms: int
    ended_ms: int | None = None
    why: str = ""


_COLUMNS = ", ".join(field.name for field in fields(LeaseRecord))
_WRITE = (
    f"INSERT OR REPLACE INTO leases ({_COLUMNS})"  # noqa: S608  # names of our own
    f" VALUES ({', '.join('?' for _ in fields(LeaseRecord))})"
)
_READ = f"SELECT {_COLUMNS} FROM leases ORDER BY ended_ms, taken_ms"  # noqa: S608
_FORGET = """
    DELETE FROM leases WHERE lease IN (
        SELECT lease FROM leases WHERE ended_ms IS NOT NULL
        ORDER BY ended_ms DESC, taken_ms DESC LIMIT -1 OFFSET ?
    )
"""


class LeaseStore:
    """A `LeaseKeeper` over a state directory; a context manager, whose leaving writes the rest.

    Methods are for one thread, the event loop's.

    Args:
        state_dir: is there, and is this rota's alone.
        clock: seconds since 1970.

    Raises:
        ConfigError: on entering; see `open_database`.
    """

    def __init__(self, state_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._state_dir = state_dir
        self._clock = clock
        self._active: dict[str, LeaseRecord] = {}
        self._ended: OrderedDict[str, LeaseRecord] = OrderedDict()
        self._unwritten: OrderedDict[str, LeaseRecord] = OrderedDict()
        self._changed = threading.Condition()  # guards the one above and the one below
        self._is_closing = False
        self._writer: threading.Thread | None = None

    def __enter__(self) -> Self:
        connection = open_database(self._state_dir, self._recall)
        self._writer = threading.Thread(
            target=self._write_on, args=(connection,), name="rota-store", daemon=True
        )
        self._writer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        assert self._writer is not None
        self._writer.join(CLOSE_S_MAX)

    # ── what the controller tells ────────────────────────────────────────────────────────

    def taken(
        self, lease: str, model: str, replica: str, caller: str, reason: str, ttl_ms: int
    ) -> None:
        """See `LeaseKeeper.taken`."""
        now_ms = self._now_ms()
        self._ended.pop(lease, None)
        self._active[lease] = LeaseRecord(
            lease, model, replica, caller, reason, now_ms, now_ms + ttl_ms
        )
        self._note(self._active[lease])

    def renewed(self, lease: str, ttl_ms: int) -> None:
        """See `LeaseKeeper.renewed`; of one that is not active, nothing is noted."""
        record = self._active.get(lease)
        if record is not None:
            self._active[lease] = replace(record, expires_ms=self._now_ms() + ttl_ms)
            self._note(self._active[lease])

    def ended(self, lease: str, why: str) -> None:
        """See `LeaseKeeper.ended`; of one that is not active, nothing is noted."""
        record = self._active.pop(lease, None)
        if record is not None:
            self._end(record, why)

    # ── what others ask ──────────────────────────────────────────────────────────────────

    def find(self, lease: str) -> LeaseRecord | None:
        """The record of a lease, if it is remembered."""
        return self._active.get(lease) or self._ended.get(lease)

    def recently_ended(self, count_max: int = ENDED_MAX) -> list[LeaseRecord]:
        """Leases that are over, the latest first."""
        return list(islice(reversed(self._ended.values()), count_max))

    # ── the file ─────────────────────────────────────────────────────────────────────────

    def _recall(self, connection: sqlite3.Connection) -> None:
        """What is in the file. Leases that were open when rota ended are over."""
        records = [_checked(LeaseRecord(*row)) for row in connection.execute(_READ)]
        self._ended.update((r.lease, r) for r in records if r.ended_ms is not None)
        for record in records:
            if record.ended_ms is None:
                self._end(record, RESTARTED)

    def _end(self, record: LeaseRecord, why: str) -> None:
        record = replace(record, ended_ms=self._now_ms(), why=why)
        self._ended[record.lease] = record
        self._note(record)
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _note(self, record: LeaseRecord) -> None:
        with self._changed:
            self._unwritten[record.lease] = record
            self._unwritten.move_to_end(record.lease)
            if len(self._unwritten) > UNWRITTEN_MAX:
                self._unwritten.popitem(last=False)
            self._changed.notify()

    def _write_on(self, connection: sqlite3.Connection) -> None:
        """The thread: write what was noted, until closed and everything is written or lost."""
        is_failing = False
        with contextlib.closing(connection):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._unwritten or self._is_closing)
                    batch, is_last = dict(self._unwritten), self._is_closing
                if batch:
                    error = self._write(connection, batch)
                    if error is not None and (not is_failing or is_last):
                        log.warning("leases are not written down for now: %s", error)
                    elif error is None and is_failing:
                        log.info("leases are written down again")
                    is_failing = error is not None
                if is_last:
                    return
                if is_failing:
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, RETRY_S)

    def _write(
        self, connection: sqlite3.Connection, batch: dict[str, LeaseRecord]
    ) -> Exception | None:
        """Write some records; what changed since stays noted."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(_WRITE, map(astuple, batch.values()))
                connection.execute(_FORGET, (ENDED_MAX,))
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite may have done so itself
                    connection.execute("ROLLBACK")
                raise
        # The latter two are the adapter's, of values that SQLite has no place for.
        except (sqlite3.Error, ValueError, OverflowError) as error:
            return error
        with self._changed:
            for lease, record in batch.items():
                if self._unwritten.get(lease) is record:
                    del self._unwritten[lease]
        return None

    def _now_ms(self) -> int:
        return min(max(int(self._clock() * 1_000), 0), TIME_MS_MAX)


def _checked(record: LeaseRecord) -> LeaseRecord:
    """A record as it was read; SQLite keeps anything in any column.

    Raises: sqlite3.DatabaseError: rota did not write it so.
    """
    texts = (record.lease, record.model, record.replica, record.caller, record.reason, record.why)
    times = (record.taken_ms, record.ended_ms or 0)
    are_times = all(isinstance(time, int) and 0 <= time <= TIME_MS_MAX for time in times)
    are_times &= isinstance(record.expires_ms, int)  # may lie beyond, and is not shown
    if not are_times or not all(isinstance(text, str) for text in texts):
        raise sqlite3.DatabaseError(f"a lease is recorded that cannot have been, {record.lease!r}")
    return record
