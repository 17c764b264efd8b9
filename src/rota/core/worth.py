"""How dearly a model would be missed: how often it is likely to be wanted, and what a load takes.

Think of tools on a small bench: one stays within reach that was in use a minute ago, and one
that is in use every day, even though not today. So each request speaks for one more, and for
the less the longer it is past. It is counted on five clocks, each ten times slower than the one
before; on each it fades away, and the mean of the five rates is how often the next is
expected. A burst counts for minutes, a habit for days, and neither drowns the other. For steady
traffic the mean is its true rate; after a single request it falls about as the inverse of the
time since then, so models with no history to speak of rank by recency.

Refused, each measured worse on a real trace with two to eight models loaded (docs/scheduler.md,
"What choosing the victim is worth"): the least recent use alone; one rate of one half-life,
whichever; the GreedyDual clock, whose frequencies never fade; and counts that saturate, as if a
burst were one wish.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

HALF_LIVES_MS = (60_000, 600_000, 6_000_000, 60_000_000, 600_000_000)
"""A minute to a week. Tuned on twelve days of a real trace; half or twice as long changes the
share of requests that need a swap by half a percent point at most."""
HOUR_MS = 3_600_000
LOAD_MS_UNKNOWN = 20_000
"""What a load is taken to last before one was seen; the median of 7,531 real ones is 22.7 s."""
LOAD_MS_MIN = 1_000
"""No reload costs less: the old one must end, the new one start and be seen ready."""

_NONE = (0.0,) * len(HALF_LIVES_MS)
_PER_HOUR = tuple(log(2) * HOUR_MS / half_ms / len(HALF_LIVES_MS) for half_ms in HALF_LIVES_MS)


@dataclass(slots=True, eq=False)
class History:
    """When a model was wanted, in a few numbers.

    Args:
        noted_ms: when it was last wanted.
        counts: requests until then, faded, by clock.
    """

    noted_ms: int = 0
    counts: tuple[float, ...] = _NONE

    def note(self, now_ms: int) -> None:
        """It is wanted once more."""
        past_ms, self.noted_ms = now_ms - self.noted_ms, now_ms
        clocks = zip(self.counts, HALF_LIVES_MS, strict=True)
        self.counts = tuple(count * 0.5 ** (past_ms / half_ms) + 1.0 for count, half_ms in clocks)

    def per_hour(self, now_ms: int) -> float:
        """How often it is expected to be wanted; 0 = it never was."""
        past_ms, rate = now_ms - self.noted_ms, 0.0
        for count, half_ms, weight in zip(self.counts, HALF_LIVES_MS, _PER_HOUR, strict=True):
            rate += count * weight * 0.5 ** (past_ms / half_ms)
        return rate


def reload_ms(load_ms: int | None) -> int:
    """What it takes to have a model back, from what is known of its loads."""
    return max(LOAD_MS_UNKNOWN if load_ms is None else load_ms, LOAD_MS_MIN)


def loss_ms(history: History, load_ms: int | None, now_ms: int) -> float:
    """What a model's absence is expected to cost: milliseconds of loading for each hour of it."""
    return history.per_hour(now_ms) * reload_ms(load_ms)
