"""The verbs about the file of a rota that runs: `reload`, and `check --diff`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from rota.cli.admin import Admin, Json
from rota.cli.text import printable
from rota.config.document import read_bytes


def reload(url: str, *, as_json: bool) -> None:
    """Have rota load its file, and print what that changed. Raises RotaError: it cannot."""
    _print(Admin(url).reload(), as_json=as_json)


def preview(url: str, path: Path, *, as_json: bool) -> None:
    """Print what a file would change. It is sent as text: rota need not be able to read it."""
    _print(Admin(url).preview(read_bytes(path)), as_json=as_json)


def _print(answer: Json, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(printable(f"{'loaded' if answer['reloaded'] else 'in place of'} {answer['path']}:"))
    for line in list(_changes(answer)) or ["nothing changes"]:
        click.echo(printable(line))
    for warning in answer["warnings"]:
        click.echo(f"warning: {printable(warning)}", err=True)


def _changes(answer: Json) -> Iterator[str]:
    for word in ("added", "removed"):
        if answer[word]:
            yield _line(word, ", ".join(answer[word]))
    for model in answer["changed"]:
        now, later = ", ".join(model["now"]), ", ".join(model["next_start"])
        parts = [f"now {now}"] if now else []
        parts += [f"at its next start {later}"] if later else []
        yield _line("changed", f"{model['model']}: {'; '.join(parts)}")
    if answer["file"]["now"]:
        yield _line("changed", f"the file's {', '.join(answer['file']['now'])}")


def _line(word: str, text: str) -> str:
    return f"{word:<10} {text}"
