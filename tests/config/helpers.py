"""A configuration file in a folder of its own, and what loading it says."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from rota.config import load
from rota.config.complaints import InvalidConfig
from rota.config.values import Config


def write(folder: Path, text: str) -> Path:
    path = folder / "rota.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def loaded(folder: Path, text: str, **options: object) -> Config:
    return load(write(folder, text), **options)  # type: ignore[arg-type]


def complaints(folder: Path, text: str, **options: object) -> list[str]:
    """Each problem as `line:column: text`; the file as a whole is line 0."""
    with pytest.raises(InvalidConfig) as caught:
        loaded(folder, text, **options)
    return [f"{p.place.line}:{p.place.column}: {p.text}" for p in caught.value.problems]


def warnings(folder: Path, text: str) -> list[str]:
    """Each warning as `line: text`."""
    config = loaded(folder, text)
    path = f"{config.path}:"
    return [
        f"{line}: {rest.partition(': ')[2]}"
        for line, _, rest in (w.removeprefix(path).partition(":") for w in config.warnings)
    ]
