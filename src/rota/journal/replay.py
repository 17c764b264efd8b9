"""Whether a recording gives the same effects again: same events, same times, same orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rota.core.describe import describe
from rota.core.effects import Effect
from rota.journal.graph import thaw
from rota.journal.recorder import Recording, Step


def first_difference(recording: Recording) -> str | None:
    """A sentence that names the first step that went differently; None = none did.

    Raises:
        DamagedError: the state it begins with is none.
    """
    scheduler = thaw(recording.start)
    for number, step in enumerate(recording.steps, 1):
        effects: Sequence[Effect] = ()
        raised = ""
        try:
            effects = scheduler.step(step.event, step.now_ms)
        except Exception as error:  # noqa: BLE001 - that it breaks is what may have been recorded
            raised = say_exception(error)
        said = _say_difference(step, effects, raised)
        if said is not None:
            return f"Step {number} ({describe(step.event)}) {said}."
    return None


def say_exception(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ").rstrip(": ")


def _say_difference(step: Step, effects: Sequence[Effect], raised: str) -> str | None:
    if raised != step.raised:
        return f"was recorded as {_ended(step.raised)} and is now {_ended(raised)}"
    for recorded, replayed in zip_longest(step.effects, effects):
        if recorded != replayed:
            was, now = _say_effect(recorded), _say_effect(replayed)
            if was == now:  # told apart by what the sentence leaves out
                was, now = repr(recorded), repr(replayed)
            return f"was recorded with `{was}` and now gives `{now}`"
    return None


def _ended(raised: str) -> str:
    return f"breaking ({raised})" if raised else "going well"


def _say_effect(effect: Effect | None) -> str:
    return "nothing more" if effect is None else describe(effect)
