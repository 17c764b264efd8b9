"""Jobs: a POST answered at once with an id, work that goes on for minutes, and polls in between.

The slot such a POST got is given back with its answer, so nothing would say that the replica
works (quartermaster and llama-swap stopped renders half-way). Therefore the answer is looked
into, and where it names a job the grant ends as a lease on the same replica: there is no
instant in which the model counts as idle. Asking after a job is not use. It needs no slot,
waits for nobody and loads nothing: it goes to the replica that has the job, or nowhere.

rota asks too, since a client may never do so, and judges by what it hears:

- a status that the model's `done` lists ends the job, whoever asked;
- so does a 404 or 410: the engine no longer knows it;
- a 5xx, or no connection, only when rota hears it `MISSES_MAX` times in a row. One is what a
  busy proxy or a full queue in front of an engine says now and then, and a client that asks
  ten times a second would have heard three of them in no time;
  An answer that is not JSON, or longer than `COPY_BYTES_MAX`, counts as such;
- silence counts for nothing: an engine deep in a computation may not answer for minutes. What
  ends it is the lease's time, or whoever notices that the engine answers nobody.

After its end a job keeps its replica for `keep` more, or until its client has fetched something
below the job's path: ended at once, the video would be gone before anyone could have it.

Ids are the engines' own, so two replicas may give the same one; it then means the job begun
last, and the log says so. Ids of rota's own would have to be written into answers and paths,
and no other body is touched by rota.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
from starlette.types import Receive, Scope, Send

from rota.config.values import Config, JobsConfig, ModelConfig
from rota.core.types import LeaseClaim
from rota.engines.base import Endpoint
from rota.errors import CapacityError, ReplicaError, RequestError
from rota.gateway.answer import Answer
from rota.gateway.client import BrokenOffError, Client, Response, UnreachableError, UpstreamError
from rota.gateway.intake import given_request_id
from rota.gateway.surface import Controller, GrantHandle
from rota.gateway.upstream import NOT_SENT, NOT_SENT_TO_READ, end_to_end, target_at
from rota.gateway.watch import Watch

POLL_S_MIN = 2.0
POLL_S_MAX = 10.0
POLL_GROWTH = 1.5  # 2, 3, 4.5, 6.75, 10, 10, …
SILENCE_S_MAX = 30.0  # of one poll of rota's own
MISSES_MAX = 3

COPY_BYTES_MAX = 16 * 1024 * 1024  # of an answer that is looked into; some bring the result
ID_LENGTH_MAX = 256
ACTIVE_MAX = 1_000  # jobs followed at once, each a lease and a poll now and then
KNOWN_MAX = 10_000  # jobs that can be asked after, most of them over
BUSY_RETRY_S = 30

# Some fields of an object, each as it came. A result of megabytes is not unpacked to find a word
# beside it: that took seconds, and memory many times its size.
Content = Mapping[str, msgspec.Raw]

METHODS = ("DELETE", "GET", "HEAD")  # of a job's path; what another would begin is no poll

_log = logging.getLogger(__name__)


class Copy:
    """What has passed of an answer, up to `COPY_BYTES_MAX`; of a longer one, nothing.

    Args:
        shape: says what of it is looked at.
    """

    __slots__ = ("_names", "_pieces", "_size", "shape")

    def __init__(self, shape: JobsConfig) -> None:
        self.shape = shape
        names = (route.partition(".")[0] for route in (shape.id, shape.status))
        self._names = tuple(dict.fromkeys(names))
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= COPY_BYTES_MAX:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    def content(self) -> Content | None:
        """What is looked at of it as JSON; None for anything else."""
        if self._size > COPY_BYTES_MAX:
            return None
        try:
            return _fields_in(b"".join(self._pieces), self._names)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


@dataclass(slots=True, eq=False)
class Job:
    """Work under way at a replica, or done there.

    Args:
        id: the engine's own.
        claim: the lease that keeps the replica meanwhile; None = it was over when it began.
        is_over: whether the engine said so.
        is_lost: whether nothing is to be expected of it any more.
        misses: polls of rota's own in a row that were answered badly.
        news: set when any of that changed.
    """

    id: str
    model: str
    shape: JobsConfig
    replica: str
    endpoint: Endpoint
    claim: LeaseClaim | None
    is_over: bool = False
    is_lost: bool = False
    is_fetched: bool = False
    misses: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def judge(self, status: int, content: Content | None, *, is_ours: bool) -> None:
        """Take in an answer to a poll: of rota's own, or of a client's."""
        if status in (404, 410):
            self.is_lost = True
        elif status >= 500:
            if is_ours:
                self.miss()
        elif status < 300 and content is None and is_ours:
            self.miss()
        elif status < 300:
            self.misses = 0
            self.is_over = self.is_over or says_done(self.shape, content or {})
        if self.is_over or self.is_lost:
            self.news.set()

    def miss(self) -> None:
        """A poll of rota's own was answered badly."""
        self.misses += 1
        self.is_lost = self.is_lost or self.misses >= MISSES_MAX

    def fetch(self) -> None:
        """Its client has read something of it to the end."""
        if self.is_over:
            self.is_fetched = True
            self.news.set()

    def __str__(self) -> str:
        return f"job {self.id} of {self.model}"


