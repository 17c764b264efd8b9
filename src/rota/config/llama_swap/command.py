"""How llama-swap splits a command into words, and how the same words are written for rota.

Its rules: lines that begin with `#` are dropped, a backslash at a line's end continues it, and
the rest is split as a shell would, without being one. Two things differ from Python's `shlex`: a
quote that is never closed ends with the text, and a carriage return belongs to its word.

Written again, a command keeps its lines where that means the same to rota, which is tried out;
else its words are quoted anew. Trusting that both sides split alike was refused: an argument
that is split in two is found by nobody.
"""

from __future__ import annotations

import re
import shlex

from rota.config.entry import split_command

LINE_LENGTH = 96
_PART = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""", re.DOTALL)


def drop_comments(text: str) -> str:
    """The command without the lines whose first sign is `#`."""
    return "\n".join(line for line in text.split("\n") if not line.strip().startswith("#"))


def split(text: str) -> list[str]:
    """The words that llama-swap runs."""
    lines = []
    for line in drop_comments(text).split("\n"):
        stripped = line.strip()
        lines.append(stripped[:-1] + " " if stripped.endswith("\\") else line)
    joined = "\n".join(lines)
    for ending in ("", '"', "'", "\\", '\\"'):  # what would close it, if anything has to
        try:
            return _split(joined + ending)
        except ValueError:
            continue
    raise AssertionError(joined)


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace = " \t\n"
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


def lay_out(text: str) -> list[str]:
    """The same command in lines for rota's file, as its author had them if possible."""
    words = split(text)
    own = _own_lines(text)
    try:
        is_same = split_command("\n".join(own)) == words
    except ValueError:  # a quote that is never closed
        is_same = False
    return own if is_same else _new_lines([shlex.quote(word) for word in words])


def _own_lines(text: str) -> list[str]:
    lines = []
    for line in drop_comments(text).split("\n"):
        stripped = line.strip()
        kept = stripped.removesuffix("\\").rstrip() if stripped.endswith("\\") else stripped
        if len(kept) > LINE_LENGTH:
            lines += _new_lines(_PART.findall(kept))
        elif kept:
            lines.append(kept)
    return lines


def _new_lines(parts: list[str]) -> list[str]:
    """Words in lines of some length; what is long begins a line with each option."""
    lines: list[str] = []
    for part in parts:
        fits = bool(lines) and len(lines[-1]) + 1 + len(part) <= LINE_LENGTH
        if lines and (fits or not part.startswith("-")):
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return lines
