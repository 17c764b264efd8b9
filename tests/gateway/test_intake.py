"""Reading a request: whatever bytes come, a model is found or a 4xx says why not.
How: Hypothesis for bodies, straight into the reader; a seeded mutation of requests on the wire."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.errors import RotaError
from rota.gateway.intake import Uploads, identify_caller, mark_of, read_intake
from tests.gateway.conftest import start_gateway
from tests.gateway.fakes import answering
from tests.gateway.wire import CHAT, HANG_S, chat, connect, request_bytes

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def read(body: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return asyncio.run(read_intake({"type": "http"}, {}, receive, 10_000, Uploads(lambda: 10_000)))


@given(
    st.text(min_size=1, max_size=20), st.none() | st.booleans(), st.dictionaries(st.text(), VALUES)
)
def test_model_is_found_in_any_object(
    model: str, stream: bool | None, rest: dict[str, Any]
) -> None:
    body = json.dumps({**rest, "model": f"m{model}", "stream": stream}).encode()
    intake = read(body)
    assert (intake.model, intake.body) == (f"m{model}", body)


@given(VALUES)
def test_any_json_is_taken_or_refused(value: Any) -> None:
    refused_or_taken(json.dumps(value).encode())


@given(st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    refused_or_taken(body)


@given(st.integers(0, 200), st.binary(max_size=8))
def test_any_damage_is_taken_or_refused(at: int, damage: bytes) -> None:
    body = json.dumps({"model": "é", "messages": [{"a": "\u2028", "b": 1e5}]}, ensure_ascii=False)
    raw = body.encode()
    at = min(at, len(raw))
    refused_or_taken(raw[:at] + damage + raw[at + len(damage) :])


def refused_or_taken(body: bytes) -> None:
    try:
        intake = read(body)
    except RotaError as error:
        refusal = error
    else:
        assert intake.body == body
        return
    assert 400 <= refusal.status < 500
    assert refusal.message


@pytest.mark.parametrize("seed", range(3))
async def test_broken_requests_on_the_wire_are_answered_or_closed(seed: int) -> None:
    """Never a 500, never a hang: each ends in answers with a status below it, or a close."""
    chance = random.Random(seed)
    whole = request_bytes("POST", CHAT, chat(), {"authorization": "Bearer x"})
    tokens = [b"\r\n", b"\0", b"\xff", b"{", b'"', b" ", b":", b"connection: close\r\n"]
    tokens += [b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"upgrade: h2c\r\n"]
    tokens += [b"expect: 100-continue\r\n", b"content-encoding: br\r\n"]
    async with start_gateway(answering(b"{}")) as gateway:
        for _ in range(150):
            raw = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                at = chance.randrange(len(raw) or 1)
                match chance.randrange(4):
                    case 0:
                        raw[at : at + 1] = chance.randbytes(1)
                    case 1:
                        del raw[at : at + chance.randint(1, 20)]
                    case 2:
                        raw[at:at] = chance.choice(tokens)
                    case 3:
                        del raw[at + 1 :]
            async with connect(gateway.port) as wire:
                await wire.write(bytes(raw))
                wire.writer.write_eof()  # whatever it waits for will not come
                answer = await asyncio.wait_for(wire.reader.read(), HANG_S)
            assert b"HTTP/1.1 5" not in answer, bytes(raw)
        await gateway.settles()
        async with connect(gateway.port) as wire:
            await wire.write(whole)
            assert (await wire.read_head()).status == 200


def test_callers_are_told_apart_and_keys_are_not_kept() -> None:
    def caller(client: Any = ("10.0.0.1", 5), **headers: str) -> str:
        raw = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        return identify_caller({"client": client}, raw)

    assert caller() == "peer:10.0.0.1"
    assert caller(client=None) == "peer:local"
    key = caller(authorization="Bearer sk-secret")
    assert key.startswith("key:")
    assert "secret" not in key
    assert caller(authorization="bearer sk-secret") == key
    assert caller(x_api_key="sk-secret") == key
    assert caller(authorization="Bearer other") != key
    assert caller(authorization="Basic dTpw") != caller(authorization="Basic dTpx")
    assert caller(authorization="Bearer sk-secret", x_conversation_id="c-1") == "conversation:c-1"
    long = caller(x_conversation_id="c" * 1_000)
    assert long != caller(x_conversation_id="c" * 1_001)
    assert len(long) < 100
    assert "\n" not in caller(x_conversation_id="a\nb")


async def test_bodies_that_are_being_read_are_bounded_together() -> None:
    announced = {"content-length": "30000"}
    async with start_gateway(answering(b"{}"), queue_bytes_max=50_000, body_bytes_max=40_000) as it:
        async with connect(it.port) as first, connect(it.port) as second:
            for wire in (first, second):
                await wire.write(request_bytes("POST", CHAT, headers=announced) + b" " * 29_000)
            heads = [asyncio.ensure_future(wire.read_head()) for wire in (first, second)]
            done, _ = await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED, timeout=HANG_S)
            (answer,) = (head.result() for head in done)
            assert (answer.status, answer.header("retry-after")) == (429, "2")
            assert answer.header("x-should-retry") is None
            for head in heads:
                head.cancel()
        # What was given up counts no more.
        async with connect(it.port) as wire:
            await wire.write(request_bytes("POST", CHAT, chat(text="x" * 35_000)))
            assert (await wire.read_head()).status == 200


def test_a_mark_tells_requests_apart_and_not_their_repetitions() -> None:
    large = bytes(10) * 100_000
    bodies = [b"{}", b"{ }", large, large + b"x", b"x" + large, large[:-1]]
    marks = [mark_of("peer:1", body) for body in bodies]
    assert len(set(marks)) == len(bodies)
    assert 0 not in marks
    assert marks == [mark_of("key:2", bytes(body)) for body in bodies]
    assert mark_of("conversation:3", large) == 0
