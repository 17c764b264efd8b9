"""The file that is served, loaded again while rota runs: when it changes, on SIGHUP, when asked.

A file is loaded whole or not at all. One that is wrong changes nothing; its complaints are
logged once, answered to who asked, and shown in the status until a later try goes well.

The file is found changed by reading it once a second. Text that is the same at two looks and
differs from what was tried last is tried, so neither a file half written nor one that is away
while an editor replaces it is taken for what its author means. Refused: events of the kernel
(inotify, as by watchfiles). They do not cross into many a container's mount or from a network's
file server, they are of an inode where a path is meant, and a Kubernetes ConfigMap is swapped by
a link two folders further up; and after each one the text would have to be read all the same.
Reading a few KiB a second is not worth measuring. Times and sizes are not asked: `touch` is no
change, and two quick edits may leave both as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from rota.cli.room import warn_of_room
from rota.config import load
from rota.config.complaints import InvalidConfig
from rota.config.diff import Changed, Diff, compare
from rota.config.document import read_bytes
from rota.config.values import Config
from rota.controller import Controller
from rota.errors import ConfigError, RequestError

LOOK_EVERY_S = 1.0

log = logging.getLogger("rota.reload")


class How(Enum):
    """What had the file loaded."""

    START = "start"
    SIGNAL = "signal"
    REQUEST = "request"
    WATCH = "watch"  # it changed


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration comes from: a file, and what the command line says instead of it.

    Args:
        path, listen, state_dir, allow_open: see `rota.config.load`.
    """

    path: Path
    listen: str | None = None
    state_dir: Path | None = None
    allow_open: bool = False

    def open(self) -> Loaded:
        """The file as it is. Raises InvalidConfig: it cannot be used."""
        data = self.read()
        return Loaded(self, data, self.load(data))

    def read(self) -> bytes:
        """What the file holds. Raises InvalidConfig: it cannot be read."""
        return read_bytes(self.path)

    def load(self, data: bytes, *, listen: str | None = None) -> Config:
        """What it means. Raises InvalidConfig: it cannot be used."""
        return load(
            self.path,
            data=data,
            listen=listen or self.listen,
            state_dir=self.state_dir,
            allow_open=self.allow_open,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, where it is from, and the text that means it."""

    source: Source
    data: bytes
    config: Config


@dataclass(frozen=True, slots=True)
class _Plan:
    """What loading would do.

    Args:
        config: what is to be in force.
        diff: against what is in force.
    """

    config: Config
    diff: Diff

    def warnings(self) -> list[str]:
        """The file's own, and what stays as it was."""
        keys = ", ".join(f"`{key}`" for key in self.diff.top.restart)
        stays = f"{keys}: rota goes on with what it was started with, until it is restarted"
        return [*self.config.warnings, *([stays] if keys else [])]


class Reloader:
    """Loads the file again, and knows how that went.

    Args:
        loaded: what rota was started with; a port of 0 in it stands for a free one.
        controller: goes on with what is loaded.
    """

    def __init__(self, loaded: Loaded, controller: Controller) -> None:
        self._source = loaded.source
        self._tried: bytes | str = loaded.data  # text, or why there is none
        self._started = self._loaded = loaded.config
        self._controller = controller
        self._turn = asyncio.Lock()
        self._needs_restart: tuple[str, ...] = ()
        self._complaint: dict[str, str] | None = None
        self._note(How.START)

    # ── loading ──────────────────────────────────────────────────────────────────────────

    async def reload(self, how: How = How.REQUEST) -> dict[str, object]:
        """Load the file now, whether it has changed or not.

        Returns: what that changed, as plain values for JSON.
        Raises:
            RequestError: 422, the file cannot be used: nothing has changed.
        """
        async with self._turn:
            return await self._load(await asyncio.to_thread(self._look), how)

    async def preview(self, data: bytes | None = None) -> dict[str, object]:
        """What `reload` would answer if the file held this; None = what it holds. Nothing changes.

        Raises:
            RequestError: as `reload`.
        """
        async with self._turn:
            found = await asyncio.to_thread(self._look) if data is None else data
            plan = await self._plan(found)
        return self._say(plan) | {"reloaded": False}

    async def watch(self, every_s: float = LOOK_EVERY_S) -> None:
        """Load the file whenever it has changed; without end."""
        seen = self._tried
        while True:
            await asyncio.sleep(every_s)
            found = await asyncio.to_thread(self._look)
            if found == seen != self._tried:
                async with self._turn:
                    await self._try(self._load(found, How.WATCH))
            seen = found

    async def reload_when(self, asked: asyncio.Event) -> None:
        """Load the file each time an event is set; without end."""
        while True:
            await asked.wait()
            asked.clear()
            await self._try(self.reload(How.SIGNAL))

    async def _try(self, loading: Coroutine[Any, Any, object]) -> None:
        """Nobody waits for the answer; what went wrong with the file has been logged."""
        try:
            await loading
        except RequestError:
            pass
        except Exception:
            log.exception("%s could not be loaded again", self._source.path)

    def _look(self) -> bytes | str:
        try:
            return self._source.read()
        except InvalidConfig as error:
            return error.message

    async def _load(self, found: bytes | str, how: How) -> dict[str, object]:
        self._tried = found
        try:
            plan = await self._plan(found)
        except RequestError as error:
            self._complain(how, error.message)
            raise
        self._loaded = replace(plan.config, port=self._started.port)
        self._needs_restart = plan.diff.top.restart
        self._complaint = None
        self._note(how)
        log.info("loaded again (%s): %s", how.value, say_diff(plan.diff))
        for warning in plan.warnings():
            log.warning("%s", warning)
        self._controller.reload(plan.config)
        warn_of_room(self._controller)
        return self._say(plan) | {"reloaded": True}

    async def _plan(self, found: bytes | str) -> _Plan:
        """Raises RequestError: 422, the file cannot be used."""
        if isinstance(found, str):
            raise _refused(found)
        try:
            return await asyncio.to_thread(self._plan_of, found)
        except ConfigError as error:
            raise _refused(error.message) from error

    def _plan_of(self, data: bytes) -> _Plan:
        """What a file means for a rota that keeps its address, state directory and devices.

        A file that moves the address is looked at once more with the one that stays: nobody
        may lose the keys of a port that is still open, and no model may be that port.
        """
        wanted = self._source.load(data)
        diff = compare(self._loaded, wanted)
        now = self._controller.config
        if "listen" in diff.top.restart:
            wanted = self._load_where_it_is(data, now)
        kept = replace(
            wanted,
            host=now.host,
            port=now.port,
            state_dir=self._started.state_dir,
            devices=self._started.devices,
        )
        return _Plan(kept, diff)

    def _load_where_it_is(self, data: bytes, now: Config) -> Config:
        host = f"[{now.host}]" if ":" in now.host else now.host
        try:
            return self._source.load(data, listen=f"{host}:{now.port}")
        except InvalidConfig as error:
            still = f"{self._source.path}: rota listens on {host}:{now.port} until it is restarted"
            raise ConfigError(f"{error.message}\n{still}", code=error.code) from error

    # ── telling ──────────────────────────────────────────────────────────────────────────

    def status(self) -> dict[str, object]:
        """Since when what is loaded counts, how it came, and what is wrong with the file now."""
        return {
            "path": str(self._source.path.absolute()),
            "loaded_at": self._loaded_at,
            "loaded_by": self._loaded_by.value,
            "needs_restart": list(self._needs_restart),
            "complaint": self._complaint,
        }

    def _note(self, how: How) -> None:
        self._loaded_at, self._loaded_by = _now(), how

    def _complain(self, how: How, text: str) -> None:
        self._complaint = {"at": _now(), "by": how.value, "text": text}
        log.error("not loaded again (%s), nothing has changed:", how.value)
        for line in text.splitlines():
            log.error("%s", line)

    def _say(self, plan: _Plan) -> dict[str, object]:
        diff = plan.diff
        return {
            "path": str(self._source.path.absolute()),
            "added": list(diff.added),
            "removed": list(diff.removed),
            "changed": [
                {"model": name, "now": list(keys.now), "next_start": list(keys.next_start)}
                for name, keys in diff.changed.items()
            ],
            "unchanged": list(diff.unchanged),
            "file": {"now": list(diff.top.now), "restart": list(diff.top.restart)},
            "warnings": plan.warnings(),
        }


def say_diff(diff: Diff) -> str:
    """What changes, in one line for the log."""
    parts = [f"{word} {', '.join(names)}" for word, names in _lists(diff) if names]
    parts += [f"{name} {_say_keys(keys)}" for name, keys in diff.changed.items()]
    if diff.top:
        parts.append(f"the file's {_say_keys(diff.top)}")
    return "; ".join(parts) or "nothing changes"


def _lists(diff: Diff) -> list[tuple[str, tuple[str, ...]]]:
    return [("added", diff.added), ("removed", diff.removed)]


def _say_keys(keys: Changed) -> str:
    """`(patience now; cmd, memory at its next start)`."""
    words = ((keys.now, "now"), (keys.next_start, "at its next start"), (keys.restart, "not yet"))
    said = (f"{', '.join(names)} {when}" for names, when in words if names)
    return f"({'; '.join(said)})"


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Let these go on while the block runs."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _refused(text: str) -> RequestError:
    return RequestError(text, code="config_invalid", status=422)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
