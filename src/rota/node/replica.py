"""The life of one replica, as a story: `Replica.live` from start to nothing left.

It is told to end through a future (`ask`), never by cancelling it, so no await of an ending
can be cut short. Every failure of the outside becomes a `ReplicaStopped` with a cause and a
sentence; nothing here raises into the node.

Refused: a state machine with callbacks (the story would be in no one place), and
asyncio.subprocess (what it starts outlives a kill -9 of rota).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rota.config.values import CommandEngine, EngineConfig, LlamaCppEngine, ModelConfig, UrlEngine
from rota.core.effects import Start
from rota.core.events import ReplicaStopped, StopCause
from rota.core.types import Phase
from rota.engines.base import Endpoint, Launch
from rota.engines.launch import Spawned, endpoint_of, launch_for
from rota.engines.probe import Answer, probe
from rota.node import ports, processes
from rota.node.guards import Child, Guards
from rota.node.records import Records
from rota.node.silence import Listener

TRIES = 3  # starts in all, when one fails through no fault of the engine's
PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S_MIN, PROBE_EVERY_S_MAX = 0.005, 0.250
PROBE_SHARE = 0.02  # of the time waited so far: what noticing may add to a load
URL_TIMEOUT_S = 2.0
GUARD_WAIT_S = 15.0  # beyond the grace: a guard gives up on a stuck process after 10 s
DETAIL_LINES = 8

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Replica:
    """One start of a model, until it is gone.

    Args:
        order: what it was started by.
        visible: what CUDA calls the devices it is placed on.
        log_path: where its output goes; no other live replica's.
        taken: the ports of all live replicas.
        on_ready: called once, when it answers.
        on_silent: called once, with a sentence, when it was ready and answers no more.

    Attributes:
        phase: STARTING, READY or STOPPING.
        endpoint: where it answers; None unless it is ready.
        child: its latest process; None until there is one, and for a URL.
        port: the one that process was told to bind.
        started_at: seconds since the epoch.
    """

    def __init__(
        self,
        order: Start,
        config: ModelConfig,
        *,
        visible: tuple[str, ...],
        log_path: Path,
        guards: Guards,
        records: Records,
        taken: Callable[[], set[int | None]],
        on_ready: Callable[[], None],
        on_silent: Callable[[str], None],
    ) -> None:
        self.id = order.replica
        self.order = order
        self.config = config
        self.phase = Phase.STARTING
        self.log_path = log_path
        self.started_at = time.time()
        self.endpoint: Endpoint | None = None
        self.child: Child | None = None
        self.port: int | None = None
        self._visible = visible
        self._guards = guards
        self._records = records
        self._taken = taken
        self._on_ready = on_ready
        self._on_silent = on_silent
        self._listener: Listener | None = None  # None: not ready yet, or never asked
        self._asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._met = Answer(connected=False)  # what the latest probe met

    def ask(self, grace_ms: int) -> None:
        """To end. Asked again, it can only become sooner."""
        if not self._asked.done():
            self.phase = Phase.STOPPING
            self._asked.set_result(grace_ms)
        elif self.child is not None:
            self.child.stop(grace_ms)

    def point_at(self, engine: EngineConfig) -> None:
        """Where someone else's server is from now on; for any other engine nothing. Not probed:
        if nobody is there, the next request tells."""
        if isinstance(engine, UrlEngine) and isinstance(self.config.engine, UrlEngine):
            self.config = replace(self.config, engine=engine)
            if self.endpoint is not None:
                self.endpoint = endpoint_of(engine)

    def heard(self) -> None:
        """Bytes of an answer came from it."""
        if self._listener is not None:
            self._listener.heard()

    async def live(self) -> ReplicaStopped:
        """The whole life. Returns when nothing of it is left, with why it is over."""
        try:
            stopped = await self._story()
        except Exception as error:  # noqa: BLE001 - a Start without its end would wait for ever
            _log.exception("replica %s: a fault of rota's own", self.id)
            stopped = await self._finish(StopCause.REFUSED, f"rota failed to run it: {error}")
        self._records.remove(self.id)
        return stopped

    async def _story(self) -> ReplicaStopped:
        """1. It comes up, unless it 2. cannot, or 3. takes too long. 4. It is ready until it
        5. is told to end, which may have been before, or 6. ends by itself."""
        overdue = asyncio.create_task(self._overdue())
        try:
            endpoint = await _unless([self._asked, overdue], self._bring_up())  # 1
        except _CannotStart as why:  # 2
            return await self._finish(why.cause, str(why), permanent=why.permanent)
        finally:
            overdue.cancel()
        if endpoint is not None:
            self.endpoint = endpoint
            self.phase = Phase.READY
            self._on_ready()  # 4
            await self._serve(endpoint)
            self.endpoint = None
        if self._asked.done():  # 5
            return await self._finish(StopCause.ASKED, grace_ms=self._asked.result())
        if endpoint is None:  # 3
            detail = f"{overdue.result()}: {self._how_it_answered()}{self._last_lines()}"
            return await self._finish(StopCause.NEVER_READY, detail)
        assert self.child is not None
        how = self.child.exited.result()  # 6
        return await self._finish(StopCause.CRASHED, f"{how}{self._last_lines()}")

    async def _overdue(self) -> str:
        """Wait until its start has taken too long; returns by which bound, in words.

        What an engine writes is the sign that it is at work (a download, a long load), so each
        output gives it the whole time-out again, up to a bound that nothing extends.
        """
        timeout_s = self.config.start_timeout_ms / 1000
        timeout_s_max = self.config.start_timeout_ms_max / 1000
        begun = time.monotonic()
        while True:
            wrote_at = self.child.wrote_at if self.child else begun
            due = min(max(begun, wrote_at) + timeout_s, begun + timeout_s_max)
            if (left_s := due - time.monotonic()) <= 0:
                break
            await asyncio.sleep(left_s)
        if due < begun + timeout_s_max:
            return f"was not ready after {timeout_s:g} s without output (`start_timeout`)"
        return f"was not ready after {timeout_s_max:g} s in all (`start_timeout_max`)"

    async def _serve(self, endpoint: Endpoint) -> None:
        """Until it is told to end, or ends by itself. Falling silent is told, and not its end:
        that is for others to order."""
        ends: list[asyncio.Future[Any]] = [self._asked]
        ends += [self.child.exited] if self.child else []
        await _unless(ends, self._listen(endpoint))
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    async def _listen(self, endpoint: Endpoint) -> None:
        path = self.child.launch.ready if self.child else None
        silent_after_s = self.config.silent_after_ms / 1000
        if path is None or not silent_after_s:
            return
        self._listener = Listener(endpoint, path, silent_after_s=silent_after_s)
        self._met = await self._listener.silence()
        detail = f"has answered nothing for {silent_after_s:g} s: {self._how_it_answered()}"
        self._on_silent(f"{self.config.name} {detail}{self._last_lines()}")

    async def _bring_up(self) -> Endpoint:
        while isinstance(engine := self.config.engine, UrlEngine):
            endpoint = await _reach(engine)
            if engine == self.config.engine:  # else it was pointed elsewhere meanwhile
                return endpoint
        reasons = []
        for _ in range(TRIES):
            try:
                return await self._try(engine)
            except _NotItsFault as why:
                reasons.append(str(why))
                await self._end(self._failed_grace_ms())
        raise _CannotStart(StopCause.REFUSED, "could not be started: " + "; ".join(reasons))

    async def _try(self, engine: Spawned) -> Endpoint:
        """One start on one port. Raises _CannotStart; or _NotItsFault: try again."""
        fixed = engine.port if isinstance(engine, CommandEngine) else None
        port = self.port = self._free_port() if fixed is None else _fixed_port(fixed)
        launch = launch_for(
            engine,
            model=self.config.name,
            port=port,
            visible=self._visible,
            environ=os.environ,
        )
        child = await self._spawn(launch)
        endpoint = Endpoint("127.0.0.1", port)
        try:
            await _unless([child.exited], self._answered(child, endpoint))
        except _NotItsFault as why:
            if fixed is None:
                raise
            raise _CannotStart(StopCause.REFUSED, f"could not be started: {why}") from None
        if not child.exited.done():
            return endpoint
        await self._end(0)
        if fixed is None and not ports.is_free(port):
            raise _NotItsFault(f"port {port} was taken by another process")
        how = child.exited.result()
        detail = f"{how} while it was starting{self._last_lines()}"
        raise _CannotStart(StopCause.CRASHED, detail)

    def _free_port(self) -> int:
        while (port := ports.free_port()) in self._taken():
            pass
        return port

    async def _spawn(self, launch: Launch) -> Child:
        _require(launch.files)
        env = {**launch.env, processes.MARK: self._records.mark(self.id)}
        child = self.child = Child(replace(launch, env=env), self.log_path)
        await self._guards.guard(child)
        await asyncio.wait([child.started])
        if failure := child.started.result():
            if failure.guard_lost:
                raise _NotItsFault(failure.error)
            detail = f"could not be started: {failure.error}"
            raise _CannotStart(StopCause.REFUSED, detail, permanent=failure.permanent)
        assert child.pid is not None
        self._records.add(self.id, child.pid)
        return child

    async def _answered(self, child: Child, endpoint: Endpoint) -> None:
        """Return as soon as it answers, and the answer is its own and nobody else's."""
        assert child.guard_pid is not None
        if child.launch.ready is None:
            return
        clock = asyncio.get_running_loop().time
        begun = clock()
        first = True
        while True:
            self._met = await probe(
                endpoint,
                child.launch.ready,
                timeout_s=PROBE_TIMEOUT_S,
                on_connect=self._note_connection,
            )
            if self._met.connected and (first or self._met.status == 200):
                first = False
                foreign = await asyncio.to_thread(
                    ports.foreign_holder, endpoint.port, child.guard_pid
                )
                if foreign:
                    raise _NotItsFault(f"port {endpoint.port} is held by {foreign}")
            if self._met.status == 200:
                return
            delay_s = PROBE_SHARE * (clock() - begun)
            await asyncio.sleep(min(max(delay_s, PROBE_EVERY_S_MIN), PROBE_EVERY_S_MAX))

    def _note_connection(self) -> None:
        if not self._met.connected:  # what it answered before says more than being connected
            self._met = Answer(connected=True)

    def _failed_grace_ms(self) -> int:
        """For a start that came to nothing: no time, save for a command to do its work, without
        which a container, say, would stay."""
        has_command = self.child is not None and bool(self.child.launch.stop_argv)
        return self.config.model.stop_grace_ms if has_command else 0

    async def _end(self, grace_ms: int) -> None:
        """End its process, if it has one, and return when nothing of it is left."""
        if (child := self.child) is None:
            return
        child.stop(grace_ms)
        await asyncio.wait([child.gone], timeout=grace_ms / 1000 + GUARD_WAIT_S)
        if not child.gone.done():
            _log.error("replica %s: its guard is stuck", self.id)
            child.abandon()
            await asyncio.wait([child.gone])
        gone = child.gone.result()
        if gone.stop_failed:
            said = f"the command to end it (`cmd_stop`) {gone.stop_failed}"
            _log.warning("replica %s: %s; SIGTERM was sent", self.id, said)
        if gone.forced and grace_ms:
            _log.warning("replica %s did not end in %g s: killed", self.id, grace_ms / 1000)
        if not gone.seen or gone.left:
            mark = self._records.mark(self.id)
            left = await asyncio.to_thread(processes.end_all, lambda: processes.marked(mark))
            if left:
                _log.error("replica %s: even SIGKILL does not end %s", self.id, sorted(left))

    async def _finish(
        self,
        cause: StopCause,
        detail: str = "",
        *,
        grace_ms: int | None = None,
        permanent: bool = False,
    ) -> ReplicaStopped:
        """The end of the story. `detail` goes on from the model's name."""
        self.phase = Phase.STOPPING
        await self._end(self._failed_grace_ms() if grace_ms is None else grace_ms)
        detail = f"{self.config.name} {detail}" if detail else ""
        return ReplicaStopped(self.id, cause, detail, permanent)

    def _how_it_answered(self) -> str:
        path = self.child.launch.ready if self.child else ""
        match self._met:
            case Answer(connected=False):
                return f"nothing listens on port {self.port}"
            case Answer(status=None):
                return f"it accepts connections but does not answer {path}"
            case Answer(status=status):
                return f"{path} answers {status}"

    def _last_lines(self) -> str:
        if self.child is None:
            return ""
        ended = self.child.exited.done()
        tail = self.child.exited.result().tail if ended else self.child.tail(2 * DETAIL_LINES)
        lines = [line for line in tail if line]
        return "\n".join([". Its last lines:", *lines[-DETAIL_LINES:]]) if lines else ""


