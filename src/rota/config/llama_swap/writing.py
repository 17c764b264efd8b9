"""Lines of YAML, each with the place in llama-swap's file that it was made of.

Written by hand rather than by a YAML library: the file is for people, with comments where they
belong and commands in lines; and a complaint about a line of it is to be shown where its cause
stands.
"""

from __future__ import annotations

import json
import re
import textwrap
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from rota.config.complaints import Place

WIDTH = 96

# What is text to every reader of YAML when it stands without quotes.
_SIGN = r"""[A-Za-z0-9_/.()@~$+=^{},'"\[\]|&*!%?;<>\\-]"""
_PLAIN = re.compile(rf"[A-Za-z0-9_/.(~$]{_SIGN}*(?:[ :]{_SIGN}+)*")
_PLAIN_IN_FLOW = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_/.@+-]*(?::[A-Za-z0-9_.-]+)*")
_NOT_TEXT = re.compile(
    r"~|null|true|false|yes|no|on|off|y|n|[-+]?[0-9._]*(?:e[-+]?[0-9]+)?|0[box][0-9a-f_]+"
    r"|[-+]?\.(?:inf|nan)|[0-9]+(?::[0-9]+)+|[0-9]+-[0-9]+-[0-9]+.*|<<|---.*|\.\.\..*",
    re.IGNORECASE,
)


def quoted(text: str, *, in_flow: bool = False) -> str:
    """A text as YAML, in double quotes where it needs them."""
    plain = _PLAIN_IN_FLOW if in_flow else _PLAIN
    if plain.fullmatch(text) and not _NOT_TEXT.fullmatch(text):
        return text
    shown = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in shown)


def flow(texts: Iterable[str]) -> str:
    """A list in one line."""
    return f"[{', '.join(quoted(text, in_flow=True) for text in texts)}]"


@dataclass(slots=True)
class Page:
    """A file in the making.

    Args:
        sources: from a line on (counted from 1), the place that it was made of.
    """

    lines: list[str] = field(default_factory=list)
    sources: list[tuple[int, Place]] = field(default_factory=list)

    def add(self, line: str, place: Place | None = None) -> None:
        """Add a line; without a place it is of the one before."""
        self.lines.append(line)
        if place is not None:
            self.sources.append((len(self.lines), place))

    def comment(self, text: str, indent: int = 0) -> None:
        """Add a comment, in as many lines as it takes; an empty one is a line between others."""
        start = " " * indent + "#"
        wrapped = textwrap.wrap(text, WIDTH - indent - 2, break_long_words=False) or [""]
        self.lines += [f"{start} {line}".rstrip() for line in wrapped]

    def gap(self) -> None:
        """Add an empty line, unless there is one."""
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def command(self, key: str, lines: list[str], indent: int, place: Place) -> None:
        """Add a key whose text is of lines."""
        start = " " * indent
        is_block = all(line.isprintable() for line in lines)
        if len(lines) > 1 and is_block:
            self.add(f"{start}{key}: |", place)
            for line in lines:
                self.add(f"{start}  {line}")
        else:
            self.add(f"{start}{key}: {quoted(chr(10).join(lines))}", place)

    def place_of(self, line: int) -> Place:
        """What a line was made of."""
        index = bisect_right(self.sources, line, key=lambda source: source[0])
        return self.sources[index - 1][1] if index else Place()

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"
