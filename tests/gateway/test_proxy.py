"""The data path, end to end: a client of exact bytes, the real server, a scripted engine.
How: nothing sleeps; each phase is held open by an event, and what must end is counted to zero."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest

from rota.core.events import Outcome
from rota.engines.base import Endpoint
from rota.errors import CapacityError, ReplicaError, RequestError, RotaError
from tests.gateway.conftest import Gateway, start_gateway, until
from tests.gateway.fakes import (
    EVENTS_HEAD,
    LAST_CHUNK,
    Exchange,
    FakeGrant,
    GrantCall,
    answer_bytes,
    answering,
    chunk,
)
from tests.gateway.test_client import settled
from tests.gateway.wire import CHAT, Answer, ask, chat, connect, request_bytes

PATHS = [CHAT, "/v1/completions", "/v1/embeddings"]


# -- passing through


@pytest.mark.parametrize("path", PATHS)
async def test_request_and_answer_pass_untouched(path: str) -> None:
    body = b'{ "model" :"\\u006d",\n "x":[1.0e5, "\\u00e9\xc3\xa9"] }'
    given = {
        "Content-Type": "application/json; charset=utf-8",
        "Authorization": "Bearer sk-secret",
        "X-Api-Key": "sk-secret",
        "Cookie": "sk-secret",
        "Api-Key": "sk-secret",
        "Connection": "keep-alive, X-Private",
        "X-Private": "sk-secret",
        "TE": "trailers",
        "Accept": "text/event-stream",
        "X-Conversation-Id": "c1",
    }
    reply = answer_bytes(
        b"\x00\xff",
        status="201 Created",
        headers={"Content-Type": "audio/wav", "Server": "engine", "X-Extra": "é", "Date": "then"},
    )

    async def script(exchange: Exchange) -> None:
        await exchange.write(reply)

    async with start_gateway(script) as gateway:
        answer = await ask(gateway.port, "POST", f"{path}?a=1&b=%20", body, given)
        assert (answer.status, answer.body, answer.is_whole) == (201, b"\x00\xff", True)
        assert answer.header("content-type") == "audio/wav"
        assert answer.header("content-length") == "2"
        assert answer.header("server") == "engine"
        assert answer.header("x-extra") == "é".encode().decode("latin-1")
        assert answer.header("date") != "then"  # one date, the server's own
        (request,) = gateway.engine.requests
        assert (request.target, request.body) == (f"{path}?a=1&b=%20", body)
        assert request.headers == [
            ("host", f"127.0.0.1:{gateway.engine.endpoint.port}"),
            ("content-length", str(len(body))),
            ("content-type", "application/json; charset=utf-8"),
            ("accept", "text/event-stream"),
            ("x-conversation-id", "c1"),
        ]
        (call,) = gateway.controller.calls
        assert (call.model, call.caller, call.body_bytes) == ("m", "conversation:c1", len(body))
        assert gateway.controller.outcomes == [Outcome.OK]


@pytest.mark.parametrize("seed", range(5))
async def test_answers_are_the_same_byte_for_byte(seed: int) -> None:
    chance = random.Random(seed)
    bodies = [chance.randbytes(chance.choice([0, 1, 300, 70_000, 400_000])) for _ in range(6)]

    async def script(exchange: Exchange) -> None:
        body = bodies[len(gateway.engine.requests) - 1]
        if chance.random() < 0.5:
            raw = answer_bytes(body)
        else:
            cut = chance.randint(0, len(body))
            parts = [chunk(part) for part in (body[:cut], body[cut:]) if part]
            raw = EVENTS_HEAD + b"".join(parts) + LAST_CHUNK
        while raw:
            size = chance.randint(1, 100_000)
            await exchange.write(raw[:size])
            raw = raw[size:]

    async with start_gateway(script) as gateway, connect(gateway.port) as wire:
        for body in bodies:
            await wire.write(request_bytes("POST", CHAT, chat(pad="x" * chance.randint(0, 90_000))))
            await wire.read_head()
            answer = await wire.read_body()
            assert (answer.body, answer.is_whole) == (body, True)
        assert gateway.engine.connections == 1
        assert gateway.controller.outcomes == [Outcome.OK] * 6


async def test_pieces_arrive_before_the_next_is_sent() -> None:
    """Each chunk is sent only after the client has the one before: any buffering would hang."""
    seen = asyncio.Semaphore(0)
    events = [b"data: %d\n\n" % number for number in range(20)]

    async def script(exchange: Exchange) -> None:
        await exchange.write(EVENTS_HEAD)
        for event in events:
            await seen.acquire()
            await exchange.write(chunk(event))
        await exchange.write(LAST_CHUNK)

    async with start_gateway(script) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, chat(stream=True)))
        await wire.read_head()  # the head, too, is passed on before there is a body
        for event in events:
            seen.release()
            assert await wire.read_piece() == event
        assert await wire.read_piece() == b""


# case W46
async def test_event_streams_tell_proxies_not_to_buffer() -> None:
    async def script(exchange: Exchange) -> None:
        head = EVENTS_HEAD
        if exchange.request.target != CHAT:
            head = head[:-2] + b"Cache-Control: private\r\nX-Accel-Buffering: maybe\r\n\r\n"
        await exchange.write(head + chunk(b"data: x\n\n") + LAST_CHUNK)

    async with start_gateway(script) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat())
        assert answer.header("x-accel-buffering") == "no"
        assert answer.header("cache-control") == "no-cache"
        answer = await ask(gateway.port, "POST", f"{CHAT}?stated", chat())
        assert answer.header("x-accel-buffering") == "maybe"
        assert answer.header("cache-control") == "private"


async def test_other_answers_are_not_told_so() -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat())
        assert answer.header("x-accel-buffering") is None


async def test_own_headers() -> None:
    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        grant.loaded, grant.waited_ms = True, 1234

    reply = answering(b"{}", headers={"X-Request-Id": "engine", "X-Rota-Model": "engine"})
    async with start_gateway(reply) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat("gpt-4o-mini"))
        made = answer.header("x-request-id")
        assert made == gateway.controller.calls[0].request
        for prefix in ("x-rota", "x-qm"):
            assert answer.header(f"{prefix}-model") == "m"
            assert answer.header(f"{prefix}-model-loaded") == "0"
            assert answer.header(f"{prefix}-wait-ms") == "0"

        gateway.controller.decide = decide
        given = {"X-Request-Id": "mine-1"}
        answer = await ask(gateway.port, "POST", CHAT, chat("modèle"), given)
        assert answer.header("x-request-id") == "mine-1"
        # both are in the id that the log and the journal know: theirs, and one of our own
        theirs, _, ours = gateway.controller.calls[1].request.rpartition("~")
        assert theirs == "mine-1"
        assert ours not in ("", made)
        assert answer.header("x-rota-model") == "mod%C3%A8le"
        assert answer.header("x-rota-model-loaded") == "1"
        assert answer.header("x-qm-wait-ms") == "1234"

        for insane in ("x" * 129, "a\tb", "é"):
            answer = await ask(gateway.port, "POST", CHAT, chat(), {"X-Request-Id": insane})
            assert answer.header("x-request-id") == gateway.controller.calls[-1].request


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ({}, "peer:127.0.0.1"),
        ({"x-forwarded-for": "9.9.9.9"}, "peer:127.0.0.1"),
        ({"x-conversation-id": "c", "authorization": "Bearer k"}, "conversation:c"),
    ],
)
async def test_caller(headers: dict[str, str], caller: str) -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        await ask(gateway.port, "POST", CHAT, chat(), headers)
        assert gateway.controller.calls[0].caller == caller


async def test_declared_time_out_bounds_the_wait() -> None:
    async with start_gateway(answering(b"{}")) as gateway:

        async def waits(**headers: str) -> tuple[int | None, int | None]:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            await ask(gateway.port, "POST", CHAT, chat(), named)
            call = gateway.controller.calls[-1]
            return call.activation_wait_ms, call.queue_wait_ms

        assert await waits() == (None, None)
        assert await waits(x_stainless_read_timeout="600") == (45_000, 595_000)
        assert await waits(x_stainless_read_timeout="30.0") == (25_000, 25_000)
        assert await waits(x_stainless_read_timeout="4") == (2_000, 2_000)
        assert await waits(x_stainless_timeout="20") == (15_000, 15_000)
        for odd in ("None", "NOT_GIVEN", "nan", "inf", "-1", "0", "x" * 100):
            assert await waits(x_stainless_read_timeout=odd) == (None, None)
        assert await waits(x_stainless_read_timeout="1e300") == (45_000, 600_000)


@pytest.mark.parametrize("prefix", ["x-rota", "x-qm"])
async def test_what_is_said_of_hold_and_patience_is_passed_on(prefix: str) -> None:
    async with start_gateway(answering(b"{}")) as gateway:

        async def said(hold: str | None, patience: str | None) -> tuple[int | None, int | None]:
            given = {f"{prefix}-hold-ms": hold, f"{prefix}-patience-ms": patience}
            headers = {name: value for name, value in given.items() if value is not None}
            await ask(gateway.port, "POST", CHAT, chat(), headers)
            call = gateway.controller.calls[-1]
            return call.hold_ms, call.patience_ms

        assert await said(None, None) == (None, None)
        assert await said("0", "0") == (0, 0)
        assert await said("30000", "60000") == (30_000, 60_000)
        assert await said("-1", "1e3") == (None, None)
        assert await said("soon", "") == (None, None)


@pytest.mark.parametrize(
    ("body", "is_tool_call"),
    [
        (b'{"choices":[{"message":{"tool_calls":[]},"finish_reason":"stop"}]}', False),
        (b'{"choices":[{"message":{"tool_calls":[{}]},"finish_reason":"tool_calls"}]}', True),
        (b'{"choices":[{"finish_reason": "tool_calls"}]}', True),
        (b'{"choices":[{"message":{"content":"\\"finish_reason\\":\\"tool_calls\\""}}]}', False),
    ],
)
async def test_an_answer_that_calls_a_tool_is_told_apart(body: bytes, is_tool_call: bool) -> None:
    async with start_gateway(answering(body)) as gateway:
        await ask(gateway.port, "POST", CHAT, chat())
        await until(lambda: gateway.controller.grants[0].outcome is not None)
        assert gateway.controller.grants[0].is_tool_call is is_tool_call


async def test_connections_to_the_engine_and_from_the_client_are_reused() -> None:
    async with start_gateway(answering(b"{}")) as gateway, connect(gateway.port) as wire:
        for _ in range(10):
            await wire.write(request_bytes("POST", CHAT, chat()))
            await wire.read_head()
            assert (await wire.read_body()).is_whole
        assert gateway.engine.connections == 1


async def test_slot_is_free_once_the_client_has_its_answer() -> None:
    """A client that asks again at once must not find its own last request in the way."""

    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        assert gateway.controller.running == 0

    async with start_gateway(answering(b"{}")) as gateway, connect(gateway.port) as wire:
        gateway.controller.decide = decide
        for _ in range(50):
            await wire.write(request_bytes("POST", CHAT, chat()))
            await wire.read_head()
            assert (await wire.read_body()).status == 200


async def test_sixty_four_mebibytes() -> None:
    limit = 64 * 2**20
    pad = limit - len(chat(pad=""))
    async with start_gateway(answering(b"{}")) as gateway:
        body = chat(pad="x" * pad)
        assert len(body) == limit
        assert (await ask(gateway.port, "POST", CHAT, body)).status == 200
        assert len(gateway.engine.requests[0].body) == limit


async def test_over_the_limit() -> None:
    async with start_gateway(answering(b"{}"), body_bytes_max=100_000) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat(pad="x" * 100_000))
        assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")
        raw = request_bytes("POST", CHAT, headers={"transfer-encoding": "chunked"})
        async with connect(gateway.port) as wire:
            await wire.write(raw + chunk(b"x" * 60_000) + chunk(b"x" * 60_000) + LAST_CHUNK)
            await wire.read_head()
            assert (await wire.read_body()).status == 413
            await wire.write(request_bytes("POST", CHAT, chat()))  # and the connection lives
            assert (await wire.read_head()).status == 200
        assert len(gateway.engine.requests) == 1


async def test_chunked_request_is_sent_with_its_length() -> None:
    body = chat()
    async with start_gateway(answering(b"{}")) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, headers={"transfer-encoding": "chunked"}))
        for byte in body:
            await wire.write(chunk(bytes([byte])))
        await wire.write(LAST_CHUNK)
        await wire.read_head()
        assert gateway.engine.requests[0].body == body
        assert gateway.engine.requests[0].header("transfer-encoding") is None


async def test_expect_continue() -> None:
    async with start_gateway(answering(b"{}"), body_bytes_max=1_000) as gateway:
        async with connect(gateway.port) as wire:
            expect = {"expect": "100-continue", "content-length": str(len(chat()))}
            await wire.write(request_bytes("POST", CHAT, headers=expect))
            assert (await wire.read_head()).status == 100
            await wire.write(chat())
            assert (await wire.read_head()).status == 200
        async with connect(gateway.port) as wire:
            expect["content-length"] = "100000"
            await wire.write(request_bytes("POST", CHAT, headers=expect))
            assert (await wire.read_head()).status == 413  # told before it has sent anything


# -- refusals


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"", {}, 400, "not JSON"),
        (b"{", {}, 400, "not JSON"),
        (b"\xff", {}, 400, "not JSON"),
        (b'{"model": "m"} trailing', {}, 400, "not JSON"),
        (b'{"model": "\xff"}', {}, 400, "not JSON"),
        (b'{"model": "m", "x": "\xff"}', {}, 400, "UTF-8"),
        (b"[]", {}, 400, "object"),
        (b"{}", {}, 400, "`model`"),
        (b'{"model": null}', {}, 400, "model"),
        (b'{"model": 7}', {}, 400, "model"),
        (b'{"model": ""}', {}, 400, "empty"),
        (b'{"model": "m", "stream": "yes"}', {}, 400, "stream"),
        (b'{"model": "m", "x": ' + b"[" * 100_000, {}, 400, "nested"),
        (b'{"model": "' + b"m" * 600 + b'"}', {}, 400, "longer"),
        (b'{"model": "m"}', {"content-encoding": "gzip"}, 415, "gzip"),
        (b"", {"upgrade": "h2c", "connection": "upgrade"}, 400, "HTTP_1_1"),
    ],
)
async def test_what_callers_get_wrong(
    body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, body, headers)
        assert (answer.status, answer.is_whole) == (status, True)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
        assert answer.header("x-request-id")
        assert not gateway.controller.calls


REFUSALS = [
    (RequestError("no such", code="model_not_found", status=404), "not_found_error"),
    (RequestError("off", code="model_off", status=409, retry=False), "invalid_request_error"),
    (CapacityError("full", code="queue_full", status=429, retry_after_s=3), "rate_limit_error"),
    (ReplicaError("no such file \udcff", code="model_failed", retry=False), "api_error"),
    (
        CapacityError(
            "loading", code="model_loading", status=503, retry_after_s=7, loading={"model": "m"}
        ),
        "overloaded_error",
    ),
]


# case W11
@pytest.mark.parametrize(("error", "kind"), REFUSALS)
async def test_refusals_of_the_controller(error: RotaError, kind: str) -> None:
    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        raise error

    async with start_gateway(answering(b"{}")) as gateway:
        gateway.controller.decide = decide
        answer = await ask(gateway.port, "POST", CHAT, chat())
        assert answer.status == error.status
        assert answer.header("content-type") == "application/json"
        retry_after = error.retry_after_s
        assert answer.header("retry-after") == (None if retry_after is None else str(retry_after))
        assert answer.header("x-should-retry") == (None if error.retry is None else "false")
        assert answer.header("x-rota-model") == "m"
        assert answer.header("x-rota-model-loaded") == ("1" if error.loading else "0")
        body = answer.json()
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert body["error"]["code"] == error.code
        assert isinstance(body["error"]["message"], str)
        assert body.get("loading") == error.loading
        assert body["request_id"] == answer.header("x-request-id")


async def test_unknown_model_is_not_echoed_in_a_header() -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat("nope\r\nX-Evil: 1"))
        assert answer.status == 404
        assert answer.header("x-rota-model") is None
        assert answer.header("x-evil") is None


async def test_mistake_of_ours_is_a_500_with_an_id(caplog: pytest.LogCaptureFixture) -> None:
    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        raise KeyError("oops")

    async with start_gateway(answering(b"{}")) as gateway:
        gateway.controller.decide = decide
        answer = await ask(gateway.port, "POST", CHAT, chat())
        assert answer.status == 500
        request_id = answer.header("x-request-id")
        assert request_id is not None
        assert request_id in answer.json()["error"]["message"]
        assert "oops" not in answer.body.decode()
        (record,) = [record for record in caplog.records if record.exc_info]
        assert request_id in record.getMessage()


# -- engines that fail


async def test_engine_s_own_errors_pass_through() -> None:
    async with start_gateway(answering(b"mine", status="500 Oops")) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat())
        assert (answer.status, answer.body) == (500, b"mine")
        gateway.engine.script = answering(b"mine", status="422 Oops")
        assert (await ask(gateway.port, "POST", CHAT, chat())).status == 422
        assert gateway.controller.outcomes == [Outcome.FAILED, Outcome.OK]


# case W12
@pytest.mark.parametrize("status", [204, 304])
async def test_a_length_where_no_body_can_be_promises_nothing(status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 %d Odd\r\nContent-Length: 5\r\n\r\n" % status)

    async with start_gateway(script) as gateway, connect(gateway.port) as wire:
        for _ in range(2):  # on one connection, so each ended well
            await wire.write(request_bytes("POST", CHAT, chat()))
            answer = await wire.read_head()
            assert (answer.status, answer.header("content-length")) == (status, None)


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200", b"nonsense\r\n\r\n"])
async def test_engine_that_dies_before_its_answer(raw: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(raw)
        exchange.abort()

    async with start_gateway(script) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat(stream=True))
        assert (answer.status, answer.is_whole) == (502, True)
        assert answer.json()["error"]["code"] == "engine_failed"
        assert gateway.controller.outcomes == [Outcome.FAILED]


# case W12
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 100\r\n\r\n",
    ],
)
async def test_engine_that_dies_inside_a_body_breaks_the_connection(head: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(head + b"half")
        exchange.close()

    async with start_gateway(script) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat())
        assert (answer.status, answer.is_whole) == (200, False)
        assert gateway.controller.outcomes == [Outcome.FAILED]


# case S1, case W12
@pytest.mark.parametrize(
    ("sent", "fence"),
    [
        (b"", b""),
        (b"data: 1\n\ndata: 2\n\n", b""),
        (b"data: 1\r\n\r\n", b""),
        (b"data: 1\n\ndata: ha", b"\n\n"),
        (b"data: 1\n", b"\n\n"),
    ],
)
async def test_engine_that_dies_inside_a_stream_ends_in_an_error_event(
    sent: bytes, fence: bytes
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(EVENTS_HEAD + (chunk(sent) if sent else b""))
        exchange.close()

    async with start_gateway(script) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat(stream=True))
        assert answer.is_whole
        assert answer.body.startswith(sent + fence + b'data: {"error":')
        assert answer.body.endswith(b"}\n\n")
        event = answer.body.removeprefix(sent + fence + b"data: ")
        error = json.loads(event)["error"]
        assert error["code"] == "engine_failed"
        assert "in the middle of its answer" in error["message"]
        assert b"[DONE]" not in answer.body
        assert gateway.controller.outcomes == [Outcome.FAILED]


@pytest.mark.parametrize("is_done", [True, False])
async def test_stream_whose_end_nothing_marks_is_whole_only_with_done(is_done: bool) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        await exchange.write(b"data: 1\n\n" + (b"data: [DONE]\n\n" if is_done else b""))
        exchange.close()

    async with start_gateway(script) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat(stream=True))
        assert answer.is_whole
        assert (b'"error"' in answer.body) is not is_done
        assert gateway.controller.outcomes == [Outcome.OK if is_done else Outcome.FAILED]


async def test_engine_that_cannot_be_reached() -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        gateway.controller.engine = Endpoint("127.0.0.1", await free_port())
        answer = await ask(gateway.port, "POST", CHAT, chat())
        assert (answer.status, answer.json()["error"]["code"]) == (502, "replica_gone")
        assert gateway.controller.outcomes == [Outcome.UNREACHABLE] * 2  # it was asked for twice
        answer = await ask(gateway.port, "POST", CHAT, chat("far"))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_endpoint")
        assert gateway.controller.outcomes == [Outcome.UNREACHABLE] * 3


async def test_a_replica_gone_before_it_heard_is_not_the_client_s_problem() -> None:
    gone = Endpoint("127.0.0.1", await free_port())

    async def first_one_gone(call: GrantCall, grant: FakeGrant) -> None:
        if len(gateway.controller.calls) == 1:
            grant.endpoint = gone

    async with start_gateway(answering(b"{}")) as gateway:
        gateway.controller.decide = first_one_gone
        body = chat(pad="x" * 300_000)
        answer = await ask(gateway.port, "POST", CHAT, body)
        assert answer.status == 200
        assert gateway.engine.requests[0].body == body
        assert gateway.controller.outcomes == [Outcome.UNREACHABLE, Outcome.OK]


async def test_connection_that_went_stale_is_not_the_client_s_problem() -> None:
    async def script(exchange: Exchange) -> None:
        if len(gateway.engine.requests) == 2:
            exchange.abort()
        else:
            await exchange.write(answer_bytes(b"{}"))

    async with start_gateway(script) as gateway:
        for _ in range(3):
            assert (await ask(gateway.port, "POST", CHAT, chat())).status == 200
        assert gateway.controller.outcomes == [Outcome.OK] * 3


# -- clients that leave


async def test_client_leaves_while_uploading() -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        async with connect(gateway.port) as wire:
            await wire.write(request_bytes("POST", CHAT, headers={"content-length": "100"}) + b"{")
        await ask(gateway.port, "GET", "/health")  # the server has seen the departure by then
        assert not gateway.controller.calls


async def test_client_leaves_while_waiting() -> None:
    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        await asyncio.Event().wait()

    async with start_gateway(answering(b"{}")) as gateway:
        gateway.controller.decide = decide
        async with connect(gateway.port) as wire:
            await wire.write(request_bytes("POST", CHAT, chat()))
            await until(lambda: gateway.controller.waiting == 1)
        await until(lambda: gateway.controller.withdrawn == 1)
        assert not gateway.engine.requests


async def test_client_leaves_before_the_first_byte() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.peer_left()

    async with start_gateway(script) as gateway:
        async with connect(gateway.port) as wire:
            await wire.write(request_bytes("POST", CHAT, chat()))
            await until(lambda: len(gateway.engine.requests) == 1)
        await until(lambda: gateway.engine.open == 0)
        assert gateway.controller.outcomes == [Outcome.CANCELLED]


async def test_client_leaves_a_silent_stream() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(EVENTS_HEAD + chunk(b"data: 1\n\n"))
        await exchange.peer_left()

    async with start_gateway(script) as gateway:
        async with connect(gateway.port) as wire:
            await wire.write(request_bytes("POST", CHAT, chat(stream=True)))
            await wire.read_head()
            assert await wire.read_piece() == b"data: 1\n\n"
        await until(lambda: gateway.engine.open == 0)
        assert gateway.controller.outcomes == [Outcome.CANCELLED]


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_client_that_did_not_read_leaves(how: str) -> None:
    """Stopped by back-pressure, the request is still called off when its client goes."""
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.write(EVENTS_HEAD)
        while True:
            await exchange.write(chunk(b"x" * 65_536))
            sent += 65_536

    async with start_gateway(script) as gateway, connect(gateway.port, limit=1024) as wire:
        await wire.write(request_bytes("POST", CHAT, chat(stream=True)))
        await settled(lambda: sent)
        # What both sockets, both transports and the client may hold; and then no more.
        assert sent < 24 * 2**20
        assert gateway.controller.running == 1
        if how == "abort":
            wire.abort()
        else:
            wire.writer.close()
        await until(lambda: gateway.engine.open == 0)
        await until(lambda: gateway.controller.running == 0)
        assert gateway.controller.outcomes == [Outcome.CANCELLED]


# case W10
async def test_two_hundred_clients_leave_at_random_points() -> None:
    chance = random.Random(10)

    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(chance.random() * 0.02)
        await exchange.write(EVENTS_HEAD)
        for _ in range(chance.randint(1, 40)):
            await asyncio.sleep(0.001)
            await exchange.write(chunk(b"data: x\n\n"))
        await exchange.write(LAST_CHUNK)

    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        await asyncio.sleep(chance.random() * 0.02)

    async def leave(gateway: Gateway) -> None:
        body = request_bytes("POST", CHAT, chat(stream=True, pad="x" * 2_000))
        async with connect(gateway.port) as wire:
            await wire.write(body[: chance.choice([len(body), len(body), 500])])
            reading = asyncio.create_task(wire.reader.read())
            await asyncio.wait([reading], timeout=chance.random() * 0.08)
            reading.cancel()
            if chance.random() < 0.5:
                wire.abort()

    async with start_gateway(script) as gateway:
        gateway.controller.decide = decide
        await asyncio.gather(*(leave(gateway) for _ in range(200)))
        await gateway.settles()
        await until(
            lambda: (
                len(gateway.client._idle.get(gateway.engine.endpoint, ())) == gateway.engine.open
            )
        )
        assert gateway.controller.calls
        assert (await ask(gateway.port, "POST", CHAT, chat())).status == 200


# -- odds and ends


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(answer_bytes(exchange.request.body))

    async with start_gateway(script) as gateway, connect(gateway.port) as wire:
        bodies = [chat(n=number) for number in range(5)]
        await wire.write(b"".join(request_bytes("POST", CHAT, body) for body in bodies))
        for body in bodies:
            await wire.read_head()
            assert (await wire.read_body()).body == body


@pytest.mark.parametrize("base", ["", "/v1", "/api", "/api/v1"])
async def test_engine_s_url_may_end_in_v1(base: str) -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        gateway.controller.engine = replace(gateway.engine.endpoint, base_path=base)
        await ask(gateway.port, "POST", CHAT, chat())
        assert gateway.engine.requests[0].target == base.removesuffix("/v1") + CHAT


async def test_query_passes_byte_for_byte() -> None:
    async with start_gateway(answering(b"{}")) as gateway, connect(gateway.port) as wire:
        raw = request_bytes("POST", f"{CHAT}?a=\xff&b=%FF", chat())
        await wire.write(raw)
        answer = await wire.read_head()
        if answer.status == 200:  # a parser may refuse the raw byte; then with a 400
            assert gateway.engine.requests[0].target == f"{CHAT}?a=\xff&b=%FF"
        else:
            assert answer.status == 400


async def test_grant_is_asked_for_by_the_model_s_own_name() -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        await ask(gateway.port, "POST", CHAT, chat("gpt-4o-mini"))
        assert gateway.controller.calls[0].model == "m"


async def test_many_at_once() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(answer_bytes(exchange.request.body))

    async with start_gateway(script) as gateway:
        bodies = [chat(n=number) for number in range(100)]
        answers: list[Answer] = await asyncio.gather(
            *(ask(gateway.port, "POST", CHAT, body) for body in bodies)
        )
        assert [answer.body for answer in answers] == bodies


async def free_port() -> int:
    """A port that nobody listens on, as far as can be known."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
