"""Whose file it is: one of ours is loaded, one of llama-swap's is made one of ours first.

So there is one set of rules, that of our own files. What they say about a file of llama-swap's is
said about the lines that it has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rota.config import loading
from rota.config.complaints import Complaints, InvalidConfig, Place, Problem, as_lines
from rota.config.document import read_bytes
from rota.config.llama_swap import Converted, convert, is_llama_swap
from rota.config.values import Config


def load(
    path: Path,
    *,
    data: bytes | None,
    listen: str | None,
    state_dir: Path | None,
    allow_open: bool,
) -> Config:
    """See `rota.config.load`."""
    data = read_bytes(path) if data is None else data
    options = _Options(listen, state_dir, allow_open)
    if is_llama_swap(path, data, os.environ):
        return options.load_converted(convert({path: data}, os.environ))
    return options.load(path, data, Complaints(path))


@dataclass(frozen=True, slots=True)
class Imported:
    """Our file made of llama-swap's.

    Args:
        environment: the variables whose values stand in it.
        warnings: what the author should know, each with its line.
    """

    text: str
    environment: frozenset[str]
    warnings: tuple[str, ...]


def import_llama_swap(paths: Sequence[Path]) -> Imported:
    """Make one file of ours of llama-swap's files, which are as one.

    Args:
        paths: files, and folders of which each `.yaml` and `.yml` is taken, by name.

    Raises:
        InvalidConfig: llama-swap would refuse them, or rota what comes of them.
    """
    files: dict[Path, bytes] = {}
    for path in _files_of(paths):
        if any(path.absolute() == other.absolute() for other in files):
            raise InvalidConfig(path, [Problem(Place(), "is there twice")])
        files[path] = read_bytes(path)
    converted = convert(files, os.environ)
    if converted.has_models:
        config = _Options(None, Path("state"), allow_open=True).load_converted(converted)
        return Imported(converted.text, converted.environment, config.warnings)
    warnings = as_lines(converted.warnings(()), converted.path)
    return Imported(converted.text, converted.environment, warnings)


def _files_of(paths: Sequence[Path]) -> list[Path]:
    files = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in {".yaml", ".yml"})
            if not inside:
                raise InvalidConfig(path, [Problem(Place(), "has no .yaml files")])
            files += inside
        else:
            files.append(path)
    return files


@dataclass(frozen=True, slots=True)
class _Options:
    listen: str | None
    state_dir: Path | None
    allow_open: bool

    def load(self, path: Path, data: bytes, complaints: Complaints) -> Config:
        return loading.load(
            path,
            data,
            complaints,
            listen=self.listen,
            state_dir=self.state_dir,
            allow_open=self.allow_open,
        )

    def load_converted(self, converted: Converted) -> Config:
        complaints = Complaints(converted.path)
        try:
            config = self.load(converted.path, converted.text.encode(), complaints)
        except InvalidConfig as invalid:
            raise converted.problems(invalid.problems) from invalid
        models = {
            name: replace(model, line=converted.page.place_of(model.line).line)
            for name, model in config.models.items()
        }
        warnings = as_lines(converted.warnings(complaints.warnings), converted.path)
        return replace(config, models=models, dialect="llama-swap", warnings=warnings)
