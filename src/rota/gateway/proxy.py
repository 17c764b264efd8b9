"""The data path: one request from its body to the last byte of its answer.

Plain ASGI, no framework: read the body, wait for a grant, pass bytes through both ways. The
request's body is sent as it came, but for a name that its engine does not know (`naming`), and
the answer's as it comes (`answer`).

From the moment the body is complete the client is watched. When it leaves, the request's task
is cancelled wherever it stands (in the queue, before the first byte, streaming, or stopped by
a reader that does not read), and the engine sees its connection close.

A request that begins a job ends its grant by turning it into a lease (`jobs`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from rota.config.values import ModelConfig
from rota.core.events import Outcome
from rota.errors import ReplicaError, RotaError
from rota.gateway.answer import Answer
from rota.gateway.catalog import find
from rota.gateway.client import BrokenOffError, Client, Response, UnreachableError
from rota.gateway.intake import (
    Intake,
    Uploads,
    given_request_id,
    identify_caller,
    mark_of,
    read_intake,
)
from rota.gateway.jobs import Copy, Jobs, no_jobs
from rota.gateway.naming import rename
from rota.gateway.surface import Controller, GrantHandle
from rota.gateway.terms import terms_of
from rota.gateway.upstream import (
    GONE,
    NOT_SENT,
    NOT_SENT_TO_READ,
    end_to_end,
    target_at,
    unreachable,
)
from rota.gateway.watch import Watch

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})

# Looked for in each piece as it passes; one that is cut in two there goes unseen, and costs its
# caller the longer of two holds.
_ENDS_IN_TOOL_CALL = re.compile(rb'"finish_reason"\s*:\s*"tool_calls"')

_log = logging.getLogger(__name__)


class Proxy:
    """The ASGI application behind `PATHS` and the paths that jobs are posted to.

    Args:
        controller: grants slots.
        client: speaks to the engines; shared, so that connections are.
        jobs: knows which answers begin one.
    """

    def __init__(self, controller: Controller, client: Client, jobs: Jobs) -> None:
        self._controller = controller
        self._client = client
        self._jobs = jobs
        self._uploads = Uploads(self._upload_bytes_max)
        self._run = os.urandom(4).hex()
        self._count = itertools.count(1)

    def _upload_bytes_max(self) -> int:
        config = self._controller.config
        return max(config.queue_bytes_max, config.body_bytes_max)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = f"{self._run}-{next(self._count)}"
        call = _Call(self._controller, self._client, request, scope, send, jobs=self._jobs)
        await call.run(receive, self._uploads)


class _Call:
    """One request. `Answer.settle` decides how it ends; these are the parts."""

    __slots__ = (
        "_answer", "_client", "_controller", "_copy", "_grant", "_headers", "_is_tool_call",
        "_jobs", "_request", "_scope", "_status",
    )  # fmt: skip

    def __init__(
        self,
        controller: Controller,
        client: Client,
        request: str,
        scope: Scope,
        send: Send,
        *,
        jobs: Jobs,
    ) -> None:
        self._controller = controller
        self._client = client
        self._jobs = jobs
        self._scope = scope
        self._headers: Mapping[bytes, bytes] = dict(scope["headers"])
        given_id = given_request_id(self._headers)
        # Ours is unique, what the client gave may not be; the story is found by either.
        self._request = request if given_id is None else f"{given_id}~{request}"
        self._answer = Answer(send, self._request, given_id or self._request)
        self._grant: GrantHandle | None = None
        self._status = 0
        self._is_tool_call = False
        self._copy: Copy | None = None  # of an answer that may begin a job

    async def run(self, receive: Receive, uploads: Uploads) -> None:
        await self._answer.settle(self._run(receive, uploads))

    async def _run(self, receive: Receive, uploads: Uploads) -> None:
        limit = self._controller.config.body_bytes_max
        intake = await read_intake(self._scope, self._headers, receive, limit, uploads)
        self._rename(intake)
        with Watch(receive):
            await self._serve(intake)

    def _rename(self, intake: Intake) -> None:
        """Have the model called what its engine calls it. Raises: RequestError: there is none."""
        name = find(self._controller.config, intake.model).upstream_name
        if name != intake.model:
            content_type = self._headers.get(b"content-type", b"")
            intake.body = rename(intake.body, content_type, name)

    async def _serve(self, intake: Intake) -> None:
        """Wait for a grant and use it; once more if the replica was gone before it heard."""
        try:
            await self._serve_once(intake)
        except ReplicaError as error:
            if error.code != GONE:
                raise
            _log.info("%s: %s; asking once more", self._request, error.message)
            await self._serve_once(intake)

    async def _serve_once(self, intake: Intake) -> None:
        entry = find(self._controller.config, intake.model)
        self._answer.model = entry.name
        self._copy = self._copy_for(entry)
        caller = identify_caller(self._scope, self._headers)
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        self._grant = None
        try:
            async with self._controller.grant(
                request=self._request,
                model=entry.name,
                caller=caller,
                mark=mark_of(caller, intake.body),
                body_bytes=len(intake.body),
                **terms_of(self._scope, self._headers, entry.model),
            ) as grant:
                self._grant = grant
                self._answer.loaded, self._answer.waited_ms = grant.loaded, grant.waited_ms
                _log.debug(
                    "%s: %s after %d ms %s",
                    self._request,
                    grant.replica,
                    grant.waited_ms,
                    grant.why,
                )
                await self._pass_through(grant, intake)
        except RotaError as error:
            if self._grant is None:
                self._answer.loaded = error.loading is not None
                self._answer.waited_ms = int((clock() - asked_at) * 1_000)
            raise

    def _copy_for(self, entry: ModelConfig) -> Copy | None:
        """Where to keep an answer that may begin a job. Raises: RotaError: it cannot."""
        path = self._scope["path"]
        shape = entry.jobs
        if shape is not None and shape.submit == path:
            self._jobs.check_room()
            return Copy(shape)
        if path not in PATHS:
            raise no_jobs(entry, path)
        return None

    async def _pass_through(self, grant: GrantHandle, intake: Intake) -> None:
        try:
            response = await self._ask(grant, intake)
            try:
                self._status = response.status
                await self._answer.relay(response, on_piece=self._heard, on_end=self._ended)
            finally:
                response.close()
        except UnreachableError as error:
            grant.end(Outcome.UNREACHABLE)
            refusal = unreachable(self._controller.config, grant, error)
            _log.warning("%s: %s", self._request, refusal.message)
            raise refusal from error
        except BrokenOffError as error:
            grant.end(Outcome.FAILED)
            _log.warning("%s: the engine of %s %s", self._request, grant.replica, error)
            raise ReplicaError(
                f"the engine of {grant.model!r} {error}", code="engine_failed", status=502
            ) from error

    async def _ask(self, grant: GrantHandle, intake: Intake) -> Response:
        """Send the request on. Its body is let go of once the answer has begun."""
        target = target_at(grant.endpoint, self._scope["path"], self._scope["query_string"])
        not_sent = NOT_SENT if self._copy is None else NOT_SENT_TO_READ
        headers = end_to_end(self._scope["headers"], not_sent)
        response = await self._client.send(grant.endpoint, "POST", target, headers, intake.body)
        intake.body = b""
        return response

    def _heard(self, piece: bytes) -> None:
        """A piece of the answer is about to be sent on."""
        assert self._grant is not None
        self._grant.heard()
        if b'"tool_calls"' in piece and _ENDS_IN_TOOL_CALL.search(piece):
            self._is_tool_call = True
        if self._copy is not None:
            self._copy.add(piece)

    def _ended(self) -> None:
        """The engine is done: the slot is given back, or becomes the job's lease."""
        grant = self._grant
        assert grant is not None
        if self._copy is not None and self._status < 300:
            job = self._jobs.begun(grant, self._copy)
            if job is not None:
                grant.end(Outcome.OK, lease=job.claim)
                self._jobs.follow(job)
                return
        outcome = Outcome.FAILED if self._status >= 500 else Outcome.OK
        grant.end(outcome, is_tool_call=self._is_tool_call)
