"""The one loop: an event comes in, the scheduler decides, its orders are carried out.

Only here is the clock read and only here is the scheduler touched. `post` is called in the
event loop by whoever learns a fact; it steps at once, except while a step's orders are being
carried out, when the fact waits in line. So a request for a ready model is granted without a
turn of the loop. A queue with a task behind it was refused: it adds two turns to each
request and nothing to the order of events, which is the order of `post` either way.

Every step is kept in a journal. Should the scheduler break on a fact, the journal is saved, who
waits for its answer is told, and a new scheduler takes over: the nodes say what runs there, this
loop what is granted and leased, and those who wait are asked for again, in their order.

Requests wait on one future each. Whatever ends one (answer, refusal, a caller that leaves)
goes through the scheduler, so its books and what callers were told cannot differ.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from rota.cluster.base import Cluster
from rota.config.values import Config, ModelConfig
from rota.controller.answers import error_of
from rota.controller.leases import Leases
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
    GrantEnded,
    LeaseAsked,
    LoadAsked,
    ModelsChanged,
    NodeJoined,
    NodeLost,
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
)
from rota.core.scheduler import Scheduler
from rota.core.state import State
from rota.core.types import LeaseClaim
from rota.journal import Recorder, say_exception
from rota.journal.file import save

log = logging.getLogger("rota.controller")

MISTAKE_EVERY_MS = 60_000
"""A scheduler that breaks again and again saves its journal this often."""
REBUILD_EVERY_MS = 1_000
"""A state that breaks at once when it is built anew is not built anew without end."""
NEWS = (NodeJoined, NodeLost, ReplicaReady, ReplicaSilent, ReplicaStopped)
"""Facts that are logged whatever comes of them."""

Ask = RequestArrived | LoadAsked | LeaseAsked
Answer = Grant | Loaded | Leased


@dataclass(frozen=True, slots=True)
class _Caller:
    """Someone who waits for an answer about a model."""

    ask: Ask
    answer: asyncio.Future[Answer]

    @property
    def model(self) -> str:
        return self.ask.model


@dataclass(frozen=True, slots=True)
class _Mistake:
    """An event that the scheduler broke on."""

    event: Event
    error: Exception


class Loop:
    """Hears facts, has the scheduler decide, and sees to its orders.

    Attributes:
        scheduler: the present one; another takes over when it breaks.
        recorder: its last steps.
        leases: told of each that begins and ends.
    """

    def __init__(self, config: Config, cluster: Cluster, leases: Leases) -> None:
        self._config = config
        self._cluster = cluster
        self.leases = leases
        self.scheduler = self._new_scheduler()
        self.recorder = Recorder(self.scheduler)
        self._mistake: _Mistake | None = None
        self._next_save_ms = self._next_rebuild_ms = 0
        self._shutdown: ShutdownAsked | None = None
        self._inbox: deque[Event] = deque()
        self._is_stepping = False
        self._callers: dict[str, _Caller] = {}
        self._serving: dict[str, str] = {}  # request → replica, for a scheduler that takes over
        self._departures: dict[str, asyncio.Future[None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms: int | None = None
        self._rebuilding: asyncio.TimerHandle | None = None  # for a break too soon after another

    def open(self) -> None:
        """Begin; to be called in the event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        for alarm in (self._alarm, self._rebuilding):
            if alarm is not None:
                alarm.cancel()

    @property
    def state(self) -> State:
        return self.scheduler.state

    @property
    def journals(self) -> Path:
        """Where journals are saved."""
        return self._config.state_dir / "journals"

    def now_ms(self) -> int:
        return int(self._loop.time() * 1_000)

    def is_in_use(self, request: str) -> bool:
        """Whether a request or a lease of this id is here."""
        state = self.state
        return request in self._callers or request in state.granted or request in state.leases

    # ── facts ────────────────────────────────────────────────────────────────────────────

    def post(self, event: Event) -> None:
        """Take a fact in. To be called in the event loop."""
        self._inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._inbox:
                self._step(self._inbox.popleft())
        finally:
            self._is_stepping = False
            self._set_alarm()

    def reload(self, config: Config) -> None:
        """Have the scheduler go on with another configuration; one that takes over begins
        with it.

        Raises:
            Exception: what the scheduler raised, if it broke on it.
        """
        before, self._config = self._config.models, config
        entries = config.models.values()
        kept = [entry for entry in entries if entry.name in before]
        self.order(
            ModelsChanged(
                tuple(entry.model for entry in entries),
                config.coexistence,
                relaunched=frozenset(e.name for e in kept if _is_relaunched(before[e.name], e)),
                eviction=config.eviction,
                queue_bytes_max=config.queue_bytes_max,
                hold_ms_max=config.hold_ms_max,
                lease_ms_max=config.lease_ttl_ms_max,
            )
        )

    def order(self, event: Event) -> None:
        """Post what someone waits for by other means than an answer.

        Raises:
            Exception: what the scheduler raised, if it broke on it.
        """
        self.post(event)
        if self._mistake is not None and self._mistake.event is event:
            raise self._mistake.error

    def ask(self, event: Ask) -> asyncio.Future[Answer]:
        """Post what is answered; the future is the answer, or raises what a refusal is."""
        caller = _Caller(event, self._loop.create_future())
        self._callers[event.request] = caller
        self.post(event)
        return caller.answer

    def withdraw(self, request: str) -> None:
        """Whoever asked has left."""
        self._callers.pop(request, None)
        self.post(RequestCancelled(request))

    async def until_gone(self, replicas: list[str]) -> None:
        """Wait until these are gone."""
        for replica in replicas:
            if replica in self.state.replicas:
                departure = self._departures.setdefault(replica, self._loop.create_future())
                await asyncio.shield(departure)

    # ── steps ────────────────────────────────────────────────────────────────────────────

    def _step(self, event: Event) -> None:
        now_ms = self.now_ms()
        if isinstance(event, ShutdownAsked):
            self._shutdown = event
        is_news = not isinstance(event, TimePassed) or self._is_due(now_ms)
        effects: list[Effect] = []
        if isinstance(event, GrantEnded | RequestCancelled):
            self._serving.pop(event.request, None)
        try:
            effects = self.scheduler.step(event, now_ms)
        except Exception as error:  # noqa: BLE001 - said and saved; every other request goes on
            self._broke(event, error, now_ms)
        else:
            if is_news or effects:
                self.recorder.note(now_ms, event, effects)
        if isinstance(event, NEWS):
            log.log(_level_of(event), "%s", describe(event))
        # An engine's last words have just been told, or are in the refusal.
        cause = replace(event, detail="") if isinstance(event, ReplicaStopped) else event
        for effect in effects:
            if log.isEnabledFor(_level(effect)):
                log.log(_level(effect), "%s  (%s)", describe(effect), describe(cause))
            self._perform(effect)
        if isinstance(event, ReplicaStopped):
            departure = self._departures.pop(event.replica, None)
            if departure is not None and not departure.done():
                departure.set_result(None)

    def _is_due(self, now_ms: int) -> bool:
        """Whether time alone changes anything. If not, as when somebody polls the status, the
        step leaves nothing but its time, and must not push older ones out of the journal."""
        wake_ms = self.scheduler.next_wake_ms()
        return wake_ms is not None and wake_ms <= now_ms

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Grant():
                self._serving[effect.request] = effect.replica
                self._answer(effect.request, effect)
            case Loaded():
                self._answer(effect.request, effect)
            case Leased():
                lease = self.state.leases.get(effect.lease)
                if lease is not None:  # else it is over already, in the same step
                    self.leases.taken(lease, effect.model)
                self._answer(effect.lease, effect)
            case LeaseEnded():
                self.leases.ended(effect.lease, effect.why)
            case Refuse():
                caller = self._callers.pop(effect.request, None)
                if caller is not None and not caller.answer.done():
                    caller.answer.set_exception(error_of(self.state, caller.model, effect.refusal))
            case Start():
                self._cluster.start(effect)
            case Stop():
                self._cluster.stop(effect)
            case Tell():
                pass  # told to those who ask (`status`), and to the log
            case _:
                assert_never(effect)

    def _answer(self, request: str, answer: Answer) -> None:
        caller = self._callers.pop(request, None)
        if caller is not None and not caller.answer.done():
            caller.answer.set_result(answer)

    def _set_alarm(self) -> None:
        wake_ms = self.scheduler.next_wake_ms()
        if wake_ms == self._alarm_ms:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_ms = None, wake_ms
        if wake_ms is not None:
            # One millisecond over, so that the clock has surely reached it.
            self._alarm = self._loop.call_at((wake_ms + 1) / 1_000, self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_ms = None
        self.post(TimePassed())

    # ── when the scheduler breaks ────────────────────────────────────────────────────────

    def _broke(self, event: Event, error: Exception, now_ms: int) -> None:
        """The scheduler made a mistake: save how it came to that, and let its caller know."""
        self.recorder.note(now_ms, event, (), say_exception(error))
        log.error("the scheduler broke on: %s", describe(event), exc_info=error)
        self._mistake = _Mistake(event, error)
        if now_ms >= self._next_save_ms:
            self._next_save_ms = now_ms + MISTAKE_EVERY_MS
            try:
                path = save(self.recorder.recording(), self.journals, say_exception(error))
                log.error("how it came to that: rota explain --journal %s", path)
            except OSError:
                log.exception("how it came to that cannot be saved")
        if isinstance(event, Ask):
            caller = self._callers.pop(event.request, None)
            if caller is not None and not caller.answer.done():
                caller.answer.set_exception(error)
        if now_ms >= self._next_rebuild_ms:
            self._rebuild(now_ms)
        elif self._rebuilding is None:  # what this step has ordered is lost for the present one
            at_s = (self._next_rebuild_ms + 1) / 1_000
            self._rebuilding = self._loop.call_at(at_s, self._rebuild_late)

    def _rebuild_late(self) -> None:
        self._rebuilding = None
        self._rebuild(self.now_ms())
        self.post(TimePassed())

    def _rebuild(self, now_ms: int) -> None:
        """Let a new scheduler take over. Nothing that serves or waits is lost; ages begin anew."""
        self._next_rebuild_ms = now_ms + REBUILD_EVERY_MS
        broken = self.scheduler
        self.scheduler = self._new_scheduler(broken.orders.replica_count)
        self.recorder = Recorder(self.scheduler)
        known = {joined.node: joined for joined in self._cluster.joined()}
        events: list[Event] = [
            PinAsked(name, demand.is_pinned) for name, demand in broken.state.demands.items()
        ]
        lost = set(self.leases.active)
        for joined in known.values():
            running = [self._in_use(found, broken, now_ms) for found in joined.running]
            lost.difference_update(claim.lease for found in running for claim in found.leases)
            events.append(replace(joined, running=tuple(running)))
        for lease in lost:  # the broken one let go of it, or its replica is gone: say so
            self.leases.ended(lease, "its scheduler broke")
        events += [caller.ask for caller in self._callers.values()]
        if self._shutdown is not None:
            events.append(self._shutdown)
        log.warning("a new scheduler takes over, with %s", ", ".join(map(describe, known.values())))
        self._inbox.extendleft(reversed(events))

    def _in_use(self, found: Running, broken: Scheduler, now_ms: int) -> Running:
        """What a node says of a replica, and what is known here to run on it."""
        grants = tuple(q for q, replica in self._serving.items() if replica == found.replica)
        leases = tuple(
            LeaseClaim(lease.id, lease.until_ms - now_ms, lease.reason)
            for lease in broken.state.leases.values()
            if lease.replica == found.replica and lease.until_ms > now_ms
        )
        return replace(found, grants=grants, leases=leases)

    def _new_scheduler(self, replica_count: int = 0) -> Scheduler:
        return Scheduler(
            (entry.model for entry in self._config.models.values()),
            queue_bytes_max=self._config.queue_bytes_max,
            hold_ms_max=self._config.hold_ms_max,
            lease_ms_max=self._config.lease_ttl_ms_max,
            replica_count=replica_count,
            eviction=self._config.eviction,
            coexistence=self._config.coexistence,
        )


def _is_relaunched(before: ModelConfig, after: ModelConfig) -> bool:
    """Whether a model is now started in another way, so that it may come up where it did not."""
    return (before.engine, before.start_timeout_ms, before.start_timeout_ms_max) != (
        after.engine,
        after.start_timeout_ms,
        after.start_timeout_ms_max,
    )


def _level_of(event: Event) -> int:
    """What a replica does by itself, or a node, is worth a warning."""
    is_asked = isinstance(event, ReplicaStopped) and event.cause is StopCause.ASKED
    is_expected = is_asked or isinstance(event, ReplicaReady | NodeJoined)
    return logging.INFO if is_expected else logging.WARNING


def _level(effect: Effect) -> int:
    """What changes a replica or turns someone away is news; a plain grant is not."""
    if isinstance(effect, Grant) and not effect.loaded:
        return logging.DEBUG
    return logging.INFO
