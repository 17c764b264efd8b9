"""A job keeps its replica from the answer that named it to its end, and is asked after there only.
How: a scripted engine and a fake controller whose leases can be watched."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from openai import AsyncOpenAI

from rota.config.values import JobsConfig
from rota.core.events import Outcome
from rota.errors import CapacityError
from rota.gateway import jobs
from tests.gateway.conftest import Gateway, start_gateway, until
from tests.gateway.fakes import Exchange, FakeGrant, GrantCall, answer_bytes, make_config
from tests.gateway.wire import CHAT, Answer, ask, chat, connect, request_bytes

VIDEOS = "/v1/videos"


@pytest.fixture(autouse=True)
def _polls_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_S_MIN", 0.01)
    monkeypatch.setattr(jobs, "POLL_S_MAX", 0.02)


@dataclass
class Renderer:
    """An engine with jobs, whose answers a test can change."""

    submit: dict[str, Any] = field(default_factory=lambda: {"id": "video_1", "status": "queued"})
    submit_status: str = "200 OK"
    poll: dict[str, Any] | bytes = field(default_factory=lambda: {"status": "in_progress"})
    poll_status: str = "200 OK"
    polls: int = 0
    posted: list[bytes] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)

    async def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        self.targets.append(f"{request.method} {request.target}")
        if request.method == "POST":
            self.posted.append(request.body)
            body = json.dumps(self.submit).encode()
            await exchange.write(answer_bytes(body, status=self.submit_status))
        elif request.target.partition("?")[0].endswith("/content"):
            await exchange.write(answer_bytes(b"a film"))
        else:
            self.polls += 1
            body = self.poll if isinstance(self.poll, bytes) else json.dumps(self.poll).encode()
            await exchange.write(answer_bytes(body, status=self.poll_status))

    def ends(self, status: str = "completed") -> None:
        self.poll = {"status": status}


@asynccontextmanager
async def rendering(
    shape: JobsConfig | None = None, **config: Any
) -> AsyncIterator[tuple[Gateway, Renderer]]:
    renderer = Renderer()
    models = dict(make_config().models)
    models["m"] = replace(models["m"], jobs=shape or JobsConfig(keep_ms=50))
    async with start_gateway(renderer, models=models, **config) as gateway:
        yield gateway, renderer


async def submit(gateway: Gateway, path: str = VIDEOS, model: str = "m") -> Answer:
    return await ask(gateway.port, "POST", path, chat(model))


async def no_lease(gateway: Gateway) -> None:
    await until(lambda: not gateway.controller.active)


async def test_the_grant_ends_as_a_lease_and_the_lease_with_the_job() -> None:
    # case U2
    async with rendering() as (gateway, renderer):
        answer = await submit(gateway)
        assert (answer.status, answer.json()) == (200, renderer.submit)
        [grant] = gateway.controller.grants
        assert grant.outcome is Outcome.OK
        assert grant.lease is not None
        assert grant.lease.ttl_ms == 3_600_000
        assert "video_1" in grant.lease.reason
        [lease] = gateway.controller.active.values()
        assert (lease["model"], lease["replica"]) == ("m", "m-1")
        await until(lambda: renderer.polls >= 3)
        assert gateway.controller.active
        renderer.ends()
        await no_lease(gateway)
        polls = renderer.polls
        answer = await ask(gateway.port, "GET", f"{VIDEOS}/video_1")
        assert (answer.json()["status"], renderer.polls) == ("completed", polls + 1)


async def test_asking_after_a_job_takes_no_slot_and_reaches_its_replica() -> None:
    async with rendering() as (gateway, renderer):
        await submit(gateway)
        for target, body in (
            (f"{VIDEOS}/video_1?x=%20y", b'{"status": "in_progress"}'),
            (f"{VIDEOS}/video_1/content?variant=thumbnail", b"a film"),
        ):
            answer = await ask(gateway.port, "GET", target, headers={"authorization": "Bearer k"})
            assert (answer.status, answer.body) == (200, body)
            assert answer.header("x-rota-model") == "m"
            assert answer.header("x-rota-model-loaded") == "0"
            assert f"GET {target}" in renderer.targets
            asked = next(r for r in gateway.engine.requests if r.target == target)
            assert asked.header("authorization") is None
        head = await ask(gateway.port, "HEAD", f"{VIDEOS}/video_1")
        assert head.status == 200
        assert len(gateway.controller.calls) == 1


@pytest.mark.parametrize("said", ["completed", "failed", "CANCELLED", "succeeded"])
async def test_every_word_for_an_end_is_one(said: str) -> None:
    async with rendering() as (gateway, renderer):
        renderer.poll = {"status": said}
        await submit(gateway)
        await no_lease(gateway)


@pytest.mark.parametrize("status", ["404 Not Found", "410 Gone"])
async def test_a_job_its_engine_does_not_know_is_over(status: str) -> None:
    async with rendering(JobsConfig(keep_ms=3_600_000)) as (gateway, renderer):
        renderer.poll_status = status
        await submit(gateway)
        await no_lease(gateway)
        assert renderer.polls == 1


@pytest.mark.parametrize("poll", [b"{}", b"<html>", b""])
async def test_an_engine_that_keeps_failing_has_lost_it(poll: bytes) -> None:
    """A 5xx, and an answer that says nothing: three in a row of rota's own."""
    async with rendering() as (gateway, renderer):
        renderer.poll = poll
        renderer.poll_status = "500 Oops" if poll == b"{}" else "200 OK"
        await submit(gateway)
        await no_lease(gateway)
        assert renderer.polls == jobs.MISSES_MAX


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b'{"id": "a", "status": "Completed"}', ("a", True)),
        (b'{"status": ["completed"], "id": 7}', ("7", False)),
        (b'{"data": {"task": "b", "state": "failed"}}', ("b", True)),
        (b'{"data": {"task": {}, "state": null}}', (None, False)),
        (b'{"data": [1], "id": true}', (None, False)),
        (b'{"id": "\xff", "status": 1e999}', (None, False)),
        (b'["id"]', (None, False)),
        (b"7", (None, False)),
        (b'{"id": "a"', None),
        (b'{"id": ' + b"[" * 100_000, None),
    ],
)
def test_what_is_found_in_an_answer(answer: bytes, found: tuple[str | None, bool] | None) -> None:
    shape = JobsConfig()
    if b"data" in answer:
        shape = JobsConfig(id="data.task", status="data.state")
    copy = jobs.Copy(shape)
    copy.add(answer)
    content = copy.content()
    told = None if content is None else (jobs.id_in(shape, content), jobs.says_done(shape, content))
    assert told == found


