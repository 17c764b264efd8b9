"""What the scheduler heard and answered lately: kept, saved, replayed, told as a story."""

from rota.journal.recorder import Recorder, Recording, Step

__all__ = ["Recorder", "Recording", "Step"]
