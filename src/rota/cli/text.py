"""Text from elsewhere, made safe to show.

An engine's last words and a stranger's answer may hold anything: escape sequences that move a
terminal's cursor, line breaks that forge a line of the log.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from typing import TextIO

import click

_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


def printable(text: str) -> str:
    """One line without control characters; a line break is a space, with what indents the next."""
    text = _LINE_BREAK.sub(" ", text)
    return "".join(character if character.isprintable() else " " for character in text)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person may be looking; nobody is where a standard stream was closed (None)."""
    return stream is not None and stream.isatty()


def print_table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of text from elsewhere on stdout; the last column may take several lines."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if is_terminal(sys.stdout) else 1_000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles[:-1]:
        table.add_column(title, no_wrap=True)
    table.add_column(titles[-1], overflow="fold")
    for cells in rows:
        table.add_row(*map(printable, cells))
    with console.capture() as shown:
        console.print(table, markup=False, highlight=False)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())


class OneLine(logging.Formatter):
    """A record's message in one line; the trace of an exception follows as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        return printable(super().formatMessage(record))
