"""Machines that exist in virtual time only: they load, serve, crash, fall silent, stop, get lost.

`SimCluster` stands where `rota.cluster` stands in service: it is given `Start` and `Stop` and
answers with facts, later. What goes wrong, and how often, is `Faults`; switching them off is
how a simulation asks whether everybody is served once the world behaves again.

A machine that is lost cannot be heard; what goes on there goes on unheard, and is reported when
it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from rota.core.effects import Start, Stop
from rota.core.events import (
    Event,
    NodeJoined,
    NodeLost,
    ReplicaReady,
    ReplicaSilent,
    ReplicaStopped,
    Running,
    StopCause,
)
from rota.core.types import ModelName, NodeId, Phase, ReplicaId, RequestId
from rota.sim.timeline import Happening, Timeline

START_TIMEOUT_MS = 300_000
LISTEN_EVERY_MS = 10_000
"""An engine that answers nothing is reported this often, as long as it is there."""


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
        mute: replicas that answer nothing any more some time after they became ready.
    """

    crash: float = 0.0
    hang: float = 0.0
    refuse: float = 0.0
    permanent: float = 0.0
    slow: float = 0.0
    stubborn: float = 0.0
    die: float = 0.0
    mute: float = 0.0


@dataclass(slots=True)
class _Engine:
    """What really runs."""

    order: Start
    phase: Phase = Phase.STARTING
    is_mute: bool = False


class SimCluster:
    """Carries out orders in virtual time.

    Args:
        load_ms: how long each model takes to load when nothing is wrong.
        report: where facts go.
        died: told of each replica that is gone, before the fact is reported, so that whoever
            was being served by it notices first or last at random.
        served_by: the requests that run on a replica.
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
        served_by: Callable[[ReplicaId], tuple[RequestId, ...]],
    ) -> None:
        self._random = random
        self._timeline = timeline
        self._load_ms = load_ms
        self.faults = faults
        self._report = report
        self._died = died
        self._served_by = served_by
        self._engines: dict[ReplicaId, _Engine] = {}
        self._lost: set[NodeId] = set()

    def answers(self, replica: ReplicaId) -> bool:
        """Whether what runs on it can come to its end."""
        engine = self._engines.get(replica)
        return engine is None or not engine.is_mute

    # ── orders ───────────────────────────────────────────────────────────────────────────

    def start(self, order: Start) -> None:
        """Load, or fail to."""
        replica, faults = order.replica, self.faults
        assert replica not in self._engines, replica
        assert order.placement.node not in self._lost, order
        self._engines[replica] = _Engine(order)
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
        engine = self._engines.get(order.replica)
        if engine is None:
            return  # it died this instant, which is about to be reported
        assert engine.phase is not Phase.STOPPING, order
        engine.phase = Phase.STOPPING
        takes_ms = self._random.randint(5, 1_000)
        if self._happens(self.faults.stubborn):
            takes_ms = order.grace_ms + self._random.randint(0, 2_000)
        self._later(takes_ms, self._ends(order.replica, StopCause.ASKED))

    # ── a replica's life ─────────────────────────────────────────────────────────────────

    def _ready(self, replica: ReplicaId) -> None:
        engine = self._engines.get(replica)
        if engine is None or engine.phase is Phase.STOPPING:
            return
        engine.phase = Phase.READY
        if self._happens(self.faults.die):
            in_ms = self._random.randint(1, 120_000)
            self._later(in_ms, self._ends(replica, StopCause.CRASHED))
        if self._happens(self.faults.mute):
            in_ms = self._random.randint(1, 120_000)
            self._later(in_ms, lambda: self._falls_silent(replica))
        self._tell(engine, ReplicaReady(replica))

    def _falls_silent(self, replica: ReplicaId) -> None:
        engine = self._engines.get(replica)
        if engine is None:
            return
        engine.is_mute = True
        self._later(LISTEN_EVERY_MS, lambda: self._listen(replica))

    def _listen(self, replica: ReplicaId) -> None:
        """A probe has had no answer, and there will be another."""
        engine = self._engines.get(replica)
        if engine is None or engine.phase is Phase.STOPPING:
            return
        self._later(LISTEN_EVERY_MS, lambda: self._listen(replica))
        self._tell(engine, ReplicaSilent(replica, "as the simulation has it"))

    def _ends(self, replica: ReplicaId, cause: StopCause, *, permanent: bool = False) -> Happening:
        def end() -> None:
            engine = self._engines.pop(replica, None)
            if engine is None:
                return
            fact = ReplicaStopped(replica, cause, "as the simulation has it", permanent)
            if self._happens(0.5):
                self._died(replica)
                self._tell(engine, fact)
            else:
                self._tell(engine, fact)
                self._died(replica)

        return end

    # ── machines ─────────────────────────────────────────────────────────────────────────

    def lose(self, node: NodeId) -> None:
        """A machine cannot be heard any more: it is down, or only cut off."""
        if node in self._lost:
            return
        self._lost.add(node)
        self._report(NodeLost(node))
        if self._happens(0.5):
            for replica in self._on(node):
                del self._engines[replica]
                self._died(replica)

    def find(self, joined: NodeJoined) -> None:
        """It is back, with what runs there."""
        self._lost.discard(joined.node)
        running = []
        for replica in self._on(joined.node):
            engine = self._engines[replica]
            is_up = engine.phase is not Phase.STARTING
            grants = self._served_by(replica) if is_up else ()
            order = engine.order
            running.append(Running(replica, order.model, order.placement, engine.phase, grants))
        self._report(NodeJoined(joined.node, joined.devices, tuple(running)))

    def _on(self, node: NodeId) -> list[ReplicaId]:
        return [r for r, engine in self._engines.items() if engine.order.placement.node == node]

    def _tell(self, engine: _Engine, fact: Event) -> None:
        """Report a fact, if anybody can hear it."""
        if engine.order.placement.node not in self._lost:
            self._report(fact)

    def _later(self, in_ms: int, happening: Happening) -> None:
        self._timeline.post(in_ms, happening)

    def _happens(self, share: float) -> bool:
        return self._random.random() < share
