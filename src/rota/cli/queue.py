"""The verb that shows who waits: `queue`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from rota.cli.admin import Admin, Json
from rota.cli.text import print_table

TITLES = ("PLACE", "REQUEST", "MODEL", "CALLER", "WAITED", "TO GO", "WAITS FOR")


def queue(url: str, *, as_json: bool) -> None:
    """Print who waits, first in line first, for what, and how long still."""
    answer = Admin(url).queue()
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    elif not answer["queue"]:
        click.echo("nobody waits")
    else:
        print_table(TITLES, _cells(answer["queue"]))


def _cells(rows: list[Json]) -> Iterator[tuple[str, ...]]:
    for place, row in enumerate(rows, 1):
        to_go = "" if row["eta_s"] is None else f"{row['eta_s']:.1f} s"
        away = "" if row["is_here"] else f"told to come back in {max(row['back_in_s'], 0):.0f} s; "
        yield (
            str(place),
            row["request"],
            row["model"],
            row["caller"],
            f"{row['waited_s']:.1f} s",
            to_go,
            away + row["reason"],
        )
