"""Everything wrong with a file, gathered, each complaint with its place and a remedy.

A file is read to the end however much is wrong with it: an author who repairs one mistake per
run learns to hate the checker. The alternative, raising at the first mistake, was refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rota.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something stands, counted from 1 as editors do; line 0 is the file as a whole.

    `file` is that of one of several files; empty = the only one, which the complaint knows.
    """

    line: int = 0
    column: int = 0
    file: str = ""

    def of(self, path: Path) -> str:
        """`file:line:column`, or the file alone."""
        file = self.file or str(path)
        return f"{file}:{self.line}:{self.column}" if self.line else file


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One complaint: where, and in a sentence what is wrong and what would be accepted."""

    place: Place
    text: str


class InvalidConfig(ConfigError):
    """A file that cannot be used, with everything that is wrong with it."""

    def __init__(self, path: Path, problems: Iterable[Problem]) -> None:
        self.path = path
        self.problems = in_order(problems)
        super().__init__("\n".join(as_lines(self.problems, path)), code="config_invalid")


@dataclass(slots=True)
class Complaints:
    """The complaints about one file so far: problems stop it, warnings do not."""

    path: Path
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def problem(self, place: Place, text: str) -> None:
        self.problems.append(Problem(place, text))

    def warn(self, place: Place, text: str) -> None:
        self.warnings.append(Problem(place, text))

    def raise_if_any(self) -> None:
        """Raises InvalidConfig if there is any problem; warnings alone raise nothing."""
        if self.problems:
            raise InvalidConfig(self.path, self.problems)

    def warning_lines(self) -> tuple[str, ...]:
        """Each warning as `file:line:column: text`, in the order of the file."""
        return as_lines(self.warnings, self.path)


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Each once, as a reader of the file, or of the files, comes by them."""
    return tuple(sorted(set(problems), key=lambda p: (p.place.file, p)))


def as_lines(problems: Iterable[Problem], path: Path) -> tuple[str, ...]:
    """Each as `file:line:column: text`."""
    return tuple(f"{p.place.of(path)}: {p.text}" for p in in_order(problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or what there is when nothing is close, or nothing at all."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:100], names, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; there is {', '.join(f'`{name}`' for name in names)}" if names else ""
