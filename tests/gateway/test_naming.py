"""The name that an engine knows takes the place of the one asked for, and no other byte changes.
How: bodies as bytes and from Hypothesis, then requests on the wire to an engine that keeps them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rota.gateway.naming import rename, rename_in_query
from tests.gateway.conftest import Gateway, start_gateway
from tests.gateway.fakes import answering, make_config
from tests.gateway.test_intake import VALUES, read
from tests.gateway.test_multipart import KIND, form
from tests.gateway.wire import CHAT, ask, chat, connect, request_bytes

JSON = b"application/json"
ALIAS = "gpt-4o-mini"  # of `m`


@pytest.mark.parametrize(
    "body",
    [
        '{"model":<"a">}',
        ' {\n"x" : 1.0e5 ,\t"model"  : <"a"> ,"y":"\\u00e9 é" } ',
        '{"\\u006dodel":<"\\u0061">,"é":"a"}',
        '{"model":"b","model":<"a">}',
        '{"model":"a","model":<"a">}',
        '{"m":{"model":"a"},"model":<"a">,"z":["a","a"]}',
        '{"model":<"a">,"m":{"model":"a"},"z":"a\\"a"}',
    ],
)
def test_one_value_of_a_json_body_is_replaced(body: str) -> None:
    head, _, rest = body.partition("<")
    value, _, tail = rest.partition(">")
    renamed = rename(f"{head}{value}{tail}".encode(), JSON, "new")
    assert renamed.decode() == f'{head}"new"{tail}'
    assert read(renamed).model == "new"


OBJECTS = st.lists(
    st.tuples(st.sampled_from(["model", "x", "models"]), VALUES | st.just("a")), max_size=6
)


@given(OBJECTS, OBJECTS, st.sampled_from(['"a"', '"\\u0061"', ' "a"\n']), st.text(min_size=1))
@example([("x", {"model": "a"})], [("y", "a")], '"a"', 'quo"te\\')
def test_nothing_else_of_any_object_changes(
    before: list[tuple[str, Any]], after: list[tuple[str, Any]], value: str, name: str
) -> None:
    def written(members: list[tuple[str, Any]]) -> list[str]:
        return [f'"{key}": {json.dumps(one, ensure_ascii=False)}' for key, one in members]

    after = [(key, one) for key, one in after if key != "model"]
    before = [(key, "b" if key == "model" else one) for key, one in before]

    def body(model: str) -> bytes:
        members = [*written(before), f'"model":{model}', *written(after)]
        return ("{" + ",".join(members) + "}").encode()

    renamed = rename(body(value), JSON, name)
    head, tail = body("\0").split(b"\0")
    assert renamed.startswith(head)
    assert renamed.endswith(tail)
    assert json.loads(renamed[len(head) : len(renamed) - len(tail)]) == name


def test_a_large_body_of_nothing_but_braces_takes_no_time() -> None:
    body = b'{"x":[' + b'{"model":"a"},' * 300_000 + b'1],"model":"a","y":{"model":"a"}}'
    place = body.rindex(b'"model":"a","y"')
    assert rename(body, JSON, "b") == body[:place] + b'"model":"b"' + body[place + 11 :]


@pytest.mark.parametrize(
    "parts",
    [
        [('name="model"', b"a")],
        [('name="f"; filename="model"', b"\0\xff\r\n--xy"), ("name=model", b"a")],
        [('name="x"', b'name="model"\r\n\r\na'), ('name="model"', b"a"), ('name="model"', b"a")],
        [('name="model"', b"")],
    ],
)
def test_the_first_field_of_a_form_is_replaced(parts: list[tuple[str, bytes]]) -> None:
    at = next(n for n, (head, _) in enumerate(parts) if head in ('name="model"', "name=model"))
    renamed = [*parts[:at], (parts[at][0], "modèle".encode()), *parts[at + 1 :]]
    assert rename(form(*parts), KIND, "modèle") == form(*renamed)


@pytest.mark.parametrize(
    ("query", "renamed"),
    [
        (b"model=a", b"model=n%2F1%20x"),
        (b"x=%20y&model=a&model=a&z", b"x=%20y&model=n%2F1%20x&model=a&z"),
        (b"model=&model&mod%65l=%61", b"model=&model&mod%65l=n%2F1%20x"),
        (b"models=a", b"models=a"),
    ],
)
def test_the_first_field_of_a_query_is_replaced(query: bytes, renamed: bytes) -> None:
    assert rename_in_query(query, "n/1 x") == renamed


@asynccontextmanager
async def engine_that_knows(upstream_model: str | None) -> AsyncIterator[Gateway]:
    models = dict(make_config().models)
    models["m"] = replace(models["m"], upstream_model=upstream_model)
    async with start_gateway(answering(b"{}"), models=models) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("asked", "upstream_model", "sent"),
    [
        (ALIAS, None, "m"),
        ("m", None, "m"),
        (ALIAS, "org/Model-7B", "org/Model-7B"),
        ("m", "org/Model-7B", "org/Model-7B"),
        (ALIAS, ALIAS, ALIAS),
    ],
)
async def test_the_engine_gets_the_name_it_knows(
    asked: str, upstream_model: str | None, sent: str
) -> None:
    # case W37
    async with engine_that_knows(upstream_model) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat(asked, x="é"))
        assert answer.header("x-rota-model") == "m"
        [request] = gateway.engine.requests
        assert request.body == chat(sent, x="é")
        assert request.header("content-length") == str(len(request.body))
        assert gateway.controller.calls[0].body_bytes == len(request.body)


async def test_a_body_in_chunks_is_renamed_and_sent_whole() -> None:
    # case W37
    async with engine_that_knows("longer-than-before") as gateway, connect(gateway.port) as wire:
        body = chat(ALIAS, pad="x" * 200_000)
        await wire.write(request_bytes("POST", CHAT, headers={"transfer-encoding": "chunked"}))
        for start in range(0, len(body), 50_001):
            piece = body[start : start + 50_001]
            await wire.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await wire.write(b"0\r\n\r\n")
        assert (await wire.read_head()).status == 200
        [request] = gateway.engine.requests
        assert request.body == body.replace(ALIAS.encode(), b"longer-than-before")
        assert request.header("transfer-encoding") is None
