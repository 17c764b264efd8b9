"""One simulation: a world, trouble, then peace; and what is asserted on the way.

`simulate(seed)` plays a random world with faults on, then with faults off, every machine back and
no new wishes: every wish must be fulfilled, or refused for good, within `PEACE_MS`.
`simulate(seed, endless=True)` plays callers who never stop: from a caller's first arrival to its
grant no more may pass than `bound_ms` says. After each step `invariants.check` and `EffectAudit`
look at everything. At the end rota is shut down and nothing may be left, not even an alarm.

A shell that is late, but not early, is part of the world: wake-ups come up to 20 ms late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from rota.core.clearing import BARRIER_MS, COOLDOWN_MS_MAX, REOPENED_MS
from rota.core.describe import describe
from rota.core.effects import (
    Effect,
    Grant,
    Leased,
    LeaseEnded,
    Loaded,
    Refuse,
    Start,
    Stop,
    Tell,
)
from rota.core.events import (
    Event,
    LoadAsked,
    ModelsChanged,
    NodeJoined,
    PinAsked,
    ShutdownAsked,
    TimePassed,
    UnloadAsked,
)
from rota.core.invariants import EffectAudit, check
from rota.core.orders import NEVER_MS
from rota.core.scheduler import OWED_MS, Scheduler
from rota.core.types import ReplicaId
from rota.core.words import RETRY_MS_MAX
from rota.sim.callers import RETURN_MS_MAX, Callers, Counts
from rota.sim.catalogs import another, enrich
from rota.sim.cluster import START_TIMEOUT_MS, Faults, SimCluster
from rota.sim.timeline import Timeline
from rota.sim.world import World, draw_endless_world, draw_world

PEACE_MS = 3 * 3_600_000
WAKE_LATE_MS_MAX = 20
SLOWEST = 5 * 1.2
"""A load takes this many times its usual time at most; see `SimCluster.start`."""
STOP_LATE_MS = 2_000
ENDLESS_STEPS = 4_000
STALLED_MAX = 10_000
"""More steps than this at one instant are a loop."""
TAIL_LINES = 120


class SimulationError(AssertionError):
    """A simulation failed; the message says how to see it again and what came before."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation saw.

    Args:
        digest: of every event and effect, in order: equal runs have equal ones.
        peace_ms: how long after the last fault the last wish was fulfilled.
        longest_ms: endless only: the longest wait to a grant.
        bound_ms: endless only: what bounds it.
    """

    seed: int
    steps: int
    counts: Counts
    loads: int
    digest: str
    peace_ms: int = 0
    longest_ms: int = 0
    bound_ms: int = 0

    @property
    def share_of_bound(self) -> float:
        return self.longest_ms / self.bound_ms if self.bound_ms else 0.0


def simulate(seed: int, *, endless: bool = False, is_plain: bool = False) -> Report:
    """Play one seed.

    Args:
        is_plain: nothing of what `catalogs` adds to a world.

    Raises:
        SimulationError: something did not hold.
    """
    random = Random(seed)  # noqa: S311 (to be repeatable is the point)
    world = draw_endless_world(random) if endless else draw_world(random)
    if not is_plain:
        world = enrich(random, world, is_endless=endless)
    simulation = _Simulation(seed, random, world)
    try:
        return simulation.play_endless() if endless else simulation.play()
    except Exception as error:
        again = f"rota sim 1 --seed {seed}" + (" --endless" if endless else "")
        lines = "\n".join(simulation.tail)
        raise SimulationError(f"{lines}\n{error!r}\nsee it again: {again}") from error


def bound_ms(world: World) -> int:
    """How long a caller who always returns waits for its grant at most.

    Stated and explained in docs/scheduler.md, "How long it can take". `patience` is the
    longest of all models and callers, since a demand that is older but more patient goes first; the
    turns are those of each model that may have to go first, and its own.
    """
    load_ms = max(round(ms * SLOWEST) for ms in world.load_ms.values())
    stop_ms = max(model.stop_grace_ms for model in world.models) + STOP_LATE_MS
    away_ms = RETRY_MS_MAX + RETURN_MS_MAX
    residence_ms = min(load_ms, max(model.patience_ms // 2 for model in world.models))
    kept_ms = max(away_ms + OWED_MS, residence_ms)
    drain_ms = drained_ms(world.use_ms_max, residence_ms)
    turn_ms = load_ms + kept_ms + drain_ms + stop_ms + load_ms + WAKE_LATE_MS_MAX
    patience_ms = max(
        *(other.patience_ms for other in world.models),
        *(temper.patience_ms or 0 for _, temper in world.tempers),
    )
    return patience_ms + away_ms + turn_ms * len(world.models)


def drained_ms(use_ms: int, residence_ms: int) -> int:
    """How long it takes a demand past its patience to have uses of up to `use_ms` end.

    A barrier that is not met in its time opens for a while, is chosen anew, perhaps on a replica
    in its residence, and then stands twice as long.
    """
    drain_ms, stands_ms = use_ms, BARRIER_MS
    while stands_ms < use_ms:
        drain_ms += stands_ms + REOPENED_MS + residence_ms
        stands_ms *= 2
    return drain_ms


class _Simulation:
    def __init__(self, seed: int, random: Random, world: World) -> None:
        self.seed = seed
        self.random = random
        self.world = world
        self.timeline = Timeline()
        self.scheduler = Scheduler(
            world.models,
            queue_bytes_max=world.queue_bytes_max,
            lease_ms_max=world.lease_ms_max,
            coexistence=world.coexistence,
            eviction=world.eviction,
        )
        self.audit = EffectAudit(world.models, world.coexistence)
        self.models = world.models
        self.callers = Callers(random, self.timeline, self.feed, self._answers)
        self.cluster = SimCluster(
            random,
            self.timeline,
            load_ms=world.load_ms,
            faults=world.faults,
            report=self.feed,
            died=self.callers.died,
            served_by=self.callers.served_by,
        )
        self.steps = self.loads = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.digest = blake2b(digest_size=16)
        self.hands: set[str] = set()
        self.is_trouble, self.is_endless = True, False
        self.away: dict[str, NodeJoined] = {}

    def play(self) -> Report:
        """Trouble, peace, the end."""
        self._begin()
        self._run_until(self.world.phase_ms)
        self.is_trouble = False
        self.cluster.faults = Faults()
        self.callers.are_all_patient = True
        self.callers.are_new_wishes_made = False
        for node in list(self.away):
            self._find(node)
        peace_ms = self.timeline.now_ms
        while self._pending() and self.timeline.now_ms < peace_ms + PEACE_MS:
            self._run_until(self.timeline.now_ms + 60_000)
        assert not self._pending(), f"not served in peace: {self._pending()}"
        peace_ms = self.timeline.now_ms - peace_ms
        self._run_until(self.timeline.now_ms + START_TIMEOUT_MS + COOLDOWN_MS_MAX)
        self._end()
        return self._report(peace_ms=peace_ms)

    def play_endless(self) -> Report:
        """Callers without end, each served within the bound."""
        self.is_endless = True
        self._begin()
        allowed_ms = bound_ms(self.world)
        longest_ms = 0
        while self.timeline.now_ms < self.world.phase_ms and self.steps < ENDLESS_STEPS:
            self._run_until(self.timeline.now_ms + 10_000)
            longest_ms = max(longest_ms, self._longest_ms())
            assert longest_ms <= allowed_ms, f"starving: {self._pending()}"
        self.callers.are_new_wishes_made = False
        self._run_until(self.timeline.now_ms + PEACE_MS)
        assert not self._pending(), f"not served in peace: {self._pending()}"
        self._end()
        return self._report(longest_ms=longest_ms, bound_ms=allowed_ms)

    def feed(self, event: Event) -> None:
        """One step, looked at from all sides, then carried out."""
        now_ms = self.timeline.now_ms
        self._note(f"{now_ms:>9}  {describe(event)}")
        effects = self.scheduler.step(event, now_ms)
        self.steps += 1
        for effect in effects:
            self._note(f"             → {describe(effect)}")
        self.audit.watch(event, effects, now_ms)
        check(self.scheduler)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Start():
                self.loads += 1
                self.cluster.start(effect)
            case Stop():
                self.cluster.stop(effect)
            case Grant():
                self.callers.granted(effect)
            case Refuse(request=request) | Loaded(request=request) if request in self.hands:
                self.hands.discard(request)
            case Refuse():
                self.callers.refused(effect)
            case Leased():
                self.callers.leased(effect)
            case LeaseEnded():
                self.callers.lease_ended(effect)
            case Loaded() | Tell():
                pass

    def _begin(self) -> None:
        for node, late_ms in zip(self.world.nodes, self.world.late_ms, strict=True):
            self.timeline.post(late_ms, lambda node=node: self.feed(node))  # type: ignore[misc]
        for index, (model, temper) in enumerate(self.world.tempers):
            self.callers.add(f"c{index}", model, temper, self.random.randint(1, 120_000))
        self._in_a_while(self.world.hands_ms, self._by_hand)
        self._in_a_while(self.world.lost_ms, self._lose)
        self._in_a_while(self.world.changes_ms, self._change)

    def _answers(self, replica: ReplicaId) -> bool:
        return self.cluster.answers(replica)

    def _in_a_while(self, mean_ms: int, deed: Callable[[], None]) -> None:
        """Do it again and again, as long as there is trouble; a mean of 0 = never."""

        def do() -> None:
            if self.is_trouble:
                deed()
                self._in_a_while(mean_ms, deed)

        if mean_ms:
            self.timeline.post(self.random.randint(1, 2 * mean_ms), do)

    def _by_hand(self) -> None:
        """Somebody loads, unloads, pins or unpins something."""
        model = self.random.choice(self.world.models).name
        match self.random.randint(0, 5):
            case 0 | 1:
                request = f"hand{self.steps}"
                self.hands.add(request)
                self.feed(LoadAsked(request, model))
            case 2 | 3:
                self.feed(UnloadAsked(model, self.random.choice((0, 5_000, 60_000))))
            case way:
                self.feed(PinAsked(model, is_pinned=way == 4))

    def _change(self) -> None:
        """Another file, or the same again."""
        event = another(self.random, self.world, self.models)
        if self.is_endless:  # nothing is taken away there, and what is told stays true
            event = ModelsChanged(self.models, self.world.coexistence)
        self.models = event.models
        self.feed(event)

    def _lose(self) -> None:
        """A machine that is there is lost, and found again some time later."""
        node = self.random.choice(self.world.nodes)
        if node.node not in self.scheduler.state.ledger.totals:
            return
        self.away[node.node] = node
        self.cluster.lose(node.node)
        self.timeline.post(self.random.randint(1, 300_000), lambda: self._find(node.node))

    def _find(self, name: str) -> None:
        node = self.away.pop(name, None)
        if node is not None:
            self.cluster.find(node)

    def _run_until(self, until_ms: int) -> None:
        """Let everything up to then happen; wake the scheduler when it asks, a little late."""
        stalled, last_ms = 0, -1
        while (step_ms := self._next_ms()) <= until_ms:
            stalled = stalled + 1 if step_ms == last_ms else 0
            assert stalled < STALLED_MAX, f"time stands still at {step_ms}"
            last_ms = step_ms
            if step_ms == self.timeline.next_ms():
                self.timeline.jump()
            else:
                self.timeline.now_ms = step_ms
                self.feed(TimePassed())
        self.timeline.now_ms = max(self.timeline.now_ms, until_ms)

    def _next_ms(self) -> int:
        """When the next thing happens: a fact, or a wake-up that is not early."""
        next_ms = self.timeline.next_ms()
        wake_ms = self.scheduler.next_wake_ms()
        if wake_ms is not None:
            wake_ms = max(wake_ms, self.timeline.now_ms)
            wake_ms += self.random.randint(0, WAKE_LATE_MS_MAX)
        return min((ms for ms in (next_ms, wake_ms) if ms is not None), default=NEVER_MS)

    def _end(self) -> None:
        """Shut down: nothing may be left, not even an alarm."""
        self.feed(ShutdownAsked(5_000))
        self._run_until(self.timeline.now_ms + PEACE_MS)
        state = self.scheduler.state
        assert not state.replicas, state.replicas
        assert not state.granted, state.granted
        assert not self._pending(), self._pending()
        assert self.scheduler.next_wake_ms() is None, self.scheduler.next_wake_ms()

    def _pending(self) -> list[str]:
        now_ms = self.timeline.now_ms
        waiting = [
            f"{caller.name} for {caller.model} since {now_ms - caller.since_ms} ms"
            for caller in self.callers.pending()
        ]
        return waiting + sorted(self.hands)

    def _longest_ms(self) -> int:
        """The longest wait of anybody, over or not."""
        now_ms = self.timeline.now_ms
        going_ms = [now_ms - caller.since_ms for caller in self.callers.pending()]
        return max([*going_ms, self.callers.counts.longest_wait_ms])

    def _note(self, line: str) -> None:
        self.tail.append(line)
        self.digest.update(line.encode() + b"\n")

    def _report(self, *, peace_ms: int = 0, longest_ms: int = 0, bound_ms: int = 0) -> Report:
        return Report(
            seed=self.seed,
            steps=self.steps,
            counts=self.callers.counts,
            loads=self.loads,
            digest=self.digest.hexdigest(),
            peace_ms=peace_ms,
            longest_ms=longest_ms,
            bound_ms=bound_ms,
        )
