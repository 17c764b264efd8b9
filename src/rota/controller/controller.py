"""What the gateway and the verbs ask: grants and leases, loads and unloads, and how things stand.

Decisions are the scheduler's; `loop` has it step and carries its orders out. Here a question
becomes a fact, and the answer a value or an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from rota.cluster.base import Cluster
from rota.config.values import Config
from rota.controller.answers import error_of
from rota.controller.handles import GrantHandle, Lease
from rota.controller.leases import LEASES_MAX, LEASES_RETRY_S, Leases
from rota.controller.loop import Answer, Ask, Loop
from rota.core.effects import Grant, Leased, Loaded
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LeaseReleased,
    LeaseRenewed,
    LoadAsked,
    Outcome,
    PinAsked,
    RequestArrived,
    ShutdownAsked,
    TimePassed,
    UnloadAsked,
)
from rota.core.words import not_found
from rota.engines.base import Endpoint
from rota.errors import CapacityError, ReplicaError, RequestError, RotaError
from rota.journal import rehearse, stories
from rota.journal.file import save
from rota.journal.graph import freeze
from rota.store import LeaseKeeper
from rota.waiting import waiting

log = logging.getLogger("rota.controller")

UNLOAD_GRACE_MS = 10_000
"""What running requests get before an unload by hand cuts them; llama-swap waits as long."""
CLOSE_MARGIN_S = 5.0
"""Over and above every grace, what shutting down waits for replicas to be gone."""


class Controller:
    """Owns the loop; the gateway asks it for grants and leases, the verbs for loads.

    Use as `async with Controller(config, cluster) as controller`; leaving it ends every
    replica, waiting for nothing. `shutdown` first to let running requests end.

    Args:
        leases: remembers them beyond this run; None = nobody does.
    """

    def __init__(self, config: Config, cluster: Cluster, leases: LeaseKeeper | None = None) -> None:
        self.config = config
        self._cluster = cluster
        self._leases = Leases(leases)
        self._loop = Loop(config, cluster, self._leases)
        self._loads: dict[str, asyncio.Future[Answer]] = {}  # model → the last asked for by hand
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        self._loop.open()
        await self._cluster.open(self.post)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._loop.close()
        await asyncio.shield(self._cluster.close())

    def post(self, event: Event) -> None:
        """Take a fact in. To be called in the event loop."""
        self._loop.post(event)

    def reload(self, config: Config) -> None:
        """Go on with another configuration; what it keeps goes on as if nothing had happened.

        Grants, queues and running replicas of models that stay are not touched. How models are
        launched counts from the next start on. A model that is gone takes nothing new; its
        replicas end what they run, then stop. Address, state directory and devices are those
        rota was started with.

        Args:
            config: checked; with the present address, state directory and devices.

        Raises:
            Exception: what the scheduler raised, if it broke on it. The configuration is in
                force all the same: the scheduler that takes over begins with it.
        """
        self.config = config
        self._cluster.configure(config)
        self._loop.reload(config)

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
        if replica is None and len(self._loop.state.leases) >= LEASES_MAX:
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
        answer = await self._answer(event)
        assert isinstance(answer, Leased), answer
        # Not looked up: it may be over by now, as a short one is; it was had all the same.
        left_s = max(answer.until_ms - self._loop.now_ms(), 0) / 1_000
        return Lease(answer.lease, answer.model, answer.replica, left_s)

    def renew_lease(self, lease: str, ttl_ms: int) -> Lease:
        """Let a lease last that long from now, within `lease_ttl_max` from when it was taken.

        Raises:
            RequestError: `lease_not_found`: it is over, or never was.
        """
        self._found(lease)
        self._loop.order(LeaseRenewed(lease, ttl_ms))
        found = self._found(lease)
        self._leases.renewed(lease, round(found.expires_in_s * 1_000))
        return found

    def release_lease(self, lease: str) -> None:
        """End a lease. One that is over, or never was, changes nothing."""
        self._loop.order(LeaseReleased(lease))

    def leases(self) -> list[dict[str, object]]:
        """The leases that are not over, as plain values for JSON."""
        self.post(TimePassed())
        state, now_ms = self._loop.state, self._loop.now_ms()
        return [self._leases.say(state, lease, now_ms) for lease in state.leases.values()]

    def find_lease(self, lease: str) -> dict[str, object] | None:
        """One of those; None = it is over, or never was."""
        self.post(TimePassed())
        state = self._loop.state
        found = state.leases.get(lease)
        return None if found is None else self._leases.say(state, found, self._loop.now_ms())

    def lease_end(self, lease: str) -> asyncio.Future[str]:
        """Comes true when a lease is over, with why."""
        return self._leases.end_of(lease)

    def _found(self, lease: str) -> Lease:
        state = self._loop.state
        found = self._leases.find(state, lease)
        left_s = (found.until_ms - self._loop.now_ms()) / 1_000
        return Lease(lease, state.replicas[found.replica].model.name, found.replica, left_s)

    # ── for the verbs ────────────────────────────────────────────────────────────────────

    def pin(self, model: str, *, is_pinned: bool) -> None:
        """Let no replica of a model be made to leave, whoever needs room; or let them again.

        Raises:
            RequestError: there is no such model.
        """
        if model not in self._loop.state.demands:
            raise error_of(self._loop.state, model, not_found(model))
        self._loop.order(PinAsked(model, is_pinned))

    async def load(self, model: str) -> str:
        """Bring a model up, waiting until it is ready.

        Returns: the id of a replica that is ready.
        Raises:
            RotaError: it cannot be, or did not come up. The load goes on if the wait for it
            is cancelled.
        """
        answer = await asyncio.shield(self._loading_of(model))
        assert isinstance(answer, Loaded), answer
        return answer.replica

    def ask_load(self, model: str) -> None:
        """Bring a model up without waiting.

        Raises:
            RotaError: what is known at once (no such model, switched off).
        """
        future = self._loading_of(model)
        if future.done():
            future.result()

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
        demands = self._loop.state.demands
        if model is not None and model not in demands:
            raise error_of(self._loop.state, model, not_found(model))
        grace_ms = UNLOAD_GRACE_MS if grace_ms is None else grace_ms
        self._loop.order(UnloadAsked(model, grace_ms))
        if wait:
            names = list(demands) if model is None else [model]
            await self._loop.until_gone([r for name in names for r in demands[name].replicas])

    async def shutdown(self, *, grace_ms: int = UNLOAD_GRACE_MS) -> None:
        """Answer the waiting, let the running end within the grace, end every replica."""
        replicas = self._loop.state.replicas.values()
        stop_grace_ms = max((replica.model.stop_grace_ms for replica in replicas), default=0)
        self._loop.order(ShutdownAsked(grace_ms))
        bound_s = (grace_ms + stop_grace_ms) / 1_000 + CLOSE_MARGIN_S
        try:
            async with asyncio.timeout(bound_s):
                await self._loop.until_gone(list(self._loop.state.replicas))
        except TimeoutError:
            log.warning("replicas are still there %.0f s after shutdown was asked", bound_s)

    def status(self) -> dict[str, object]:
        """The state of every model, replica and device as of now, as plain values for JSON."""
        self.post(TimePassed())  # nothing may have happened for hours
        status = self._loop.scheduler.snapshot()
        for model in status["models"]:  # type: ignore[attr-defined]
            entry = self.config.models.get(model["name"])  # None: it is being taken out
            model["aliases"] = list(entry.aliases) if entry else []
            for replica in model["replicas"]:
                facts = self._cluster.facts(replica["id"])
                replica["pid"] = facts.pid if facts else None
                replica["port"] = facts.port if facts else None
                replica["command"] = list(facts.command) if facts else None
                replica["outdated"] = facts.is_outdated if facts else False
        return status

    def queue(self) -> dict[str, object]:
        """Who waits, at which place, for what, and how long still, as plain values for JSON."""
        self.post(TimePassed())
        return {"queue": waiting(self._loop.state)}

    async def plan(self, model: str) -> dict[str, object]:
        """What a request for a model would meet now, and who would have to leave for it; nothing
        changes by asking. Not worked out in the loop's own thread.

        Raises:
            RequestError: there is no such model.
        """
        if model not in self._loop.state.demands:
            raise error_of(self._loop.state, model, not_found(model))
        self.post(TimePassed())
        request = self._unused_id("plan")
        asked = RequestArrived(request, model, caller=request, obstacle=self._obstacle(model))
        rows, now_ms = freeze(self._loop.scheduler), self._loop.now_ms()
        return (await asyncio.to_thread(rehearse, rows, asked, now_ms)).as_plain()

    async def explain(self, request: str) -> dict[str, object]:
        """The story of every request of this id, as far as the journal goes back; not read in
        the loop's own thread.

        Args:
            request: the id that the client was told, or its own.

        Raises:
            RequestError: there is none in the journal.
        """
        steps = self._loop.recorder.recording().steps
        found = await asyncio.to_thread(stories, steps, request)
        now_ms = self._loop.now_ms()
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
        recording = self._loop.recorder.recording()
        try:
            return await asyncio.to_thread(save, recording, self._loop.journals, "asked for")
        except OSError as error:
            raise RotaError(
                f"the journal cannot be written to {self._loop.journals}: {error.strerror}",
                code="state_unusable",
            ) from error

    # ── asking ───────────────────────────────────────────────────────────────────────────

    async def _answer(self, ask: Ask) -> Answer:
        """Ask, and wait; whoever leaves withdraws it."""
        try:
            return await self._loop.ask(ask)
        except asyncio.CancelledError:
            self._loop.withdraw(ask.request)
            raise

    async def _granted(self, event: RequestArrived) -> GrantHandle:
        grant = await self._answer(event)
        assert isinstance(grant, Grant), grant
        try:
            endpoint = self._cluster.endpoint(grant.replica)
        except ReplicaError:  # it ended, and that has not been heard of yet
            self.post(GrantEnded(event.request, Outcome.UNREACHABLE))
            raise
        return GrantHandle(self.post, self._cluster.heard, event.model, grant, endpoint)

    def _loading_of(self, model: str) -> asyncio.Future[Answer]:
        """A load asked for by hand. Whoever asks while one waits joins it: nobody could tell two
        apart, and a script that asks again and again would fill the queue."""
        future = self._loads.get(model)
        if future is None or future.done():
            asked = LoadAsked(self._unused_id("load"), model, self._obstacle(model))
            future = self._loads[model] = self._loop.ask(asked)
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _obstacle(self, model: str) -> str:
        """What is known to be in the way of a load, where there would have to be one."""
        demand = self._loop.state.demands.get(model)
        return "" if demand is None or demand.is_up else self._cluster.obstacle(model)

    def _unused_id(self, wanted: str) -> str:
        """`wanted`, or something that begins with it, which no request here has."""
        found = wanted
        while self._loop.is_in_use(found):
            found = f"{wanted}~{next(self._numbers)}"
        return found