def test_a_large_result_is_not_unpacked() -> None:
    """What is looked for stands beside megabytes of something else; only that is made."""
    copy = jobs.Copy(JobsConfig())
    copy.add(b'{"status": "completed", "result": [' + b"[]," * 1_000_000 + b"[]]}")
    tracemalloc.start()
    try:
        content = copy.content()
        assert content is not None
        assert jobs.says_done(JobsConfig(), content)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8_000_000  # unpacked, a list takes 56 bytes each


async def test_the_log_says_why_a_job_is_followed_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rendering() as (gateway, renderer):
        renderer.poll_status = "404 Not Found"
        await submit(gateway)
        await no_lease(gateway)
    assert "its engine knows nothing of it" in caplog.text


async def test_what_a_client_hears_counts_but_not_its_5xx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_S_MIN", 60.0)
    async with rendering() as (gateway, renderer):
        await submit(gateway)
        renderer.poll_status = "500 Oops"
        for _ in range(5):
            assert (await ask(gateway.port, "GET", f"{VIDEOS}/video_1")).status == 500
        assert gateway.controller.active
        renderer.poll_status = "200 OK"
        renderer.ends()
        await ask(gateway.port, "GET", f"{VIDEOS}/video_1")
        await no_lease(gateway)
        assert renderer.polls == 6


async def test_the_result_is_kept_until_it_is_fetched() -> None:
    async with rendering(JobsConfig(keep_ms=3_600_000)) as (gateway, renderer):
        await submit(gateway)
        await ask(gateway.port, "GET", f"{VIDEOS}/video_1/content")  # too early to count
        renderer.ends()
        assert (await ask(gateway.port, "GET", f"{VIDEOS}/video_1")).status == 200
        assert gateway.controller.active
        await ask(gateway.port, "GET", f"{VIDEOS}/video_1/content")
        await no_lease(gateway)


async def test_a_deleted_job_is_over() -> None:
    async with rendering(JobsConfig(keep_ms=3_600_000)) as (gateway, _):
        await submit(gateway)
        assert (await ask(gateway.port, "DELETE", f"{VIDEOS}/video_1")).status == 200
        await no_lease(gateway)


@pytest.mark.parametrize("why", ["expired", "its replica is gone"])
async def test_a_lease_that_ends_by_itself_ends_the_polling(why: str) -> None:
    async with rendering() as (gateway, renderer):
        await submit(gateway)
        await until(lambda: renderer.polls > 0)
        [lease] = gateway.controller.active
        gateway.controller.end_lease(lease, why)
        await until(lambda: not gateway.controller.active)
        await asyncio.sleep(0)
        polls = renderer.polls
        await asyncio.sleep(0.1)
        assert renderer.polls <= polls + 1  # one may have been on its way


