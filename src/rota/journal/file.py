"""A recording as a file that can be sent to a stranger and read from one.

JSON lines: a head, the state it begins with, then a line per step. What could be a secret is
not in it: bodies and keys never reach the scheduler, and names of conversations are replaced
by salted hashes here (keys were by the gateway). Model names, addresses of peers, ids of
requests and the last lines of engines that failed are in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec

from rota import __version__
from rota.core.effects import Effect
from rota.core.events import Event
from rota.errors import RequestError
from rota.journal.graph import (
    DamagedError,
    Plain,
    rows_from_plain,
    rows_to_plain,
    thaw,
    value_from_plain,
    value_to_plain,
)
from rota.journal.recorder import Recording, Step

FORMAT = 2
FILES_MAX = 20
"""Kept in a directory; the oldest goes."""

_CONVERSATION = "conversation:"
_SALT = os.urandom(16)


@dataclass(frozen=True, slots=True)
class Saved:
    """A recording and what is said of it.

    Args:
        version: of the rota that wrote it.
        why: what it was saved for.
    """

    recording: Recording
    version: str
    why: str


def save(recording: Recording, directory: Path, why: str) -> Path:
    """Write a recording into a directory, under a name of its own.

    Args:
        why: one word or a sentence, for whoever reads it.

    Raises:
        OSError: it cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.now(UTC)
    path = directory / f"{now:%Y%m%dT%H%M%S.%fZ}.jsonl"
    partial = path.with_suffix(".partial")
    head = {
        "rota_journal": FORMAT,
        "rota": __version__,
        "why": why,
        "saved_at": now.isoformat(timespec="seconds"),
        "steps": len(recording.steps),
    }
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            for line in (head, *_lines(recording)):
                file.write(msgspec.json.encode(line) + b"\n")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)  # of a disk that is full
    _sweep(directory)
    return path


def load(path: Path) -> Saved:
    """Read a recording. Nothing in the file is run.

    Raises:
        RequestError: it cannot be read, or is damaged; says where.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise _unreadable(f"cannot read {path}: {error.strerror}") from error
    try:
        return _parse(lines)
    except (DamagedError, RecursionError) as error:
        raise _unreadable(f"{path} is not a whole journal: {error}") from error


def _lines(recording: Recording) -> Iterator[Plain]:
    yield {"start": _veiled(rows_to_plain(recording.start))}
    for step in recording.steps:
        line = {
            "now_ms": step.now_ms,
            "event": value_to_plain(step.event),
            "effects": [value_to_plain(effect) for effect in step.effects],
        }
        if step.raised:
            line["raised"] = step.raised
        yield _veiled(line)


def _veiled(plain: Plain) -> Plain:
    """The same with conversations named by hashes: equal ones stay equal."""
    if isinstance(plain, str):
        text = plain.encode("utf-8", "replace").decode()  # an engine's last line may be anything
        return _CONVERSATION + _hash(text) if text.startswith(_CONVERSATION) else text
    if isinstance(plain, dict):
        return {key: _veiled(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_veiled(value) for value in plain]
    return plain


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8, key=_SALT).hexdigest()


def _parse(lines: list[bytes]) -> Saved:
    """Raises: DamagedError: says on which line what is wrong."""
    head = _object(lines, 0)
    if "rota_journal" not in head:
        raise DamagedError("its first line is not a journal's head")
    if head["rota_journal"] != FORMAT:
        raise DamagedError(f"it has format {head['rota_journal']!r}; this rota reads {FORMAT}")
    start = _object(lines, 1)
    count = len(lines) - 2
    if head.get("steps") != count:
        raise DamagedError(f"it ends after {count} of {head.get('steps')!r} steps")
    rows = rows_from_plain(start.get("start"))
    thaw(rows)  # so that a damaged one is said here
    steps = tuple(_step(lines, number) for number in range(2, len(lines)))
    return Saved(Recording(rows, steps), str(head.get("rota")), str(head.get("why")))


def _object(lines: list[bytes], number: int) -> dict[str, Any]:
    if number >= len(lines):
        raise DamagedError(f"it has only {len(lines)} lines")
    try:
        found = msgspec.json.decode(lines[number])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"line {number + 1} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise DamagedError(f"line {number + 1} is not an object")
    return found


def _step(lines: list[bytes], number: int) -> Step:
    plain = _object(lines, number)
    try:
        now_ms, raised = plain.get("now_ms"), plain.get("raised", "")
        event = value_from_plain(plain.get("event"))
        effects = plain.get("effects")
        if not isinstance(event, get_args(Event)):
            raise DamagedError("there is no event")
        if type(now_ms) is not int or not isinstance(raised, str) or not isinstance(effects, list):
            raise DamagedError("now_ms, effects or raised is missing")
        decided = [_effect(effect) for effect in effects]
    except DamagedError as error:
        raise DamagedError(f"line {number + 1}: {error}") from error
    return Step(now_ms, event, decided, raised)


def _effect(plain: Plain) -> Effect:
    effect = value_from_plain(plain)
    if not isinstance(effect, get_args(Effect)):
        raise DamagedError("not an effect")
    return effect  # type: ignore[no-any-return]


def _sweep(directory: Path) -> None:
    for old in sorted(directory.glob("*Z.jsonl"))[:-FILES_MAX]:
        old.unlink(missing_ok=True)


def _unreadable(message: str) -> RequestError:
    return RequestError(message, code="journal_unreadable", status=400)
