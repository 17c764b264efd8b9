"""Fake devices, for tests and benches: a JSON file that fake engines take their memory from.

Like a real driver it refuses a claim that does not fit, and takes the memory of a dead process
back by itself: at once, or `late_s` after it is first looked at. All access is under one flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class OutOfMemory(Exception):
    """A claim did not fit; the text is like an engine's own."""


class FakeDevices:
    """The devices in `path`, shared by every process that opens the same file.

    The file holds `{"totals": {device: MiB}, "claims": [{pid, start, device, mib, late_s,
    free_at}], "peaks": {device: MiB}}`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, totals: Mapping[str, int]) -> FakeDevices:
        """Make (or make anew) the file, with nothing claimed."""
        content = {"totals": dict(totals), "claims": [], "peaks": dict.fromkeys(totals, 0)}
        path.write_text(json.dumps(content))
        return cls(path)

    def claim(self, device: str, mib: int, *, pid: int | None = None, late_s: float = 0) -> None:
        """Take memory for a process (default: this one) for as long as it lives.

        Args:
            late_s: how long after its end the memory still counts as taken.

        Raises:
            OutOfMemory: less than `mib` is free.
        """
        owner = os.getpid() if pid is None else pid
        with self._locked() as content:
            total = content["totals"][device]
            used = _used(content, device)
            if used + mib > total:
                raise OutOfMemory(
                    f"out of memory: tried to allocate {mib} MiB on {device}, "
                    f"{total - used} MiB of {total} MiB are free"
                )
            content["claims"].append(
                {
                    "pid": owner,
                    "start": _start(owner),
                    "device": device,
                    "mib": mib,
                    "late_s": late_s,
                    "free_at": None,
                }
            )
            content["peaks"][device] = max(content["peaks"][device], used + mib)

    def used_mib(self) -> dict[str, int]:
        """What is taken now, per device."""
        with self._locked() as content:
            return {device: _used(content, device) for device in content["totals"]}

    def peak_mib(self) -> dict[str, int]:
        """The most that was ever taken at once, per device."""
        with self._locked() as content:
            return dict(content["peaks"])

    def names(self) -> list[str]:
        """The devices, in the order in which they were made."""
        with self._locked() as content:
            return list(content["totals"])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = json.load(file)
            content["claims"] = [claim for claim in content["claims"] if _still_counts(claim)]
            yield content
            file.seek(0)
            json.dump(content, file)
            file.truncate()


def _used(content: dict[str, Any], device: str) -> int:
    return sum(int(claim["mib"]) for claim in content["claims"] if claim["device"] == device)


def _still_counts(claim: dict[str, Any]) -> bool:
    start = _start(claim["pid"])
    if start is not None and start == claim["start"]:
        return True
    if claim["free_at"] is None:
        claim["free_at"] = time.time() + claim["late_s"]
    return bool(time.time() < claim["free_at"])


def _start(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if state in (b"Z", b"X") else int(fields[18])
    return None
