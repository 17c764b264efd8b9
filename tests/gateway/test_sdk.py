"""The unmodified SDKs of OpenAI and Anthropic: what they make of our answers and refusals.
How: the real clients against the real server; a scripted engine sends what engines send. Their
own back-off is jumped over, so that retries cost no time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from rota.core.events import Outcome
from rota.errors import CapacityError, RequestError, RotaError
from tests.gateway.conftest import Gateway, start_gateway
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

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # nothing here leans on the loop

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
COMPLETION = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
    ],
}


def event(text: str | None, finish: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    body = {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return f"data: {json.dumps(body)}\n\n".encode()


async def read_into(
    texts: list[str | None], stream: openai.AsyncStream[ChatCompletionChunk]
) -> None:
    async for piece in stream:
        texts.append(piece.choices[0].delta.content)  # noqa: PERF401 - kept when it raises


@asynccontextmanager
async def openai_client(gateway: Gateway, **more: object) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{gateway.port}/v1",
        api_key="sk-secret",
        **more,  # type: ignore[arg-type]
    )
    async with client:
        yield client


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDKs sleep between tries through anyio; the time itself is not under test."""

    async def at_once(seconds: float) -> None:
        slept.append(seconds)

    slept.clear()
    monkeypatch.setattr("openai._base_client.anyio.sleep", at_once)


slept: list[float] = []


async def test_chat_embedding_and_models() -> None:
    async with (
        start_gateway(answering(json.dumps(COMPLETION).encode())) as gateway,
        openai_client(gateway) as client,
    ):
        answer = await client.chat.completions.create(model="m", messages=USER)
        assert answer.choices[0].message.content == "hello"
        call = gateway.controller.calls[0]
        assert call.caller.startswith("key:")
        assert "sk-secret" not in str(gateway.controller.calls)
        # The client states its read time-out (600 s) in each request: that is what we go by.
        assert (call.activation_wait_ms, call.queue_wait_ms) == (45_000, 595_000)
        assert gateway.engine.requests[0].header("authorization") is None

        names = [model.id async for model in client.models.list()]
        assert names == ["m", "org/model:7b", "modèle", "far"]
        assert (await client.models.retrieve("org/model:7b")).id == "org/model:7b"


async def test_stream() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(EVENTS_HEAD)
        for text in ("he", "l", "lo"):
            await exchange.write(chunk(event(text)))
        await exchange.write(chunk(event(None, "stop") + b"data: [DONE]\n\n") + LAST_CHUNK)

    async with start_gateway(script) as gateway, openai_client(gateway) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        texts = [piece.choices[0].delta.content async for piece in stream]
        assert texts == ["he", "l", "lo", None]


# case S1
@pytest.mark.parametrize("cut", [0, 7])
async def test_stream_that_dies_is_an_error_not_an_end(cut: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(EVENTS_HEAD)
        for text in "abcde":
            await exchange.write(chunk(event(text)))
        if cut:
            await exchange.write(chunk(event("lost")[:cut]))
        exchange.close()

    async with start_gateway(script) as gateway, openai_client(gateway) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        texts: list[str | None] = []
        with pytest.raises((openai.APIError, json.JSONDecodeError)) as raised:
            await read_into(texts, stream)
        assert texts == list("abcde")
        if isinstance(raised.value, openai.APIError):
            assert raised.value.code == "engine_failed"
        else:  # it died inside an event, whose half the SDK cannot read
            assert cut
        assert len(gateway.engine.requests) == 1


async def test_body_that_is_cut_is_an_error() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        exchange.close()

    async with (
        start_gateway(script) as gateway,
        openai_client(gateway, max_retries=0) as client,
    ):
        with pytest.raises(openai.APIConnectionError):
            await client.chat.completions.create(model="m", messages=USER)


@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        (RequestError("no", code="model_not_found", status=404), openai.NotFoundError, 1),
        (RequestError("no", code="model_off", status=409, retry=False), openai.ConflictError, 1),
        (
            CapacityError("no", code="queue_full", status=429, retry_after_s=2),
            openai.RateLimitError,
            3,
        ),
        (
            CapacityError("no", code="no_room", status=503, retry=False),
            openai.InternalServerError,
            1,
        ),
        (
            CapacityError(
                "no", code="model_loading", status=503, retry_after_s=9, loading={"model": "m"}
            ),
            openai.InternalServerError,
            3,
        ),
    ],
)  # fmt: skip
async def test_refusals_read_and_retried_as_we_say(
    error: RotaError, kind: type[openai.APIStatusError], tries: int
) -> None:
    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        raise error

    async with start_gateway(answering(b"")) as gateway, openai_client(gateway) as client:
        gateway.controller.decide = decide
        with pytest.raises(kind) as raised:
            await client.chat.completions.create(model="m", messages=USER)
        assert raised.value.code == error.code
        assert raised.value.status_code == error.status
        assert raised.value.request_id == gateway.controller.calls[-1].request
        assert len(gateway.controller.calls) == tries
        if error.retry_after_s is not None:
            assert slept == [error.retry_after_s] * (tries - 1)


async def test_load_in_the_way_is_survived_by_retrying() -> None:
    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        if len(gateway.controller.calls) < 3:
            raise CapacityError("loading", code="model_loading", status=503, retry_after_s=2)

    reply = answering(json.dumps(COMPLETION).encode())
    async with start_gateway(reply) as gateway, openai_client(gateway) as client:
        gateway.controller.decide = decide
        answer = await client.chat.completions.create(model="m", messages=USER)
        assert answer.choices[0].message.content == "hello"
        assert gateway.controller.outcomes == [Outcome.OK]


async def test_sync_client_in_a_thread() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(answer_bytes(json.dumps(COMPLETION).encode()))

    def chat(port: int) -> str | None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
            answer = client.chat.completions.create(model="m", messages=USER)
            return answer.choices[0].message.content

    async with start_gateway(script) as gateway:
        assert await asyncio.to_thread(chat, gateway.port) == "hello"


async def test_anthropic_reads_our_refusals_and_lists() -> None:
    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        raise CapacityError("loading", code="model_loading", status=503, retry_after_s=2)

    async with start_gateway(answering(b"")) as gateway:
        gateway.controller.decide = decide
        base_url = f"http://127.0.0.1:{gateway.port}"
        async with anthropic.AsyncAnthropic(
            base_url=base_url, api_key="sk-secret", max_retries=0
        ) as client:
            names = [model.id async for model in client.models.list()]
            assert names == ["m", "org/model:7b", "modèle", "far"]
            with pytest.raises(anthropic.APIStatusError) as raised:
                await client.post("/v1/chat/completions", body={"model": "m"}, cast_to=object)
            assert raised.value.status_code == 503
            body = raised.value.body
            assert isinstance(body, dict)
            assert body["error"]["type"] == "overloaded_error"
        # Whichever header a version of it sends the key in, it is the same caller.
        assert gateway.controller.calls[0].caller.startswith("key:")
