"""Machines that exist in virtual time only: they load, serve, crash and stop.

`SimCluster` stands where `rota.cluster` stands in service: it is given `Start` and `Stop` and
answers with facts, later. What goes wrong, and how often, is `Faults`; switching them off is
how a simulation asks whether everybody is served once the world behaves again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from rota.core.effects import Start, Stop
from rota.core.events import Event, ReplicaReady, ReplicaStopped, StopCause
from rota.core.types import ModelName, ReplicaId
from rota.sim.timeline import Happening, Timeline

START_TIMEOUT_MS = 300_000


@dataclass(slots=True)
class Faults:
    """How often things go wrong, as a share of the times they could.

    Args:
        crash: loads that end by themselves.
        hang: loads that never become ready.
        refuse: starts that are refused at once.
        permanent: of those, the ones called hopeless.
        slow: loads that take up to five times as long.
        stubborn: stops that take the whole grace.
        die: replicas that crash some time after they became ready.
    """

    crash: float = 0.0
    hang: float = 0.0
    refuse: float = 0.0
    permanent: float = 0.0
    slow: float = 0.0
    stubborn: float = 0.0
    die: float = 0.0


class SimCluster:
    """Carries out orders in virtual time.

    Args:
        load_ms: how long each model takes to load when nothing is wrong.
        report: where facts go.
        died: told of each replica that is gone, before the fact is reported, so that whoever
            was being served by it notices first or last at random.
    """

    def __init__(
        self,
        random: Random,
        timeline: Timeline,
        *,
        load_ms: Mapping[ModelName, int],
        faults: Faults,
        report: Callable[[Event], None],
        died: Callable[[ReplicaId], None],
    ) -> None:
        self._random = random
        self._timeline = timeline
        self._load_ms = load_ms
        self.faults = faults
        self._report = report
        self._died = died
        self._alive: set[ReplicaId] = set()
        self._ending: set[ReplicaId] = set()

    def start(self, order: Start) -> None:
        """Load, or fail to."""
        replica, faults = order.replica, self.faults
        assert replica not in self._alive, replica
        self._alive.add(replica)
        load_ms = max(1, round(self._load_ms[order.model] * self._random.uniform(0.8, 1.2)))
        if self._happens(faults.slow):
            load_ms *= self._random.randint(2, 5)
        if self._happens(faults.refuse):
            permanent = self._happens(faults.permanent)
            self._later(10, self._ends(replica, StopCause.REFUSED, permanent=permanent))
        elif self._happens(faults.crash):
            permanent = self._happens(faults.permanent)
            in_ms = self._random.randint(1, load_ms)
            self._later(in_ms, self._ends(replica, StopCause.CRASHED, permanent=permanent))
        elif self._happens(faults.hang):
            self._later(START_TIMEOUT_MS, self._ends(replica, StopCause.NEVER_READY))
        else:
            self._later(min(load_ms, START_TIMEOUT_MS), lambda: self._ready(replica))

    def stop(self, order: Stop) -> None:
        """End it: quickly, or when the grace is over; then its memory comes free."""
        if order.replica not in self._alive:
            return  # it died this instant, which is about to be reported
        assert order.replica not in self._ending, order
        self._ending.add(order.replica)
        takes_ms = self._random.randint(5, 1_000)
        if self._happens(self.faults.stubborn):
            takes_ms = order.grace_ms + self._random.randint(0, 2_000)
        self._later(takes_ms, self._ends(order.replica, StopCause.ASKED))

    def _ready(self, replica: ReplicaId) -> None:
        if replica not in self._alive or replica in self._ending:
            return
        if self._happens(self.faults.die):
            in_ms = self._random.randint(1, 120_000)
            self._later(in_ms, self._ends(replica, StopCause.CRASHED))
        self._report(ReplicaReady(replica))

    def _ends(self, replica: ReplicaId, cause: StopCause, *, permanent: bool = False) -> Happening:
        def end() -> None:
            if replica not in self._alive:
                return
            self._alive.discard(replica)
            fact = ReplicaStopped(replica, cause, "as the simulation has it", permanent)
            if self._happens(0.5):
                self._died(replica)
                self._report(fact)
            else:
                self._report(fact)
                self._died(replica)

        return end

    def _later(self, in_ms: int, happening: Happening) -> None:
        self._timeline.post(in_ms, happening)

    def _happens(self, share: float) -> bool:
        return self._random.random() < share
