"""`rota import`: another tool's configuration as one of ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from rota.cli.text import printable
from rota.config.files import import_llama_swap
from rota.errors import ConfigError


def llama_swap(paths: Sequence[Path], out: Path | None) -> None:
    """Print our file made of llama-swap's, or write it to `out`.

    Raises:
        ConfigError: it cannot be made of these files, or written there.
    """
    imported = import_llama_swap(paths)
    if out is None:
        click.echo(imported.text, nl=False)
    else:
        _write(out, imported.text, is_secret=bool(imported.environment))
    for warning in imported.warnings:
        click.echo(f"warning: {printable(warning)}", err=True)


def _write(path: Path, text: str, *, is_secret: bool) -> None:
    """A new file; one that may hold secrets is for its owner alone."""
    mode = 0o600 if is_secret else 0o666
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} is there already; remove it first, or leave out -o to see what comes of it",
            code="file_exists",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", code="file_unwritable"
        ) from error
