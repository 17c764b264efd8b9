"""Whether a ready engine still answers: a process can be alive and serve nobody.

Time is cut into beats. A beat in which bytes came from the engine costs nothing; after a quiet
one it is asked for its readiness path, one question at a time, each held open for a whole beat.
So an engine that answers late is heard the moment it does, one that never answers holds one
connection of ours and no pile of them, and it takes several lost questions in a row to be called
silent, never one. Any HTTP answer is a sign of life, 503 included.

Beats are counted, not the time since it was heard: when rota itself was stopped for a while (a
debugger, a suspended machine), that costs the engine one beat, and not its life.

Refused: a request of the engine's real work as the question (it costs a slot, and a busy engine
is not a silent one), and its log as a sign of life (a server can be dead beside a thread that
goes on writing).
"""

from __future__ import annotations

import asyncio
import math
import random
import time

from rota.engines.base import Endpoint
from rota.engines.probe import Answer, probe

BEAT_S_MAX = 10.0  # 20 idle engines are asked twice a second in all: under 0.1 % of a CPU
BEATS_MIN = 4  # so three questions at least go unanswered


class Listener:
    """Listens to one ready replica.

    Args:
        path: what it is asked for.
        silent_after_s: how long no sign of life means that it is silent.
    """

    def __init__(self, endpoint: Endpoint, path: str, *, silent_after_s: float) -> None:
        self._endpoint = endpoint
        self._path = path
        self._beats = max(BEATS_MIN, math.ceil(silent_after_s / BEAT_S_MAX))
        self._beat_s = silent_after_s / self._beats
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        """It gave a sign of life: bytes of an answer, to anybody."""
        self._heard_at = time.monotonic()

    async def silence(self) -> Answer:
        """Wait for as long as it gives signs of life.

        Returns: what the last question met.
        """
        # Engines that came up together need not be asked together.
        await asyncio.sleep(random.random() * self._beat_s)  # noqa: S311
        met = Answer(connected=False)
        quiet_beats = 0
        while quiet_beats < self._beats:
            begun = time.monotonic()
            beat_began = begun if quiet_beats else self._heard_at
            if quiet_beats:
                met = await probe(self._endpoint, self._path, timeout_s=self._beat_s)
                if met.status is not None:
                    self.heard()
            if self._heard_at < begun:
                await asyncio.sleep(max(0.0, beat_began + self._beat_s - time.monotonic()))
            quiet_beats = 0 if self._heard_at >= begun else quiet_beats + 1
        return met