class _CannotStart(Exception):
    """A start has come to nothing; the text goes on from the model's name."""

    def __init__(self, cause: StopCause, detail: str, *, permanent: bool = False) -> None:
        super().__init__(detail)
        self.cause = cause
        self.permanent = permanent


class _NotItsFault(Exception):
    """A try came to nothing for a reason that another try may not meet: a port, a guard."""


async def _unless(
    ends: Sequence[asyncio.Future[Any]], work: Coroutine[Any, Any, _Result]
) -> _Result | None:
    """What `work` returns or raises; None if an end came first, for then it is called off."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        _ = task.cancelled() or task.exception()  # seen: asyncio is not to complain of it
    return None if any(end.done() for end in ends) else task.result()


def obstacle(config: ModelConfig) -> str:
    """What would make any start of this model fail, in words; empty = nothing known.

    A look at files, so that nobody is evicted for a load that cannot begin.
    """
    match config.engine:
        case LlamaCppEngine(model=file):
            pass
        case CommandEngine(argv=(program, *_)) if program.startswith("/") and "$" not in program:
            file = Path(program)
        case _:
            return ""
    problem = _problem_with(file)
    return f"{config.name} could not be started: {problem}" if problem else ""


async def _reach(engine: UrlEngine) -> Endpoint:
    """Ask a server that someone else runs, once. Raises _CannotStart, never for good."""
    at = endpoint_of(engine)
    where = f"{at.scheme}://{at.host}:{at.port}{at.base_path}"  # not the URL: it may hold a key
    answer = await probe(at, engine.ready, timeout_s=URL_TIMEOUT_S)
    if not answer.connected:
        raise _CannotStart(StopCause.REFUSED, f"does not answer at {where}")
    if engine.ready is not None and answer.status != 200:
        said = f"answers {answer.status}" if answer.status else "does not answer"
        raise _CannotStart(StopCause.REFUSED, f"is not ready: {where}{engine.ready} {said}")
    return at


def _require(files: Iterable[Path]) -> None:
    for file in files:
        if problem := _problem_with(file):
            detail = f"could not be started: {problem}"
            raise _CannotStart(StopCause.REFUSED, detail, permanent=True)


def _problem_with(file: Path) -> str:
    if os.access(file, os.R_OK) or os.access(file, os.X_OK):
        return ""
    return f"{'may not be read' if os.path.lexists(file) else 'no such file'}: {file}"


def _fixed_port(port: int) -> int:
    if ports.is_free(port):
        return port
    who = ports.holder_of(port) or "another process"
    raise _CannotStart(StopCause.REFUSED, f"could not be started: port {port} is held by {who}")
