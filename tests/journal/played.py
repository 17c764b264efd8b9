"""Recordings of simulated worlds, for tests: everything that a scheduler can come to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

from rota.core.effects import Effect
from rota.core.events import Event
from rota.core.scheduler import Scheduler
from rota.journal.recorder import Recorder, Recording
from rota.sim.run import _Simulation
from rota.sim.world import draw_world


class _Listening:
    """Hears every step of a simulation, where its audit does, until it has heard enough."""

    def __init__(
        self, simulation: _Simulation, steps_max: int, look: Callable[[Scheduler], None]
    ) -> None:
        self._scheduler = simulation.scheduler
        self._look = look
        self._watch = simulation.audit.watch
        self._recorder = Recorder(simulation.scheduler)
        self._left = steps_max

    def watch(self, event: Event, effects: Sequence[Effect], now_ms: int) -> None:
        self._watch(event, effects, now_ms)
        self._recorder.note(now_ms, event, effects)
        self._look(self._scheduler)
        self._left -= 1
        if self._left == 0:
            raise _EnoughError

    def recording(self) -> Recording:
        return self._recorder.recording()


class _EnoughError(Exception):
    pass


def play(
    seed: int, steps_max: int = 2_500, look: Callable[[Scheduler], None] = lambda _: None
) -> Recording:
    """The last steps of one simulation that is cut off after so many.

    Args:
        look: called after each step.
    """
    random = Random(seed)
    simulation = _Simulation(seed, random, draw_world(random))
    listening = _Listening(simulation, steps_max, look)
    simulation.audit = listening  # type: ignore[assignment]
    with suppress(_EnoughError):
        simulation.play()
    return listening.recording()