class Jobs:
    """Every job that is known, and the ASGI application that answers for them.

    Args:
        controller: holds the leases, and says what replicas there are.
        client: speaks to the engines.
    """

    def __init__(self, controller: Controller, client: Client) -> None:
        self._controller = controller
        self._client = client
        self._config: Config | None = None  # what the two below were made from
        self._submits: frozenset[str] = frozenset()
        self._prefixes: list[str] = []
        self._jobs: dict[tuple[str, str], Job] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._run = os.urandom(4).hex()
        self._count = itertools.count(1)

    @property
    def submits(self) -> frozenset[str]:
        """The paths that jobs are posted to, as configured now."""
        self._look_at_config()
        return self._submits

    def _look_at_config(self) -> None:
        """Work out the paths again if models have changed. A job that was begun can still be
        asked after where it was, whatever became of its model's entry."""
        config = self._controller.config
        if config is self._config:
            return
        self._config = config
        shapes = [entry.jobs for entry in config.models.values() if entry.jobs]
        self._submits = frozenset(shape.submit for shape in shapes)
        prefixes = {_around(shape)[0] for shape in shapes} | {prefix for prefix, _ in self._jobs}
        # The longest first, for one may begin like another.
        self._prefixes = sorted(prefixes, key=len, reverse=True)

    # -- beginning

    def check_room(self) -> None:
        """Raises: CapacityError: 429, no further job can be followed now."""
        if len(self._following) >= ACTIVE_MAX:
            raise CapacityError(
                f"rota follows as many jobs as it may ({ACTIVE_MAX})",
                code="queue_full",
                status=429,
                retry_after_s=BUSY_RETRY_S,
            )

    def begun(self, grant: GrantHandle, answer: Copy) -> Job | None:
        """The job that an answer names, known from now on; None = it names none."""
        shape = answer.shape
        content = answer.content() or {}
        job_id = id_in(shape, content)
        if job_id is None:
            _log.warning("%s: an answer to POST %s names no job", grant.model, shape.submit)
            return None
        is_over = says_done(shape, content)
        lease = f"job-{self._run}-{next(self._count)}"
        claim = LeaseClaim(lease, shape.ttl_ms, f"job {job_id} of {shape.submit}")
        job = Job(
            job_id,
            grant.model,
            shape,
            grant.replica,
            grant.endpoint,
            None if is_over else claim,
            is_over=is_over,
        )
        self._remember(job)
        return job

    def follow(self, job: Job) -> None:
        """Watch over a job whose lease has begun, until it ends."""
        if job.claim is not None:
            task = asyncio.create_task(self._follow(job, job.claim.lease))
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    def _remember(self, job: Job) -> None:
        key = (_around(job.shape)[0], job.id)
        former = self._jobs.pop(key, None)
        if former is not None:
            _log.warning(
                "%s, on %s, has the id of %s, on %s", job, job.replica, former, former.replica
            )
        if len(self._jobs) >= KNOWN_MAX:
            # In order of their beginning: the oldest that is over, else the oldest.
            oldest = (key for key, job in self._jobs.items() if job.is_over or job.is_lost)
            del self._jobs[next(oldest, next(iter(self._jobs)))]
        self._jobs[key] = job
        if key[0] not in self._prefixes:  # its model's entry has changed since it was asked for
            self._config = None

    # -- following

    async def _follow(self, job: Job, lease: str) -> None:
        ended = self._controller.lease_end(lease)
        ended.add_done_callback(lambda _: job.news.set())
        try:
            await self._until_over(job, ended)
            if job.is_over:
                await self._until_fetched(job, ended)
            elif ended.done():
                why = ended.result()
                _log.warning("%s is followed no longer, its lease has ended: %s", job, why)
            elif job.is_lost:
                _log.warning("%s is followed no longer: its engine knows nothing of it", job)
        finally:
            self._controller.release_lease(lease)

    async def _until_over(self, job: Job, ended: asyncio.Future[str]) -> None:
        pause_s = POLL_S_MIN
        while not (job.is_over or job.is_lost or ended.done()):
            if not await _hears(job.news, pause_s):
                await self._poll(job)
                pause_s = min(pause_s * POLL_GROWTH, POLL_S_MAX)

    async def _until_fetched(self, job: Job, ended: asyncio.Future[str]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + job.shape.keep_ms / 1_000
        while not (job.is_fetched or job.is_lost or ended.done()):
            if not await _hears(job.news, until - loop.time()):
                return

    async def _poll(self, job: Job) -> None:
        before, after = _around(job.shape)
        path = before + urllib.parse.quote(job.id, safe="") + after
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                status, content = await self._ask(job, path)
        except TimeoutError:
            return
        except UpstreamError as error:
            _log.debug("%s: %s", job, error)
            job.miss()
        else:
            job.judge(status, content, is_ours=True)

    async def _ask(self, job: Job, path: str) -> tuple[int, Content | None]:
        headers = [(b"accept", b"application/json")]
        target = target_at(job.endpoint, path, b"")
        response = await self._client.send(job.endpoint, "GET", target, headers)
        copy = Copy(job.shape)
        try:
            while not response.at_end:
                copy.add(await response.read())
        finally:
            response.close()
        return response.status, copy.content()

    # -- being asked after

    def covers(self, path: str) -> bool:
        """Whether a path lies where jobs are asked after."""
        self._look_at_config()
        return any(path.startswith(prefix) for prefix in self._prefixes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a question about a job to the replica that has it."""
        request = f"{self._run}-p{next(self._count)}"
        given_id = given_request_id(dict(scope["headers"]))
        answer = Answer(send, request, given_id or request)
        await answer.settle(self._answer(scope, receive, answer))

    async def _answer(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        method: str = scope["method"]
        path: str = scope["raw_path"].decode("latin-1")
        job, is_poll = self._find(path)
        answer.model = job.model
        endpoint = self._endpoint(job)
        is_read = is_poll and method == "GET"
        headers = end_to_end(scope["headers"], NOT_SENT_TO_READ if is_read else NOT_SENT)
        target = target_at(endpoint, path, scope["query_string"])
        with Watch(receive):
            try:
                response = await self._client.send(endpoint, method, target, headers)
                try:
                    await _pass_on(answer, response, job, method, is_poll=is_poll)
                finally:
                    response.close()
            except (UnreachableError, BrokenOffError) as error:
                raise ReplicaError(
                    f"the engine of {job.model!r}, asked after {job}: {error}",
                    code="engine_failed",
                    status=502,
                ) from error

    def _find(self, path: str) -> tuple[Job, bool]:
        """The job that a path as it was sent is about, and whether it is the one to poll.

        Raises: RequestError: 404, there is none, or what lies below it cannot be told.
        """
        for prefix in self._prefixes:
            if not path.startswith(prefix):
                continue
            raw_id, _, below = path[len(prefix) :].partition("/")
            job = self._jobs.get((prefix, urllib.parse.unquote(raw_id)))
            if job is not None and _is_plain(below):
                return job, path == f"{prefix}{raw_id}{_around(job.shape)[1]}"
        raise RequestError(
            f"rota knows of no job at {path[:ID_LENGTH_MAX]}: none was begun with that id, or "
            "rota has been started anew since",
            code="job_not_found",
            status=404,
        )

    def _endpoint(self, job: Job) -> Endpoint:
        """Where to ask after a job; by its replica, for its port may be another's by now.

        Raises: RequestError: 404, the replica is gone, and all it had.
        """
        try:
            return self._controller.endpoint(job.replica)
        except ReplicaError as error:
            raise RequestError(
                f"{job} is gone with the replica that worked on it, {job.replica}",
                code="job_not_found",
                status=404,
            ) from error

    async def close(self) -> None:
        """Follow no job any longer."""
        following = list(self._following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def no_jobs(entry: ModelConfig, path: str) -> RequestError:
    """What is said to a job for a model that has none there."""
    where = (
        f"they are posted to {entry.jobs.submit}" if entry.jobs else "its entry states no `jobs`"
    )
    return RequestError(
        f"{entry.name!r} takes no jobs at {path}: {where}", code="no_jobs", status=400
    )


def says_done(shape: JobsConfig, content: Content) -> bool:
    """Whether an answer says that its job is over."""
    status = _at(content, shape.status)
    return isinstance(status, str) and status.lower() in shape.done


async def _pass_on(
    answer: Answer, response: Response, job: Job, method: str, *, is_poll: bool
) -> None:
    """Pass an answer about a job on, and draw from it what concerns us."""
    status = response.status
    copy = Copy(job.shape) if is_poll and method == "GET" else None

    def shown(piece: bytes) -> None:
        if copy is not None:
            copy.add(piece)

    def ended() -> None:
        if copy is not None:
            job.judge(status, copy.content(), is_ours=False)
        elif method == "DELETE" and is_poll and status < 300:
            job.judge(404, None, is_ours=False)  # as the next poll would hear

    await answer.relay(response, on_piece=shown, on_end=ended)
    if method == "GET" and not is_poll and status < 300:
        job.fetch()  # only now: before, its last bytes were on their way


async def _hears(news: asyncio.Event, bound_s: float) -> bool:
    """Whether there are news before a time is over."""
    news.clear()
    try:
        async with asyncio.timeout(bound_s):
            await news.wait()
    except TimeoutError:
        return False
    return True


def _around(shape: JobsConfig) -> tuple[str, str]:
    """What stands before and after the id in the path of a poll."""
    before, _, after = shape.poll.partition("{id}")
    return before, after


def id_in(shape: JobsConfig, content: Content) -> str | None:
    """The id of the job that an answer names, if it is one that can be asked after."""
    found = _at(content, shape.id)
    if isinstance(found, bool) or not isinstance(found, str | int):
        return None
    text = str(found)
    return text if 0 < len(text) <= ID_LENGTH_MAX and text.isprintable() else None


def _at(content: Content, route: str) -> object:
    """The word or number that JSON has at a dotted route; None = nothing."""
    name, _, rest = route.partition(".")
    found = content.get(name)
    if found is None:
        return None
    if rest:
        return _at(_fields_in(found, (rest.partition(".")[0],)), rest)
    try:
        return msgspec.json.decode(found, type=str | int | float | bool | None)
    except (msgspec.DecodeError, UnicodeDecodeError):  # something else, or no text
        return None


def _fields_in(data: bytes | msgspec.Raw, names: tuple[str, ...]) -> Content:
    """Some fields of an object of JSON, as far as they are there; none of anything else.

    Raises: msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is not JSON.
    """
    try:
        found = _decoder(names).decode(data)
    except msgspec.ValidationError:  # a list, a number
        return {}
    values = msgspec.structs.astuple(found)
    return {name: raw for name, raw in zip(names, values, strict=True) if raw}


@lru_cache
def _decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[msgspec.Struct]:
    """Reads an object's fields of these names and skips every other."""
    keys = {f"field_{number}": name for number, name in enumerate(names)}
    fields = [(key, msgspec.Raw, msgspec.Raw(b"")) for key in keys]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, rename=keys))


def _is_plain(below: str) -> bool:
    """Whether what lies below a job's path stays there, however an engine reads it."""
    parts = urllib.parse.unquote(below).replace("\\", "/").split("/")
    return not any(part in (".", "..") for part in parts)