async def test_a_job_of_a_replica_that_is_gone_and_one_that_never_was() -> None:
    async with rendering() as (gateway, renderer):
        await submit(gateway)
        gateway.controller.gone.add("m-1")
        gone = await ask(gateway.port, "GET", f"{VIDEOS}/video_1")
        never = await ask(gateway.port, "GET", f"{VIDEOS}/video_2")
        for answer in (gone, never):
            assert (answer.status, answer.json()["error"]["code"]) == (404, "job_not_found")
        assert "gone with the replica" in gone.json()["error"]["message"]
        assert all("video_2" not in target for target in renderer.targets)
        assert len(gateway.controller.calls) == 1


@pytest.mark.parametrize(
    "below", ["../../sleep", "%2e%2e/%2e%2e/sleep", "..%2f..%2fsleep", "a/./b", "..\\..\\sleep"]
)
async def test_what_lies_below_a_job_stays_below_it(below: str) -> None:
    async with rendering() as (gateway, renderer):
        await submit(gateway)
        async with connect(gateway.port) as wire:
            await wire.write(request_bytes("GET", f"{VIDEOS}/video_1/{below}"))
            assert (await wire.read_head()).status in (400, 404)
        assert not any("sleep" in target for target in renderer.targets)


async def test_a_job_that_is_over_when_it_begins_needs_no_lease_and_can_be_asked_after() -> None:
    async with rendering() as (gateway, renderer):
        renderer.submit["status"] = "completed"
        await submit(gateway)
        assert gateway.controller.grants[0].lease is None
        assert (await ask(gateway.port, "GET", f"{VIDEOS}/video_1")).status == 200


@pytest.mark.parametrize(
    ("answer", "status"),
    [({}, "200 OK"), ({"id": None}, "200 OK"), ({"id": ""}, "200 OK"), ({"id": "x"}, "500 Oops")],
)
async def test_an_answer_that_names_no_job_is_passed_on(
    answer: dict[str, Any], status: str
) -> None:
    async with rendering() as (gateway, renderer):
        renderer.submit, renderer.submit_status = answer, status
        answered = await submit(gateway)
        assert answered.json() == answer
        [grant] = gateway.controller.grants
        assert grant.lease is None
        assert grant.outcome is (Outcome.FAILED if status[0] == "5" else Outcome.OK)


