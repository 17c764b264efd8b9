"""The last steps of the scheduler, and a state from which they follow.

Two pages: when one is full, the one before it is let go and the next begins with the state as
it is. So between one and two pages of steps can always be replayed (500 to 1,000 of them).
A state copied per step would cost more than the step; a second scheduler that lags behind
would double the cost of every step; only events since the start would end with the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rota.core.effects import Effect
from rota.core.events import Event
from rota.core.scheduler import Scheduler
from rota.journal.graph import Rows, freeze

PAGE_STEPS = 1_000
"""Steps on a page, at least. A state of more rows begins a longer page, so that the copy costs
each step the same few microseconds at most, however many wait."""
STEPS_PER_ROW = 2


class Step(NamedTuple):
    """What was heard, and what was answered.

    Args:
        now_ms: when, on the controller's clock.
        raised: the exception, if the scheduler broke on it.
    """

    now_ms: int
    event: Event
    effects: Sequence[Effect]
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Recording:
    """A state and the steps that follow from it; nothing in it changes any more."""

    start: Rows
    steps: tuple[Step, ...]


@dataclass(slots=True)
class _Page:
    """Steps as plain tuples: a named one costs three times as much to make."""

    start: Rows
    steps: list[tuple[int, Event, Sequence[Effect], str]] = field(default_factory=list)


class Recorder:
    """Listens to one scheduler, from before its first step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._page = _Page(freeze(scheduler))
        self._page_before: _Page | None = None
        self._length = PAGE_STEPS

    def note(self, now_ms: int, event: Event, effects: Sequence[Effect], raised: str = "") -> None:
        """Keep a step (see `Step`), right after it was taken."""
        steps = self._page.steps
        steps.append((now_ms, event, effects, raised))
        if len(steps) >= self._length:
            self._turn()

    def recording(self) -> Recording:
        """All that is kept, as of now."""
        pages = [self._page] if self._page_before is None else [self._page_before, self._page]
        return Recording(pages[0].start, tuple(Step(*step) for p in pages for step in p.steps))

    def _turn(self) -> None:
        self._page_before = self._page
        self._page = _Page(freeze(self._scheduler))
        self._length = max(PAGE_STEPS, STEPS_PER_ROW * len(self._page.start))
