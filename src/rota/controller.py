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
import itertools
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, assert_never

from rota.cluster.base import Cluster
from rota.config.values import Config
from rota.core.describe import describe
from rota.core.effects import (
    Effect,
    Grant,
    Leased,
    LeaseEnded,
    Loaded,
    Refusal,
    RefusalCode,
    Refuse,
    Start,
    Stop,
    Tell,
)
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LeaseReleased,
    LeaseRenewed,
    LoadAsked,
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
from rota.core.scheduler import Scheduler
from rota.core.state import Lease as LeaseState
from rota.core.types import LeaseClaim
from rota.core.words import not_found
from rota.engines.base import Endpoint
from rota.errors import CapacityError, ReplicaError, RequestError, RotaError
from rota.journal import Recorder, say_exception, stories
from rota.journal.file import save
from rota.store import LeaseKeeper
from rota.waiting import waiting

log = logging.getLogger("rota.controller")

UNLOAD_GRACE_MS = 10_000
"""What running requests get before an unload by hand cuts them; llama-swap waits as long."""
CLOSE_MARGIN_S = 5.0
"""Over and above every grace, what shutting down waits for replicas to be gone."""
MISTAKE_EVERY_MS = 60_000
"""A scheduler that breaks again and again saves its journal this often."""
LEASES_MAX = 3_000
"""At once: those of 1,000 jobs, 1,000 web sockets, and as many asked for. Each costs every step of
its model a look, so that who takes them and forgets would in time slow all others down."""
LEASES_RETRY_S = 30
REBUILD_EVERY_MS = 1_000
"""A state that breaks at once when it is built anew is not built anew without end."""
NEWS = (NodeJoined, NodeLost, ReplicaReady, ReplicaSilent, ReplicaStopped)
"""Facts that are logged whatever comes of them."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a refusal is said over HTTP."""

    error: type[RotaError]
    status: int
    retry: bool | None = None


# SDKs retry 409 and every 5xx unless `x-should-retry` says otherwise (wire formats, section
# 2.1 of the OpenAI SDK's rules), so what waiting cannot mend says so.
_ANSWERS = {
    RefusalCode.MODEL_NOT_FOUND: _Answer(RequestError, 404),
    RefusalCode.MODEL_OFF: _Answer(RequestError, 409, retry=False),
    RefusalCode.MODEL_FAILED: _Answer(ReplicaError, 500, retry=False),
    RefusalCode.MODEL_COOLING: _Answer(CapacityError, 503),
    RefusalCode.QUEUE_FULL: _Answer(CapacityError, 429),
    RefusalCode.MODEL_BUSY: _Answer(CapacityError, 429),
    RefusalCode.MODEL_LOADING: _Answer(CapacityError, 503),
    RefusalCode.MODEL_WAITING: _Answer(CapacityError, 503),
    RefusalCode.NO_ROOM: _Answer(CapacityError, 503, retry=False),
    RefusalCode.NO_ENDPOINT: _Answer(CapacityError, 503),
    RefusalCode.NOT_LOADED: _Answer(RequestError, 409, retry=False),
    RefusalCode.MODEL_UNLOADED: _Answer(CapacityError, 503),
    RefusalCode.SHUTTING_DOWN: _Answer(CapacityError, 503),
}

