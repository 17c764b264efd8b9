"""What runs, on disk: so that a later life can end what an earlier one could not.

Guards end everything when rota dies. This is for the day when they were killed too: at start,
before anything is launched, whatever is still there from an earlier life is ended. It is found
by identity only, never by name: the recorded process if pid, start time and boot agree, and
whoever carries this state directory's mark in its environment (which also finds what left its
group, and what was started in the instant before its record was written).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from urllib.parse import quote

from rota.core.types import ReplicaId
from rota.node import processes


class Records:
    """The records of one state directory, one small file per live replica."""

    def __init__(self, state_dir: Path) -> None:
        self._state = state_dir.resolve()
        self._dir = self._state / "replicas"

    def mark(self, replica: ReplicaId) -> str:
        """What the replica's processes carry as `ROTA_REPLICA`; unique to it on this machine."""
        return f"{self._state}#{replica}"

    def add(self, replica: ReplicaId, pid: int) -> None:
        """Note that `replica` runs as `pid`. A disk that cannot take it is no reason to stop."""
        record = {"pid": pid, "start": processes.start_ticks(pid), "boot": processes.boot_id()}
        with contextlib.suppress(OSError):
            self._path(replica).write_text(json.dumps(record))

    def remove(self, replica: ReplicaId) -> None:
        """Note that nothing of `replica` is left."""
        with contextlib.suppress(OSError):
            self._path(replica).unlink(missing_ok=True)

    def sweep(self) -> set[int]:
        """End everything an earlier life left behind, and forget it. Blocks.

        Returns the pids of those that even SIGKILL did not end within five seconds. Raises
        OSError when the directory cannot be made.
        """
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        recorded = [(pid, start) for pid, start in map(_read, self._dir.iterdir()) if pid]

        def leftovers() -> set[int]:
            same = {pid for pid, start in recorded if processes.start_ticks(pid) == start}
            return same | processes.marked(self.mark(""))

        left = processes.end_all(leftovers)
        for path in self._dir.iterdir():
            path.unlink(missing_ok=True)
        return left

    def _path(self, replica: ReplicaId) -> Path:
        return self._dir / f"{quote(replica, safe='')}.json"


def _read(path: Path) -> tuple[int, int]:
    """Pid and start time of a record; (0, 0) if it is of another boot or cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(path.read_text())
        if record["boot"] == processes.boot_id():
            return int(record["pid"]), int(record["start"])
    return 0, 0
