"""A small stage for scripts in virtual time: nothing random, nothing fails.

What `run` plays by lot is here said exactly: loads take as long as the script has it, a stop takes
a second, callers ask the instant they may. So two plays differ by the rules alone, and a script
can be read like an example. Callers obey `Retry-After` to the millisecond.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from rota.core.effects import Effect, Grant, Leased, LeaseEnded, Refuse, Start, Stop
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    NodeJoined,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    StopCause,
    TimePassed,
)
from rota.core.invariants import EffectAudit, check
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Eviction, Model, ModelName, ReplicaId, RequestId, Rules
from rota.sim.timeline import Timeline

STOP_MS = 1_000


class Stage:
    """One node, a catalog, and what callers do.

    Args:
        devices: memory of each, in MiB.
        load_ms: how long a load of a model takes; asked at each.
        rules: those that are on.
        eviction: what decides who makes room.
        stop_ms: how long a stop takes.
        is_checked: whether the invariants are checked after each step, if all rules are on.

    Attributes:
        served: grants by model.
        waited_ms: from first arrival to grant, of each that was granted, by model.
        starts: replicas started, by model.
    """

    def __init__(
        self,
        devices: Sequence[int],
        models: Sequence[Model],
        load_ms: Callable[[ModelName], int],
        rules: Rules | None = None,
        *,
        eviction: Eviction = Eviction.VALUE,
        stop_ms: int = STOP_MS,
        is_checked: bool = True,
    ) -> None:
        self.timeline = Timeline()
        self.scheduler = Scheduler(models, rules=rules, eviction=eviction)
        self.served: Counter[ModelName] = Counter()
        self.waited_ms: defaultdict[ModelName, list[int]] = defaultdict(list)
        self.starts: Counter[ModelName] = Counter()
        self._load_ms = load_ms
        self._stop_ms = stop_ms
        is_checked = is_checked and rules in (None, Rules())
        self._audit = EffectAudit(models) if is_checked else None
        self._count = 0
        self._going: set[ReplicaId] = set()
        self._on_answer: dict[RequestId, Callable[[Effect], None]] = {}
        listed = tuple(Device(f"d{n}", mib) for n, mib in enumerate(devices))
        self._feed(NodeJoined("n0", listed))

    @property
    def now_ms(self) -> int:
        return self.timeline.now_ms

    def at(self, at_ms: int, deed: Callable[[], None]) -> None:
        self.timeline.post(at_ms - self.now_ms, deed)

    def run_until(self, until_ms: int) -> None:
        """Let everything up to then happen."""
        while True:
            next_ms, wake_ms = self.timeline.next_ms(), self.scheduler.next_wake_ms()
            soonest_ms = min((ms for ms in (next_ms, wake_ms) if ms is not None), default=None)
            if soonest_ms is None or soonest_ms > until_ms:
                break
            if soonest_ms == next_ms:
                self.timeline.jump()
            else:
                self.timeline.now_ms = soonest_ms
                self._feed(TimePassed())
        self.timeline.now_ms = until_ms

    # ── callers ──────────────────────────────────────────────────────────────────────────

    def caller(
        self,
        model: ModelName,
        serve_ms: int,
        *,
        first_ms: int = 0,
        think_ms: int = 0,
        times: int = 10**9,
        leaves_ms: int | None = None,
    ) -> None:
        """Someone who asks at `first_ms`, and again `think_ms` after each answer, so many times.

        Args:
            leaves_ms: it walks away after waiting this long, and asks again after `think_ms`.
        """
        self._count += 1
        name = f"{model}-{self._count}"

        def ask(since_ms: int, left: int) -> None:
            if left == 0:
                return
            request = self._new_request()

            def again() -> None:
                self.timeline.post(think_ms, lambda: ask(self.now_ms, left - 1))

            def end() -> None:
                self._feed(GrantEnded(request, Outcome.OK))
                again()

            def answer(effect: Effect) -> None:
                if isinstance(effect, Grant):
                    self._note_served(model, since_ms)
                    self.timeline.post(serve_ms, end)
                elif isinstance(effect, Refuse):
                    back_ms = effect.refusal.retry_after_ms
                    assert back_ms is not None, effect
                    self.timeline.post(back_ms, lambda: ask(since_ms, left))

            def leave() -> None:
                if self._on_answer.pop(request, None) is not None:
                    self._feed(RequestCancelled(request))
                    again()

            self._on_answer[request] = answer
            if leaves_ms is not None:
                self.timeline.post(leaves_ms, leave)
            self._feed(RequestArrived(request, model, name))

        self.at(first_ms, lambda: ask(first_ms, times))

    def lessee(self, model: ModelName, ttl_ms: int, *, first_ms: int = 0) -> None:
        """Someone who leases a model for `ttl_ms` again and again, without end."""
        self._count += 1
        name = f"{model}-{self._count}"

        def ask(since_ms: int) -> None:
            lease = self._new_request()

            def answer(effect: Effect) -> None:
                if isinstance(effect, Leased):
                    self._note_served(model, since_ms)
                    self._on_answer[lease] = answer
                elif isinstance(effect, LeaseEnded):
                    self.timeline.post(0, lambda: ask(self.now_ms))
                elif isinstance(effect, Refuse):
                    back_ms = effect.refusal.retry_after_ms
                    assert back_ms is not None, effect
                    self.timeline.post(back_ms, lambda: ask(since_ms))

            self._on_answer[lease] = answer
            self._feed(LeaseAsked(lease, model, name, ttl_ms, load=True))

        self.at(first_ms, lambda: ask(first_ms))

    def _note_served(self, model: ModelName, since_ms: int) -> None:
        self.served[model] += 1
        self.waited_ms[model].append(self.now_ms - since_ms)

    def _new_request(self) -> RequestId:
        self._count += 1
        return f"q{self._count}"

    # ── the machine ──────────────────────────────────────────────────────────────────────

    def _feed(self, event: Event) -> None:
        effects = self.scheduler.step(event, self.now_ms)
        if self._audit is not None:
            self._audit.watch(event, effects, self.now_ms)
            check(self.scheduler)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Start(replica=replica, model=model):
                self.starts[model] += 1
                self.timeline.post(self._load_ms(model), lambda: self._ready(replica))
            case Stop(replica=replica):
                self._going.add(replica)
                gone = ReplicaStopped(replica, StopCause.ASKED)
                self.timeline.post(self._stop_ms, lambda: self._feed(gone))
            case Grant(request=request) | Refuse(request=request):
                self._on_answer.pop(request)(effect)
            case Leased(lease=lease) | LeaseEnded(lease=lease):
                self._on_answer.pop(lease)(effect)
            case _:
                pass

    def _ready(self, replica: ReplicaId) -> None:
        if replica not in self._going:
            self._feed(ReplicaReady(replica))
