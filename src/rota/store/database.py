"""The database file: opened, looked over, brought up to date, or refused in a sentence.

It holds records, not the truth: rota decides from memory and would run without it. So it is
opened once, at the start, where someone is there to read what is wrong with it; a damaged one is
refused rather than replaced, for what is in it is the owner's, and to move it away is theirs to do.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from rota.errors import ConfigError

FILE = "rota.sqlite"
BUSY_S_MAX = 5.0
"""How long a write waits for whoever reads the file by hand; sqlite3 would wait as long."""

# One step per version of the schema; those that ran are never changed.
_STEPS = (
    """
    CREATE TABLE leases (
        lease TEXT PRIMARY KEY,
        model TEXT NOT NULL,
        replica TEXT NOT NULL,
        caller TEXT NOT NULL,
        reason TEXT NOT NULL,
        taken_ms INTEGER NOT NULL,
        expires_ms INTEGER NOT NULL,
        ended_ms INTEGER,
        why TEXT NOT NULL
    );
    CREATE INDEX leases_by_end ON leases (ended_ms);
    """,
)


def open_database(
    state_dir: Path, read: Callable[[sqlite3.Connection], None]
) -> sqlite3.Connection:
    """The database of a state directory, made if it is missing, in today's schema.

    Args:
        read: takes what is wanted of it at the start.

    Returns: a connection in autocommit mode, for one thread at a time, whichever that is.
    Raises:
        ConfigError: it cannot be read and written, is damaged, or is a newer rota's.
    """
    path = state_dir / FILE
    try:
        # For its owner alone, like all that is kept there; SQLite's side files take after it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise _unusable(path, f"cannot be opened: {error.strerror}") from error
    with contextlib.ExitStack() as on_failure:
        try:
            connection = sqlite3.connect(
                path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False
            )
            on_failure.callback(connection.close)
            _look_over(path, connection)
            read(connection)
        except sqlite3.OperationalError as error:  # before its parent: the file may be sound
            raise _unusable(path, f"cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _damaged(path, str(error)) from error
        on_failure.pop_all()
    return connection


def _look_over(path: Path, connection: sqlite3.Connection) -> None:
    """Check the file, and bring its schema up to date."""
    # Readers do not stop the writer. Where the file system cannot do it, SQLite goes on without.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # in WAL, sound whatever dies
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, verdict)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(_STEPS):
        raise _unusable(path, "was written by a newer rota")
    for number, step in enumerate(_STEPS[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {step} PRAGMA user_version = {number}; COMMIT;")


def _damaged(path: Path, said: str) -> ConfigError:
    return _unusable(path, f"is damaged ({said}); move it away, and rota begins a new one")


def _unusable(path: Path, what: str) -> ConfigError:
    return ConfigError(f"the database {path} {what}", code="state_unusable")