_ON_THE_WAY = (RefusalCode.MODEL_LOADING, RefusalCode.MODEL_WAITING)


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


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim that a replica is in use.

    Args:
        expires_in_s: from the time of the call; if it is not renewed.
    """

    id: str
    model: str
    replica: str
    expires_in_s: float


class Controller:
    """Owns the scheduler; the gateway asks it for grants and leases, the verbs for loads.

    Use as `async with Controller(config, cluster) as controller`; leaving it ends every
    replica, waiting for nothing. `shutdown` first to let running requests end.

    Args:
        leases: remembers them beyond this run; None = nobody does.
    """

    def __init__(self, config: Config, cluster: Cluster, leases: LeaseKeeper | None = None) -> None:
        self.config = config
        self._cluster = cluster
        self._keeper = leases
        self._scheduler = self._new_scheduler()
        self._recorder = Recorder(self._scheduler)
        self._mistake: _Mistake | None = None
        self._next_save_ms = self._next_rebuild_ms = 0
        self._shutdown: ShutdownAsked | None = None
        self._inbox: deque[Event] = deque()
        self._is_stepping = False
        self._callers: dict[str, _Caller] = {}
        self._serving: dict[str, str] = {}  # request → replica, for a scheduler that takes over
        self._leased: dict[str, str] = {}  # lease → who took it; a node that reports one cannot say
        self._lease_ends: dict[str, list[asyncio.Future[str]]] = {}
        self._departures: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms: int | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._cluster.open(self.post)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        await asyncio.shield(self._cluster.close())

    # ── for the gateway ──────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def grant(
        self,
        *,
        request: str,
        model: str,
        caller: str,
        mark: int = 0,
        body_bytes: int = 0,
        activation_wait_ms: int | None = None,
        queue_wait_ms: int | None = None,
        hold_ms: int | None = None,
        default_holds_ms: tuple[int | None, int | None] = (None, None),
        patience_ms: int | None = None,
        priority: int | None = None,
    ) -> AsyncIterator[GrantHandle]:
        """The right to one slot of one replica, for as long as the block runs.

        Entering waits for it; cancelling the wait withdraws the request.

        Args:
            request: an id for people to follow; told apart here if it is in use.
            model: the model's own name (see `Config.resolve`).
            caller, mark: who asks, and with what; see `events.RequestArrived`.

        Raises:
            RotaError: on entering, when there is no grant to be had.
        """
        event = RequestArrived(
            request=self._unused_id(request),
            model=model,
            caller=caller,
            mark=mark,
            body_bytes=body_bytes,
            activation_wait_ms=activation_wait_ms,
            queue_wait_ms=queue_wait_ms,
            hold_ms=hold_ms,
            default_holds_ms=default_holds_ms,
            patience_ms=patience_ms,
            priority=priority,
            obstacle=self._obstacle(model),
        )
        handle = await self._granted(event)
        try:
            yield handle
        except asyncio.CancelledError:
            handle.end(Outcome.CANCELLED)
            raise
        except BaseException:
            handle.end(Outcome.FAILED)
            raise
        else:
            handle.end(Outcome.OK)

    def endpoint(self, replica: str) -> Endpoint:
        """Where a replica answers, for what needs no slot.

        Raises:
            ReplicaError: it is not running (any more).
        """
        return self._cluster.endpoint(replica)

    # ── leases ───────────────────────────────────────────────────────────────────────────

    async def lease(
        self,
        *,
        model: str,
        caller: str,
        ttl_ms: int,
        reason: str = "",
        load: bool = False,
        replica: str | None = None,
        activation_wait_ms: int | None = None,
    ) -> Lease:
        """Claim that a replica is in use though no request runs on it.

        Args:
            caller: who asks; see `events.RequestArrived`.
            ttl_ms: how long it lasts unless renewed; `lease_ttl_max` bounds it.
            load: bring the model up if it is not, and wait for that as a request would.
            replica: the one it must be; None = any of the model.

        Raises:
            RotaError: it cannot be had; `not_loaded` if nothing is ready and `load` is not set;
                `queue_full` (429) if there are as many as may be. One that names its replica
                is a web socket's, which has a bound of its own.
        """
        if replica is None and len(self._scheduler.state.leases) >= LEASES_MAX:
            raise CapacityError(
                f"there are as many leases as there may be, {LEASES_MAX}; rota leases shows them",
                code="queue_full",
                status=429,
                retry_after_s=LEASES_RETRY_S,
            )
        event = LeaseAsked(
            lease=f"lease-{secrets.token_hex(8)}",
            model=model,
            caller=caller,
            ttl_ms=ttl_ms,
            reason=reason,
            load=load,
            replica=replica,
            activation_wait_ms=activation_wait_ms,
            obstacle=self._obstacle(model) if load else "",
        )
        try:
            answer = await self._ask(event)
        except asyncio.CancelledError:
            self._callers.pop(event.lease, None)
            self.post(RequestCancelled(event.lease))
            raise
        assert isinstance(answer, Leased), answer
        return self._find_lease(answer.lease)

    def renew_lease(self, lease: str, ttl_ms: int) -> Lease:
        """Let a lease last that long from now, within `lease_ttl_max` from when it was taken.

        Raises:
            RequestError: `lease_not_found`: it is over, or never was.
        """
        self._find_lease(lease)
        self._order(LeaseRenewed(lease, ttl_ms))
        found = self._find_lease(lease)
        if self._keeper is not None:
            self._keeper.renewed(lease, round(found.expires_in_s * 1_000))
        return found

    def release_lease(self, lease: str) -> None:
        """End a lease. One that is over, or never was, changes nothing."""
        self._order(LeaseReleased(lease))

    def leases(self) -> list[dict[str, object]]:
        """The leases that are not over, as plain values for JSON."""
        self.post(TimePassed())
        return [self._say_lease(lease) for lease in self._scheduler.state.leases.values()]

    def find_lease(self, lease: str) -> dict[str, object] | None:
        """One of those; None = it is over, or never was."""
        self.post(TimePassed())
        found = self._scheduler.state.leases.get(lease)
        return None if found is None else self._say_lease(found)

    def _say_lease(self, lease: LeaseState) -> dict[str, object]:
        now_ms = self._now_ms()
        return {
            "lease": lease.id,
            "model": self._scheduler.state.replicas[lease.replica].model.name,
            "replica": lease.replica,
            "caller": self._leased.get(lease.id, lease.caller),
            "reason": lease.reason,
            "age_s": (now_ms - lease.taken_ms) / 1_000,
            "expires_in_s": (lease.until_ms - now_ms) / 1_000,
        }

    def lease_end(self, lease: str) -> asyncio.Future[str]:
        """Comes true when a lease is over, with why."""
        future: asyncio.Future[str] = self._loop.create_future()
        if lease in self._scheduler.state.leases:
            self._lease_ends.setdefault(lease, []).append(future)
        else:
            future.set_result("it is over")
        return future

    def _find_lease(self, lease: str) -> Lease:
        state = self._scheduler.state
        found = state.leases.get(lease)
        if found is None:
            raise RequestError(
                f"There is no lease {lease!r}, or it is over.", code="lease_not_found", status=404
            )
        left_s = (found.until_ms - self._now_ms()) / 1_000
        return Lease(lease, state.replicas[found.replica].model.name, found.replica, left_s)

    # ── for the verbs ────────────────────────────────────────────────────────────────────

    def pin(self, model: str, *, is_pinned: bool) -> None:
        """Let no replica of a model be made to leave, whoever needs room; or let them again.

        Raises:
            RequestError: there is no such model.
        """
        if model not in self._scheduler.state.demands:
            raise self._error(model, not_found(model))
        self._order(PinAsked(model, is_pinned))

    async def load(self, model: str) -> str:
        """Bring a model up, waiting until it is ready.

        Returns: the id of a replica that is ready.
        Raises:
            RotaError: it cannot be, or did not come up. The load goes on if the wait for it
            is cancelled.
        """
        answer = await self._ask(self._load_asked(model))
        assert isinstance(answer, Loaded), answer
        return answer.replica

    def ask_load(self, model: str) -> None:
        """Bring a model up without waiting.

        Raises:
            RotaError: what is known at once (no such model, switched off).
        """
        future = self._ask(self._load_asked(model))
        if future.done():
            future.result()
        else:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def unload(
        self, model: str | None, *, grace_ms: int | None = None, wait: bool = True
    ) -> None:
        """End a model's replicas, or all of them.

        Args:
            model: None = every model.
            grace_ms: what running requests get before they are cut; default 10 s.
            wait: until the processes are gone.

        Raises:
            RequestError: there is no such model.
        """
        demands = self._scheduler.state.demands
        if model is not None and model not in demands:
            raise self._error(model, not_found(model))
        grace_ms = UNLOAD_GRACE_MS if grace_ms is None else grace_ms
        self._order(UnloadAsked(model, grace_ms))
        if wait:
            names = list(demands) if model is None else [model]
            await self._until_gone([r for name in names for r in demands[name].replicas])

    async def shutdown(self, *, grace_ms: int = UNLOAD_GRACE_MS) -> None:
        """Answer the waiting, let the running end within the grace, end every replica."""
        stop_grace_ms = max(
            (entry.model.stop_grace_ms for entry in self.config.models.values()), default=0
        )
        self._shutdown = ShutdownAsked(grace_ms)
        self._order(self._shutdown)
        bound_s = (grace_ms + stop_grace_ms) / 1_000 + CLOSE_MARGIN_S
        try:
            async with asyncio.timeout(bound_s):
                await self._until_gone(list(self._scheduler.state.replicas))
        except TimeoutError:
            log.warning("replicas are still there %.0f s after shutdown was asked", bound_s)

    def status(self) -> dict[str, object]:
        """The state of every model, replica and device as of now, as plain values for JSON."""
        self.post(TimePassed())  # nothing may have happened for hours
        status = self._scheduler.snapshot()
        for model in status["models"]:  # type: ignore[attr-defined]
            model["aliases"] = list(self.config.models[model["name"]].aliases)
            for replica in model["replicas"]:
                facts = self._cluster.facts(replica["id"])
                replica["pid"] = facts.pid if facts else None
                replica["port"] = facts.port if facts else None
                replica["command"] = list(facts.command) if facts else None
        return status

    def queue(self) -> dict[str, object]:
        """Who waits, at which place, for what, and how long still, as plain values for JSON."""
        self.post(TimePassed())
        return {"queue": waiting(self._scheduler.state)}

    async def explain(self, request: str) -> dict[str, object]:
        """The story of every request of this id, as far as the journal goes back; not read in
        the loop's own thread.

        Args:
            request: the id that the client was told, or its own.

        Raises:
            RequestError: there is none in the journal.
        """
        steps = self._recorder.recording().steps
        found = await asyncio.to_thread(stories, steps, request)
        now_ms = self._now_ms()
        if not found:
            back_s = (now_ms - steps[0].now_ms) / 1_000 if steps else 0.0
            raise RequestError(
                f"There is no request {request!r} in the journal, which goes back {back_s:.0f} s "
                f"({len(steps)} steps).",
                code="request_not_found",
                status=404,
            )
        return {
            "requests": [
                story.as_plain() | {"arrived_s_ago": (now_ms - story.arrived_ms) / 1_000}
                for story in found
            ]
        }

    async def save_journal(self) -> Path:
        """Write the journal into the state directory, not in the loop's own thread.

        Raises:
            RotaError: it cannot be written.
        """
        recording = self._recorder.recording()
        try:
            return await asyncio.to_thread(save, recording, self._journals(), "asked for")
        except OSError as error:
            raise RotaError(
                f"the journal cannot be written to {self._journals()}: {error.strerror}",
                code="state_unusable",
            ) from error

    def _journals(self) -> Path:
        return self.config.state_dir / "journals"

    # ── the loop ─────────────────────────────────────────────────────────────────────────

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

    def _step(self, event: Event) -> None:
        now_ms = self._now_ms()
        is_news = not isinstance(event, TimePassed) or self._is_due(now_ms)
        effects: list[Effect] = []
        if isinstance(event, GrantEnded | RequestCancelled):
            self._serving.pop(event.request, None)
        try:
            effects = self._scheduler.step(event, now_ms)
        except Exception as error:  # noqa: BLE001 - said and saved; every other request goes on
            self._broke(event, error, now_ms)
        else:
            if is_news or effects:
                self._recorder.note(now_ms, event, effects)
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
        wake_ms = self._scheduler.next_wake_ms()
        return wake_ms is not None and wake_ms <= now_ms

    def _broke(self, event: Event, error: Exception, now_ms: int) -> None:
        """The scheduler made a mistake: save how it came to that, and let its caller know."""
        self._recorder.note(now_ms, event, (), say_exception(error))
        log.error("the scheduler broke on: %s", describe(event), exc_info=error)
        self._mistake = _Mistake(event, error)
        if now_ms >= self._next_save_ms:
            self._next_save_ms = now_ms + MISTAKE_EVERY_MS
            try:
                path = save(self._recorder.recording(), self._journals(), say_exception(error))
                log.error("how it came to that: rota explain --journal %s", path)
            except OSError:
                log.exception("how it came to that cannot be saved")
        if isinstance(event, Ask):
            caller = self._callers.pop(event.request, None)
            if caller is not None and not caller.answer.done():
                caller.answer.set_exception(error)
        if now_ms >= self._next_rebuild_ms:
            self._next_rebuild_ms = now_ms + REBUILD_EVERY_MS
            self._rebuild(now_ms)

    def _rebuild(self, now_ms: int) -> None:
        """Let a new scheduler take over. Nothing that serves or waits is lost; ages begin anew."""
        broken = self._scheduler
        self._scheduler = self._new_scheduler(broken.orders.replica_count)
        self._recorder = Recorder(self._scheduler)
        known = {joined.node: joined for joined in self._cluster.joined()}
        events: list[Event] = [
            PinAsked(name, demand.is_pinned) for name, demand in broken.state.demands.items()
        ]
        lost = set(self._leased)
        for joined in known.values():
            running = [self._in_use(found, broken, now_ms) for found in joined.running]
            lost.difference_update(claim.lease for found in running for claim in found.leases)
            events.append(replace(joined, running=tuple(running)))
        for lease in lost:  # the broken one let go of it, or its replica is gone: say so
            self._lease_ended(lease, "its scheduler broke")
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
            (entry.model for entry in self.config.models.values()),
            queue_bytes_max=self.config.queue_bytes_max,
            hold_ms_max=self.config.hold_ms_max,
            lease_ms_max=self.config.lease_ttl_ms_max,
            replica_count=replica_count,
        )

    def _order(self, event: Event) -> None:
        """Post what someone waits for by other means than an answer.

        Raises:
            Exception: what the scheduler raised, if it broke on it.
        """
        self.post(event)
        if self._mistake is not None and self._mistake.event is event:
            raise self._mistake.error

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Grant():
                self._serving[effect.request] = effect.replica
                self._answer(effect.request, effect)
            case Loaded():
                self._answer(effect.request, effect)
            case Leased():
                self._keep(effect)
                self._answer(effect.lease, effect)
            case LeaseEnded():
                self._lease_ended(effect.lease, effect.why)
            case Refuse():
                caller = self._callers.pop(effect.request, None)
                if caller is not None and not caller.answer.done():
                    caller.answer.set_exception(self._error(caller.model, effect.refusal))
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

    def _keep(self, leased: Leased) -> None:
        lease = self._scheduler.state.leases.get(leased.lease)
        # Over already, in the same step; or a scheduler that takes over has been told of it.
        if lease is None or lease.id in self._leased:
            return
        self._leased[lease.id] = lease.caller
        if self._keeper is None:
            return
        ttl_ms = lease.until_ms - lease.taken_ms
        self._keeper.taken(
            lease.id, leased.model, lease.replica, lease.caller, lease.reason, ttl_ms
        )

    def _lease_ended(self, lease: str, why: str) -> None:
        self._leased.pop(lease, None)
        if self._keeper is not None:
            self._keeper.ended(lease, why)
        for future in self._lease_ends.pop(lease, ()):
            if not future.done():
                future.set_result(why)

    def _ask(self, event: Ask) -> asyncio.Future[Answer]:
        caller = _Caller(event, self._loop.create_future())
        self._callers[event.request] = caller
        self.post(event)
        return caller.answer

    async def _granted(self, event: RequestArrived) -> GrantHandle:
        try:
            grant = await self._ask(event)
        except asyncio.CancelledError:
            self._callers.pop(event.request, None)
            self.post(RequestCancelled(event.request))
            raise
        assert isinstance(grant, Grant), grant
        try:
            endpoint = self._cluster.endpoint(grant.replica)
        except ReplicaError:  # it ended, and that has not been heard of yet
            self.post(GrantEnded(event.request, Outcome.UNREACHABLE))
            raise
        return GrantHandle(self.post, self._cluster.heard, event.model, grant, endpoint)

    def _load_asked(self, model: str) -> LoadAsked:
        return LoadAsked(self._unused_id("load"), model, self._obstacle(model))

    def _obstacle(self, model: str) -> str:
        """What is known to be in the way of a load, where there would have to be one."""
        demand = self._scheduler.state.demands.get(model)
        return "" if demand is None or demand.is_up else self._cluster.obstacle(model)

    def _unused_id(self, wanted: str) -> str:
        """`wanted`, or something that begins with it, which no request here has."""
        found, state = wanted, self._scheduler.state
        while found in self._callers or found in state.granted or found in state.leases:
            found = f"{wanted}~{next(self._numbers)}"
        return found

    def _error(self, model: str, refusal: Refusal) -> RotaError:
        """A refusal as what a caller sees."""
        answer = _ANSWERS[refusal.code]
        return answer.error(
            refusal.message,
            code=refusal.code.value,
            status=answer.status,
            retry=answer.retry,
            retry_after_s=_whole_seconds(refusal.retry_after_ms),
            loading=self._loading(model, refusal) if refusal.code in _ON_THE_WAY else None,
        )

    def _loading(self, model: str, refusal: Refusal) -> dict[str, object]:
        load_ms = self._scheduler.state.demands[model].load_ms
        is_loading = refusal.code is RefusalCode.MODEL_LOADING
        progress = None
        if is_loading and load_ms and refusal.eta_ms is not None:
            progress = round(min(max(1 - refusal.eta_ms / load_ms, 0.0), 0.99), 2)
        return {
            "model": model,
            "state": "loading" if is_loading else "waiting",
            "progress": progress,
            "eta_seconds": _whole_seconds(refusal.eta_ms),
            "position": refusal.position,
        }

    def _set_alarm(self) -> None:
        wake_ms = self._scheduler.next_wake_ms()
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

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1_000)

    async def _until_gone(self, replicas: list[str]) -> None:
        for replica in replicas:
            if replica in self._scheduler.state.replicas:
                departure = self._departures.setdefault(replica, self._loop.create_future())
                await asyncio.shield(departure)


class GrantHandle:
    """A request's right to a slot, until `end`.

    Attributes:
        replica: the id of the replica that serves it.
        endpoint: where that replica answers.
        waited_ms: how long the request waited for it.
        loaded: whether it met a load or a wait for room.
        why: what it waited for, in words.
    """

    __slots__ = (
        "_heard",
        "_is_over",
        "_post",
        "_request",
        "endpoint",
        "loaded",
        "model",
        "replica",
        "waited_ms",
        "why",
    )

    def __init__(
        self,
        post: Callable[[Event], None],
        heard: Callable[[str], None],
        model: str,
        grant: Grant,
        endpoint: Endpoint,
    ) -> None:
        self._post = post
        self._heard = heard
        self._request = grant.request
        self._is_over = False
        self.model = model
        self.replica = grant.replica
        self.endpoint = endpoint
        self.waited_ms = grant.waited_ms
        self.loaded = grant.loaded
        self.why = grant.why

    def heard(self) -> None:
        """Bytes came from the engine: it is not silent, whatever its probes say."""
        self._heard(self.replica)

    def end(
        self, outcome: Outcome, *, is_tool_call: bool = False, lease: LeaseClaim | None = None
    ) -> None:
        """Give the slot back. Only the first call counts.

        Args:
            lease: what goes on behind the answer; it takes the place of the grant without an
                instant between them.
        """
        if not self._is_over:
            self._is_over = True
            self._post(GrantEnded(self._request, outcome, is_tool_call, lease))


def _whole_seconds(ms: int | None) -> int | None:
    return None if ms is None else -(-ms // 1_000)


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
