"""Which model a caller means; and what it is told that means none, in one place and sentence.

Asked before the controller is, so that names that are nobody's cost the scheduler nothing and
do not push what was decided out of its journal.
"""

from __future__ import annotations

import difflib
from functools import lru_cache

from rota.config.values import Config, ModelConfig
from rota.core.words import not_found
from rota.errors import RequestError

NAME_SHOWN_MAX = 200
NAME_COMPARED_MAX = 100  # the time that comparing takes grows with both lengths
NEAREST_MAX = 3


def find(config: Config, name: str) -> ModelConfig:
    """The model of a name or an alias.

    Raises:
        RequestError: 404, there is none; with the nearest of the names that a list would show.
    """
    entry = config.models.get(config.resolve(name))
    if entry is None:
        raise RequestError(_say_unknown(config, name), code="model_not_found", status=404)
    return entry


def _say_unknown(config: Config, name: str) -> str:
    said = not_found(name[:NAME_SHOWN_MAX]).message
    aliases = (alias for entry in config.models.values() for alias in entry.aliases)
    nearest = _nearest(name[:NAME_COMPARED_MAX], (*config.models, *aliases))
    return f"{said} Did you mean {' or '.join(map(repr, nearest))}?" if nearest else said


@lru_cache(maxsize=256)  # a client that is set up wrongly asks for the same again and again
def _nearest(name: str, names: tuple[str, ...]) -> list[str]:
    """The names that one may have been meant to be, the nearest first."""
    spelled = {one.lower(): one for one in reversed(names)}
    close = difflib.get_close_matches(name.lower(), spelled, n=NEAREST_MAX)
    return [spelled[one] for one in close]