async def test_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields inside objects, numbers as ids, and a path that goes on after the id."""
    shape = JobsConfig(
        submit="/run",
        poll="/runs/{id}/status",
        id="data.task",
        status="data.state",
        done=frozenset({"ready"}),
        keep_ms=0,
    )
    async with rendering(shape) as (gateway, renderer):
        renderer.submit = {"data": {"task": 7}}
        renderer.poll = {"data": {"state": "going"}, "status": "completed"}
        await submit(gateway, "/run")
        await until(lambda: renderer.polls > 1)
        assert gateway.controller.active
        assert "GET /runs/7/status" in renderer.targets
        assert (await ask(gateway.port, "GET", "/runs/7/content")).body == b"a film"
        renderer.poll = {"data": {"state": "Ready"}}
        await no_lease(gateway)


async def test_a_form_names_its_model_and_is_sent_on_whole() -> None:
    body = (
        b'--xyz\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na cat\r\n'
        b'--xyz\r\nContent-Disposition: form-data; name="model"\r\n\r\ngpt-4o-mini\r\n--xyz--\r\n'
    )
    kind = {"content-type": "multipart/form-data; boundary=xyz"}
    async with rendering() as (gateway, renderer):
        assert (await ask(gateway.port, "POST", VIDEOS, body, kind)).status == 200
        assert renderer.posted == [body.replace(b"gpt-4o-mini", b"m")]  # case W37
        assert gateway.controller.calls[0].model == "m"
        for bad, sentence in ((b"--xyz--", "text field `model`"), (b"x", "not a multipart form")):
            answer = await ask(gateway.port, "POST", VIDEOS, bad, kind)
            assert answer.status == 400
            assert sentence in answer.json()["error"]["message"]


async def test_models_without_jobs_there_are_refused_and_methods_too() -> None:
    async with rendering() as (gateway, _):
        answer = await submit(gateway, model="org/model:7b")
        assert (answer.status, answer.json()["error"]["code"]) == (400, "no_jobs")
        assert (await submit(gateway, model="nobody")).status == 404
        assert not gateway.controller.grants
        answer = await ask(gateway.port, "GET", VIDEOS)
        assert (answer.status, answer.header("allow")) == (405, "POST")
        answer = await ask(gateway.port, "PUT", f"{VIDEOS}/video_1", b"")
        assert (answer.status, answer.header("allow")) == (405, "DELETE, GET, HEAD")
        assert (await ask(gateway.port, "POST", CHAT, chat("org/model:7b"))).status == 200


async def test_the_last_of_two_with_one_id_is_meant_and_both_are_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rendering() as (gateway, renderer):
        await submit(gateway)
        await submit(gateway)
        assert len(gateway.controller.active) == 2
        assert "has the id of" in caplog.text
        renderer.ends()
        await no_lease(gateway)


async def test_a_job_outlives_the_entry_of_its_model() -> None:
    async with rendering() as (gateway, renderer):
        assert (await submit(gateway)).status == 200
        config = gateway.controller.config
        models = dict(config.models)
        models["m"] = replace(models["m"], jobs=JobsConfig("/v1/renders", "/v1/renders/{id}"))
        gateway.controller.config = replace(config, models=models)
        assert (await submit(gateway)).status == 404
        renderer.submit["id"] = "render_1"
        assert (await submit(gateway, "/v1/renders")).status == 200
        for path in (f"{VIDEOS}/video_1", "/v1/renders/render_1"):
            assert (await ask(gateway.port, "GET", path)).status == 200
        renderer.ends()
        await no_lease(gateway)


async def test_a_job_begun_while_its_entry_changed_can_be_asked_after() -> None:
    async with rendering() as (gateway, renderer):
        config = gateway.controller.config
        models = dict(config.models)
        models["m"] = replace(models["m"], jobs=None)

        async def change(call: GrantCall, grant: FakeGrant) -> None:
            gateway.controller.config = replace(config, models=models)
            assert (await submit(gateway, f"{VIDEOS}/none")).status == 404  # it was noticed

        gateway.controller.decide = change
        assert (await submit(gateway)).status == 200
        assert (await ask(gateway.port, "GET", f"{VIDEOS}/video_1")).status == 200
        renderer.ends()
        await no_lease(gateway)


async def test_jobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ACTIVE_MAX", 2)
    monkeypatch.setattr(jobs, "KNOWN_MAX", 2)
    async with rendering() as (gateway, renderer):
        for name in ("a", "b"):
            renderer.submit["id"] = name
            await submit(gateway)
        answer = await submit(gateway)
        assert (answer.status, answer.json()["error"]["code"]) == (429, "queue_full")
        renderer.ends()
        await no_lease(gateway)
        renderer.submit["id"] = "c"
        await until(lambda: True)
        async with asyncio.timeout(10):
            while (await submit(gateway)).status == 429:  # the last is being put away
                await asyncio.sleep(0.01)
        found = [(await ask(gateway.port, "GET", f"{VIDEOS}/{name}")).status for name in "abc"]
        assert found == [404, 200, 200]


async def test_an_engine_that_dies_is_a_502_and_then_a_404() -> None:
    async with rendering() as (gateway, _):
        await submit(gateway)
        await gateway.engine.stop()
        answer = await ask(gateway.port, "GET", f"{VIDEOS}/video_1")
        assert (answer.status, answer.json()["error"]["code"]) == (502, "engine_failed")
        await no_lease(gateway)  # three polls met nobody
        await gateway.engine.start()


async def test_nothing_is_left_when_the_gateway_ends() -> None:
    async with rendering(JobsConfig(keep_ms=3_600_000)) as (gateway, renderer):
        await submit(gateway)
        await until(lambda: renderer.polls > 0)
        before = len(asyncio.all_tasks())
    assert not gateway.controller.active
    assert len(asyncio.all_tasks()) < before


async def test_a_refused_job_is_refused_as_any_request() -> None:
    async with rendering() as (gateway, _):

        async def full(*_: object) -> None:
            raise CapacityError("full", code="queue_full", status=429, retry_after_s=7)

        gateway.controller.decide = full
        answer = await submit(gateway)
        assert (answer.status, answer.header("retry-after")) == (429, "7")


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_the_sdk_creates_polls_and_fetches() -> None:
    async with rendering() as (gateway, renderer):
        renderer.submit |= {"object": "video", "model": "m", "progress": 0}
        renderer.poll = {"id": "video_1", "status": "completed", "progress": 100}
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            video = await client.videos.create_and_poll(model="m", prompt="a cat")
            assert video.status == "completed"
            film = await client.videos.download_content(video.id)
            assert film.content == b"a film"
        await no_lease(gateway)
