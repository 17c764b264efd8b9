"""The scheduler keeps its promises whatever happens, in whatever order, to whatever fleet.

A Hypothesis state machine feeds random facts, stale and repeated ones too, to two schedulers.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rota.core.coexistence import FREE, Coexistence, Group, Groups, Matrix
from rota.core.effects import Effect, Grant, Leased, LeaseEnded, Loaded, Refuse, Start, Stop
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LeaseReleased,
    LeaseRenewed,
    LoadAsked,
    ModelsChanged,
    NodeJoined,
    NodeLost,
    Outcome,
    PinAsked,
    ReplicaReady,
    ReplicaSilent,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    Running,
    ShutdownAsked,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.invariants import EffectAudit, check
from rota.core.scheduler import Scheduler
from rota.core.types import Device, LeaseClaim, Model, Phase, Placement, Preload, Scaling

QUEUE_BYTES_MAX = 64


@st.composite
def fleets(draw: st.DrawFn) -> tuple[tuple[tuple[Device, ...], ...], list[Model]]:
    """Nodes with devices of 4 to 12 MiB, and models that take 1 to 8 MiB, or all."""
    nodes = draw(st.integers(1, 2))
    devices = tuple(
        tuple(
            Device(f"d{n}", draw(st.sampled_from((0, 4, 8, 8, 12))))
            for n in range(draw(st.integers(1, 3)))
        )
        for _ in range(nodes)
    )
    return devices, [draw(models(f"m{n}")) for n in range(draw(st.integers(1, 5)))]


@st.composite
def rules(draw: st.DrawFn) -> Coexistence:
    """Mostly none; else groups, or a matrix, of some of the models."""
    names = [f"m{n}" for n in range(5)]
    what = draw(st.sampled_from(("none", "none", "groups", "matrix")))
    if what == "none":
        return FREE
    if what == "matrix":
        sets = ("m0 & m1", "(m1 | m2) & m3", "+s0 & m3", "m4")
        chosen = draw(st.lists(st.sampled_from(sets), min_size=1, max_size=3))
        costs = {"m1": draw(st.sampled_from((1, 10)))}
        return Matrix((("s0", "m0 & m1"), *((f"t{n}", s) for n, s in enumerate(chosen))), {}, costs)
    cut = draw(st.integers(1, 4))
    truth = st.booleans()
    return Groups(
        tuple(
            Group(name, frozenset(members), draw(truth), draw(truth), draw(truth))
            for name, members in (("g", names[:cut]), ("h", names[cut:]))
        )
    )


@st.composite
def models(draw: st.DrawFn, name: str) -> Model:
    low, high = draw(st.sampled_from(((0, 1),) * 5 + ((0, 0), (1, 1), (1, 2), (2, 2), (0, 2))))
    return Model(
        name=name,
        scaling=Scaling(low, high, draw(st.sampled_from((0, 1, 5_000, 600_000)))),
        memory_mib=draw(st.sampled_from((None, 1, 2, 3, 4, 8))),
        device_count=draw(st.sampled_from((0, 1, 1, 1, 1, 2))),
        devices=draw(st.sampled_from((None, None, None, frozenset({"d0", "d1"})))),
        slots=draw(st.sampled_from((1, 2, 10))),
        queue_max=draw(st.sampled_from((1, 2, 1_000))),
        activation_wait_ms=draw(st.sampled_from((0, 2_000, 45_000))),
        queue_wait_ms=draw(st.sampled_from((1_000, 600_000))),
        patience_ms=draw(st.sampled_from((0, 3_000, 300_000))),
        stop_grace_ms=10_000,
        load_ms=draw(st.sampled_from((None, 4_000, 20_000))),
        priority=draw(st.sampled_from((0, 0, 0, 5))),
        rejects_when_full=draw(st.sampled_from((False, False, False, True))),
        is_pinned=draw(st.sampled_from((False,) * 7 + (True,))),
        scale_up_after_ms=draw(st.sampled_from((0, 5_000))),
        preload=draw(st.sampled_from((Preload.NEVER,) * 4 + (Preload.ONCE, Preload.ALWAYS))),
        is_exclusive_while_busy=draw(st.sampled_from((False, False, False, True))),
    )


class Machine(RuleBasedStateMachine):
    """What a shell could tell the scheduler, and much that it should not."""

    now_ms = 0
    count = 0

    @initialize(fleet=fleets(), coexistence=rules(), joins_late=st.booleans())
    def begin(
        self,
        fleet: tuple[tuple[tuple[Device, ...], ...], list[Model]],
        coexistence: Coexistence,
        joins_late: bool,
    ) -> None:
        devices, self.models = fleet
        self.scheduler, self.twin = (
            Scheduler(self.models, queue_bytes_max=QUEUE_BYTES_MAX, coexistence=coexistence)
            for _ in range(2)
        )
        self.audit = EffectAudit(self.models, coexistence)
        self.joining = [NodeJoined(f"n{n}", listed) for n, listed in enumerate(devices)]
        self.waiting: list[str] = []
        self.granted: list[str] = []
        self.asked: dict[str, RequestArrived | LoadAsked | LeaseAsked] = {}
        self.leases: dict[str, str] = {}
        self.lives: dict[str, Start] = {}
        self.told: list[tuple[str, int, str, int]] = []
        self.starting: list[str] = []
        self.running: list[str] = []
        self.stopping: list[str] = []
        self.ended: list[Event] = [ReplicaReady("r999"), GrantEnded("q999", Outcome.OK)]
        if not joins_late:
            while self.joining:
                self.feed(self.joining.pop(0))

    # ── facts that make sense ────────────────────────────────────────────────────────────

    @rule(data=st.data())
    def changed(self, data: st.DataObject) -> None:
        """Some models stay as they are, some are others, some go, one comes."""
        known = {model.name: model for model in self.models}
        coming: list[Model] = []
        for name in [f"m{n}" for n in range(6)]:
            what = data.draw(st.sampled_from(("as it is",) * 3 + ("another", "gone")))
            model = known.get(name)
            if model is not None and what == "as it is":
                coming.append(model)
            elif what == "another":
                other = data.draw(models(name))
                # A shorter queue turns nobody out, so that the check of its length would not hold.
                queue_max = other.queue_max if model is None else model.queue_max
                coming.append(replace(other, queue_max=max(queue_max, 2)))
        if coming:
            self.models = coming
            relaunched = data.draw(st.sampled_from((frozenset(), frozenset({"m0", "m1"}))))
            coexistence = data.draw(rules())
            self.feed(ModelsChanged(tuple(coming), coexistence, relaunched))

    @precondition(lambda self: self.joining)
    @rule()
    def joined(self) -> None:
        self.feed(self.joining.pop(0))

    @rule(data=st.data(), burst=st.sampled_from((1, 1, 1, 2, 4)))
    def arrived(self, data: st.DataObject, burst: int) -> None:
        model = data.draw(st.sampled_from([model.name for model in self.models]))
        caller = data.draw(st.sampled_from(("ann", "ben", "cleo", "")))
        mark = data.draw(st.sampled_from((0, 0, 1, 2)))
        waits = st.sampled_from((None, None, None, 0, 1_000, 20_000))
        activation_ms, queue_ms, hold_ms, patience_ms = (data.draw(waits) for _ in range(4))
        priority = data.draw(st.sampled_from((None, None, None, 0, 5, -5)))
        obstacle = data.draw(st.sampled_from(("", "", "", "it has no file")))
        for _ in range(burst):
            arrival = RequestArrived(
                request=self.new_id(),
                model=model,
                caller=caller,
                mark=mark,
                body_bytes=7,
                activation_wait_ms=activation_ms,
                queue_wait_ms=queue_ms,
                hold_ms=hold_ms,
                patience_ms=patience_ms,
                priority=priority,
                obstacle=obstacle,
            )
            self.feed(arrival)

    @rule(
        data=st.data(),
        ttl_ms=st.sampled_from((1, 5_000, 10**8)),
        load=st.booleans(),
        wait_ms=st.sampled_from((None, 0, 5_000)),
    )
    def lease_asked(
        self, data: st.DataObject, ttl_ms: int, load: bool, wait_ms: int | None
    ) -> None:
        model = data.draw(st.sampled_from([model.name for model in self.models]))
        caller = data.draw(st.sampled_from(("ann", "ben")))
        replicas = [r for r in self.running if self.lives[r].model == model]
        replica = data.draw(st.sampled_from([None, None, "r999", *replicas]))
        lease = self.new_id()
        asked = LeaseAsked(lease, model, caller, ttl_ms, "", load, replica, wait_ms)
        self.feed(asked)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ttl_ms=st.sampled_from((1, 5_000, 10**8)))
    def lease_renewed(self, data: st.DataObject, ttl_ms: int) -> None:
        self.feed(LeaseRenewed(data.draw(st.sampled_from(list(self.leases))), ttl_ms))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def lease_released(self, data: st.DataObject) -> None:
        self.feed(LeaseReleased(data.draw(st.sampled_from(list(self.leases)))))

    @rule(data=st.data(), is_pinned=st.booleans())
    def pin_asked(self, data: st.DataObject, is_pinned: bool) -> None:
        model = data.draw(st.sampled_from([model.name for model in self.models]))
        self.feed(PinAsked(model, is_pinned))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), is_late=st.booleans())
    def came_back(self, data: st.DataObject, is_late: bool) -> None:
        caller, mark, model, back_ms = self.told.pop(data.draw(st.integers(0, len(self.told) - 1)))
        self.wait_until(back_ms + (9_000 if is_late else 0))
        self.feed(RequestArrived(self.new_id(), model, caller, mark, 7))

    @precondition(lambda self: self.waiting or self.granted)
    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting + self.granted))
        self.drop(request)
        self.feed(RequestCancelled(request))

    @precondition(lambda self: self.granted)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(Outcome),
        is_tool_call=st.booleans(),
        is_job=st.sampled_from((False, False, True)),
    )
    def ended_(
        self, data: st.DataObject, outcome: Outcome, is_tool_call: bool, is_job: bool
    ) -> None:
        request = data.draw(st.sampled_from(self.granted))
        self.drop(request)
        lease = LeaseClaim(self.new_id(), 30_000) if is_job else None
        self.feed(GrantEnded(request, outcome, is_tool_call, lease))

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.starting))
        self.starting.remove(replica)
        self.running.append(replica)
        self.feed(ReplicaReady(replica))

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def stopped(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.stopping))
        self.forget(replica)
        self.feed(ReplicaStopped(replica, StopCause.ASKED))

    @precondition(lambda self: self.starting or self.running)
    @rule(
        data=st.data(),
        cause=st.sampled_from((StopCause.CRASHED, StopCause.NEVER_READY, StopCause.REFUSED)),
        permanent=st.booleans(),
    )
    def failed(self, data: st.DataObject, cause: StopCause, permanent: bool) -> None:
        replica = data.draw(st.sampled_from(self.starting + self.running))
        self.forget(replica)
        self.feed(ReplicaStopped(replica, cause, "it said so", permanent))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def silent(self, data: st.DataObject) -> None:
        self.feed(ReplicaSilent(data.draw(st.sampled_from(self.running))))

    @precondition(lambda self: self.scheduler.state.ledger.totals)
    @rule(data=st.data(), do_engines_live_on=st.booleans())
    def node_lost(self, data: st.DataObject, do_engines_live_on: bool) -> None:
        """It is away until it joins again; its engines may outlive that."""
        node = data.draw(st.sampled_from(list(self.scheduler.state.ledger.totals)))
        devices = self.scheduler.state.ledger.totals[node]
        there = [r for r, start in self.lives.items() if start.placement.node == node]
        running = [self.running_as(replica) for replica in there]
        for replica in there:
            self.forget(replica)
        self.feed(NodeLost(node))
        listed = tuple(Device(device, mib) for device, mib in devices.items())
        self.joining.append(NodeJoined(node, listed, tuple(running) * do_engines_live_on))

    @rule(data=st.data())
    def load_asked(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([model.name for model in self.models]))
        self.feed(LoadAsked(self.new_id(), model))

    @rule(data=st.data(), grace_ms=st.sampled_from((0, 1_000, 60_000)))
    def unload_asked(self, data: st.DataObject, grace_ms: int) -> None:
        names: list[str | None] = [model.name for model in self.models]
        model = data.draw(st.sampled_from([*names, *names, None, "unknown"]))
        self.feed(UnloadAsked(model, grace_ms))

    @rule(by_ms=st.sampled_from((0, 1, 999, 5_000, 30_000, 700_000)))
    def time_passed(self, by_ms: int) -> None:
        self.wait_until(self.now_ms + by_ms)

    @rule()
    def woke(self) -> None:
        wake_ms = self.scheduler.next_wake_ms()
        if wake_ms is not None:
            self.wait_until(wake_ms)

    # ── facts that do not ────────────────────────────────────────────────────────────────

    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        """What has ended before, or never was, changes nothing."""
        self.unchanged_by(data.draw(st.sampled_from(self.ended)))

    @precondition(lambda self: self.waiting or self.scheduler.state.granted)
    @rule(data=st.data())
    def repeated(self, data: st.DataObject) -> None:
        """An arrival that is still here changes nothing when it is heard again."""
        here = [*self.waiting, *self.scheduler.state.granted, *self.leases]
        known = [request for request in here if request in self.asked]
        if known:
            self.unchanged_by(self.asked[data.draw(st.sampled_from(known))])

    # ── and the means ────────────────────────────────────────────────────────────────────

    def new_id(self) -> str:
        self.count += 1
        return f"q{self.count}"

    def wait_until(self, until_ms: int) -> None:
        """Let time pass as the shell does: wake when asked to, until then."""
        for _ in range(500):
            wake_ms = self.scheduler.next_wake_ms()
            if wake_ms is None or wake_ms > until_ms:
                break
            self.now_ms = wake_ms
            self.feed(TimePassed())
        else:
            raise AssertionError("it wakes without end")
        self.now_ms = max(self.now_ms, until_ms)
        self.feed(TimePassed())

    def feed(self, event: Event) -> None:
        if isinstance(event, NodeJoined):
            for found in event.running:
                self.lives[found.replica] = Start(found.replica, found.model, found.placement, "")
                held = {Phase.STARTING: self.starting, Phase.READY: self.running}
                held.get(found.phase, self.stopping).append(found.replica)
                self.granted += found.grants
                again = {GrantEnded(request, Outcome.FAILED) for request in found.grants}
                self.ended = [known for known in self.ended if known not in again]
        effects = self.scheduler.step(event, self.now_ms)
        assert repr(effects) == repr(self.twin.step(event, self.now_ms))
        if isinstance(event, RequestArrived | LoadAsked | LeaseAsked):
            self.asked[event.request] = event
            self.waiting.append(event.request)
        if isinstance(event, GrantEnded | RequestCancelled | ReplicaStopped | LeaseReleased):
            self.ended.append(event)
        for effect in effects:
            self.obey(effect)
        self.audit.watch(event, effects, self.now_ms)
        check(self.scheduler)
        self.unchanged_by(TimePassed())

    def obey(self, effect: Effect) -> None:
        match effect:
            case Grant(request=request, replica=replica):
                self.waiting.remove(request)
                self.granted.append(request)
            case Refuse(request=request, refusal=refusal):
                self.waiting.remove(request)
                asked = self.asked[request]
                if refusal.retry_after_ms is not None and not isinstance(asked, LoadAsked):
                    back_ms = self.now_ms + refusal.retry_after_ms
                    self.told.append((asked.caller, asked.mark, asked.model, back_ms))
            case Loaded(request=request):
                self.waiting.remove(request)
            case Leased(lease=lease, replica=replica):
                if lease in self.waiting:
                    self.waiting.remove(lease)
                self.leases[lease] = replica
            case LeaseEnded(lease=lease):
                del self.leases[lease]
            case Start(replica=replica):
                self.lives[replica] = effect
                self.starting.append(replica)
            case Stop(replica=replica):
                for held in (self.starting, self.running):
                    if replica in held:
                        held.remove(replica)
                self.stopping.append(replica)
            case _:
                pass

    def running_as(self, replica: str) -> Running:
        """As its node would report it."""
        phase = Phase.STARTING if replica in self.starting else Phase.READY
        phase = Phase.STOPPING if replica in self.stopping else phase
        placement: Placement = self.lives[replica].placement
        known = self.scheduler.state.replicas[replica]
        grants = () if phase is Phase.STARTING else tuple(sorted(known.grants))
        return Running(replica, self.lives[replica].model, placement, phase, grants)

    def forget(self, replica: str) -> None:
        """It is gone, and so is what ran on it, whether that is heard of or not."""
        for held in (self.starting, self.running, self.stopping):
            if replica in held:
                held.remove(replica)
        for request in self.scheduler.state.replicas[replica].grants:
            if request in self.granted:
                self.granted.remove(request)
                self.ended.append(GrantEnded(request, Outcome.FAILED))
        del self.lives[replica]

    def drop(self, request: str) -> None:
        for held in (self.waiting, self.granted):
            if request in held:
                held.remove(request)

    def unchanged_by(self, event: Event) -> None:
        before = repr(self.scheduler.state)
        effects = self.scheduler.step(event, self.now_ms)
        self.twin.step(event, self.now_ms)
        assert not effects, (event, effects)
        assert repr(self.scheduler.state) == before, event


class LastMachine(Machine):
    """The same, and one shutdown, after which everything ends."""

    is_over = False

    @precondition(lambda self: not self.is_over)
    @rule(grace_ms=st.sampled_from((0, 5_000)))
    def shutdown_asked(self, grace_ms: int) -> None:
        self.is_over = True
        self.feed(ShutdownAsked(grace_ms))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.feed(ShutdownAsked(5_000))
        self.wait_until(self.now_ms + 5_000)
        for replica in list(self.stopping):
            self.feed(ReplicaStopped(replica, StopCause.ASKED))
        assert not self.scheduler.state.replicas
        assert not self.waiting
        assert self.scheduler.next_wake_ms() is None or not self.scheduler.state.granted


COMMON = settings(
    deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True
)
TestMachine = Machine.TestCase
TestMachine.settings = settings(COMMON, max_examples=60, stateful_step_count=40)
TestLastMachine = LastMachine.TestCase
TestLastMachine.settings = settings(COMMON, max_examples=25, stateful_step_count=25)
