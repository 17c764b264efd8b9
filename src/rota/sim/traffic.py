"""Recorded traffic, read from a file or made up from a seed, to play policies and rules against.

What is made up has the shape of a real month on a shared service (23 days, 27,000 requests, 87
models): popularity falls as a power of the rank; people come in visits of a few requests, minutes
apart, more of them by day than by night and on working days; three quarters of all
requests are for another model than the one before. Its parameters were fitted to that month's
percentiles and to the shares of requests that need a swap there (docs/scheduler.md); no line of
it is copied. One process with one rate was refused: without visits and days every policy is as
good as the next.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import exp
from pathlib import Path
from random import Random
from typing import NamedTuple

from rota.core.types import ModelName

DAY_MS = 86_400_000
HOUR_MS = 3_600_000

MODELS = 87
ZIPF, TAIL = 0.8, 14.0
"""The model of rank n is visited as often as n^-0.8 · e^(-n/14): a tail thinner than Zipf's."""
VISITS_A_DAY = 440
"""On a full working day."""
QUIET_DAYS = (0, 1, 2, 3, 8, 14, 15, 21, 22)
QUIET = 0.1
"""Days on which few come, and how few."""
NIGHT_SHARE = 0.25
"""Of a day's visits; they are spread over all of it, the others over its busy eight hours."""
VISIT_SIGMA, VISIT_MEDIAN = 1.2, 2.0
"""Requests of a visit: log-normal, one at least."""
PAUSE_SIGMA, PAUSE_MEDIAN_MS = 1.0, 100_000
"""Between two requests of a visit."""
SERVE_SIGMA, SERVE_MEDIAN_MS = 0.65, 23_000
"""How long a request runs."""
LOADS_S = ((0.35, 2.0, 4.0), (0.65, 18.0, 48.0))
"""Loads come from memory or from a store: a share of them, and between which seconds."""


class Ask(NamedTuple):
    """One request: when it comes, for which model, and how long it runs once it is granted."""

    at_ms: int
    model: ModelName
    serve_ms: int


def read_traffic(path: Path) -> list[Ask]:
    """Requests from a CSV file with a line of names, then `seconds, model, seconds of service`.

    Raises:
        ValueError: a line is not that.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        next(lines, None)
        return sorted(Ask(_ms(at_s), name, _ms(serve_s)) for at_s, name, serve_s in lines)


def read_loads(path: Path) -> list[int]:
    """Load times in milliseconds from a file with a line of names, then one in seconds each.

    Raises:
        ValueError: a line is not that.
    """
    return [_ms(line) for line in path.read_text(encoding="utf-8").split()[1:]]


def _ms(seconds: str) -> int:
    return round(float(seconds) * 1_000)


def make_up_traffic(seed: int, days: int = 23) -> list[Ask]:
    """So many days of requests in the order in which they come."""
    random = Random(seed)  # noqa: S311 (to be repeatable is the point)
    weights = list(accumulate(rank**-ZIPF * exp(-rank / TAIL) for rank in range(1, MODELS + 1)))
    names = [f"M{rank:02}" for rank in range(MODELS)]
    asks: list[Ask] = []
    for day in range(days):
        visits = round(VISITS_A_DAY * (QUIET if day in QUIET_DAYS else 1.0))
        for _ in range(visits):
            (name,) = random.choices(names, cum_weights=weights)
            asks += _visit(random, name, day * DAY_MS + _hour_ms(random))
    return sorted(asks)


def _hour_ms(random: Random) -> int:
    if random.random() < NIGHT_SHARE:
        return random.randrange(DAY_MS)
    return 4 * HOUR_MS + random.randrange(8 * HOUR_MS)


def _visit(random: Random, name: ModelName, at_ms: int) -> Iterator[Ask]:
    for _ in range(max(1, round(_log_normal(random, VISIT_MEDIAN, VISIT_SIGMA)))):
        yield Ask(at_ms, name, round(_log_normal(random, SERVE_MEDIAN_MS, SERVE_SIGMA)))
        at_ms += round(_log_normal(random, PAUSE_MEDIAN_MS, PAUSE_SIGMA))


def _log_normal(random: Random, median: float, sigma: float) -> float:
    return median * random.lognormvariate(0.0, sigma)


def make_up_loads(seed: int, count: int = 1_000) -> list[int]:
    """So many load times in milliseconds."""
    random = Random(seed)  # noqa: S311 (the same)
    shares = [share for share, _, _ in LOADS_S]
    ranges = [(low_s, high_s) for _, low_s, high_s in LOADS_S]
    return [
        round(random.uniform(*bounds) * 1_000) for bounds in random.choices(ranges, shares, k=count)
    ]


def names_of(traffic: Sequence[Ask]) -> list[ModelName]:
    """The models asked for, in the order of their first request."""
    return list(dict.fromkeys(ask.model for ask in traffic))
