"""llama-swap's configuration, and Quartermaster's additions to it, as one of ours.

One function, from files to our file as text: `convert`. What it makes is loaded as any file of
ours is, so there is no second set of rules; `rota import` prints it, `rota serve` and
`rota check` load it in place of the file they were given. Its complaints speak of the lines that
the user has, not of those that were made of them.

In the order of a file's way: `source` (text to values, as yaml.v3 reads them), `macros`,
`settings` (each value), `rules` (values together), `standing` (who may be loaded with whom),
`render`. Refused: reading into our values directly, past our own file. It would be shorter, and
there would be nothing to look at, to edit and to keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rota.config.complaints import Complaints, InvalidConfig, Place, Problem
from rota.config.llama_swap import macros, rules, settings, source
from rota.config.llama_swap.detecting import is_llama_swap
from rota.config.llama_swap.notes import Note
from rota.config.llama_swap.render import Rendering
from rota.config.llama_swap.writing import Page

__all__ = ["Converted", "convert", "is_llama_swap"]


@dataclass(frozen=True, slots=True)
class Converted:
    """Our file.

    Args:
        path: what it was made of, the first file if there are several.
        environment: the variables whose values stand in it.
        has_models: there is something to serve.
    """

    path: Path
    page: Page
    notes: tuple[Note, ...]
    environment: frozenset[str]
    has_models: bool

    @property
    def text(self) -> str:
        return self.page.text()

    def problems(self, problems: Iterable[Problem]) -> InvalidConfig:
        """Complaints about the text, as complaints about what it was made of."""
        return InvalidConfig(self.path, [self._of_source(problem) for problem in problems])

    def warnings(self, problems: Iterable[Problem]) -> list[Problem]:
        """What the author should know: of the text, of what wants a look, and a line for all
        that has no counterpart."""
        told = [self._of_source(problem) for problem in problems]
        told += [Problem(note.place, str(note)) for note in self.notes if not note.is_lost]
        lost = Counter(note.key for note in self.notes if note.is_lost)
        if lost:
            keys = ", ".join(f"{key} ({n})" if n > 1 else key for key, n in lost.items())
            said = f"without effect in rota: {keys}; `rota import llama-swap` says why"
            told.append(Problem(Place(), said))
        return told

    def _of_source(self, problem: Problem) -> Problem:
        return Problem(self.page.place_of(problem.place.line), problem.text)


def convert(files: Mapping[Path, bytes], environ: Mapping[str, str]) -> Converted:
    """Make our file of llama-swap's.

    Args:
        files: what each holds; they become one as they do there, in this order.
        environ: what `${env.NAME}` is looked up in.

    Raises:
        InvalidConfig: llama-swap would refuse them, or their rules cannot be kept.
    """
    path = next(iter(files))
    complaints = Complaints(path)
    read = source.read(files, environ, complaints)
    macros.expand(read.tree, settings.TOP_KEYS, complaints)
    stated = settings.read(read.tree, complaints)
    complaints.raise_if_any()
    catalog = rules.settle(stated, complaints)
    complaints.raise_if_any()
    title = ", ".join(file.name for file in files)
    environment = frozenset(read.environment)
    rendering = Rendering(catalog, complaints, title, environ, environment)
    rendering.run()
    complaints.raise_if_any()
    return Converted(
        path, rendering.page, tuple(rendering.notes), environment, rendering.has_models
    )
