"""Text from elsewhere, made safe to show.

An engine's last words and a stranger's answer may hold anything: escape sequences that move a
terminal's cursor, line breaks that forge a line of the log.
"""

from __future__ import annotations

import logging
from typing import TextIO


def printable(text: str) -> str:
    """One line without control characters."""
    return "".join(character if character.isprintable() else " " for character in text)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person may be looking; nobody is where a standard stream was closed (None)."""
    return stream is not None and stream.isatty()


class OneLine(logging.Formatter):
    """A record's message in one line; the trace of an exception follows as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        return printable(super().formatMessage(record))
