"""What the scheduler heard and answered lately: kept, saved, replayed, told as a story;
and what it would answer."""

from rota.journal.recorder import Recorder, Recording, Step
from rota.journal.rehearsal import rehearse
from rota.journal.replay import first_difference, say_exception
from rota.journal.story import Story, stories

__all__ = [
    "Recorder",
    "Recording",
    "Step",
    "Story",
    "first_difference",
    "rehearse",
    "say_exception",
    "stories",
]
