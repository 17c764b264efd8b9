"""Who may ask for models, by which key, and what the key decides.

How: the real server before a fake controller and a fake engine, with keys in the configuration.
"""

from __future__ import annotations

import hashlib
import logging

import pytest

from rota.config.values import KeyConfig
from rota.core.types import Model, Scaling
from rota.gateway.intake import identify_caller
from rota.gateway.keys import authenticate, key_of
from rota.gateway.terms import Terms, terms_of
from tests.gateway.conftest import start_gateway
from tests.gateway.fakes import answering
from tests.gateway.wire import CHAT, ask, chat

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # nothing here leans on the loop

SECRET = "sk-rota-alice-1234567890"


def key(name: str, secret: str, **more: int) -> KeyConfig:
    return KeyConfig(name, hashlib.sha256(secret.encode()).digest(), **more)


KEYS = {"alice": key("alice", SECRET, priority=7), "bob": key("bob", "sk-rota-bob")}


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"authorization": f"Bearer {SECRET}"}, "alice"),
        ({"authorization": f"bearer  {SECRET} "}, "alice"),
        ({"x-api-key": "sk-rota-bob"}, "bob"),
        ({"authorization": "Bearer none", "x-api-key": SECRET}, "alice"),
        ({"authorization": "Basic YTpi", "x-api-key": SECRET}, "alice"),
    ],
)
async def test_a_known_key_is_served_by_its_name(headers: dict[str, str], name: str) -> None:
    async with start_gateway(answering(b"{}"), keys=KEYS) as gateway:
        answer = await ask(gateway.port, "POST", CHAT, chat(), headers)
        assert answer.status == 200
        (call,) = gateway.controller.calls
        assert (call.caller, call.priority) == (f"key:{name}", KEYS[name].priority)
        conversation = {**headers, "x-conversation-id": "c1"}
        await ask(gateway.port, "POST", CHAT, chat(), conversation)
        assert gateway.controller.calls[1].caller == "conversation:c1"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "none came"),
        ({"authorization": "Bearer"}, "none came"),
        ({"authorization": "Bearer "}, "none came"),
        ({"authorization": f"Basic {SECRET}"}, "none came"),
        ({"authorization": SECRET}, "none came"),
        ({"authorization": f"Bearer {SECRET}x"}, "is not known"),
        ({"authorization": "Bearer alice"}, "is not known"),
        ({"authorization": f"Bearer {KEYS['alice'].digest.hex()}"}, "is not known"),
        ({"x-api-key": ""}, "is not known"),
        ({"x-api-key": "k" * 10_000}, "is not known"),
        ({"x-api-key": "kéy"}, "is not known"),
    ],
)
async def test_nobody_else_is(headers: dict[str, str], said: str) -> None:
    async with start_gateway(answering(b"{}"), keys=KEYS) as gateway:
        for method, path in (
            *(("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/v1/embeddings")),
            *(("GET", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("GET", "/nope")),
        ):
            answer = await ask(gateway.port, method, path, chat(), headers)
            assert answer.status == 401
            assert answer.header("www-authenticate") == "Bearer"
            assert answer.header("x-request-id")
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert said in error["message"]
        assert not gateway.controller.calls
        assert not gateway.engine.requests


async def test_what_tells_nothing_stays_open_and_the_admin_surface_is_this_machine_s() -> None:
    async with start_gateway(answering(b"{}"), keys=KEYS) as gateway:
        for path in ("/", "/health", "/rota/v1/status", "/rota/v1/leases", "/running", "/queue"):
            assert (await ask(gateway.port, "GET", path)).status == 200
            evil = {"origin": "http://evil.example", "authorization": f"Bearer {SECRET}"}
            is_open = path in ("/", "/health")
            answer = await ask(gateway.port, "GET", path, headers=evil)
            assert answer.status == (200 if is_open else 403)


async def test_without_keys_any_key_will_do() -> None:
    async with start_gateway(answering(b"{}")) as gateway:
        headers = {"authorization": "Bearer none", "x-rota-patience-ms": "0"}
        assert (await ask(gateway.port, "POST", CHAT, chat(), headers)).status == 200
        (call,) = gateway.controller.calls
        assert call.caller.startswith("key:")
        assert (call.priority, call.hold_ms, call.patience_ms) == (None, None, 0)


async def test_a_key_reaches_no_engine_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with start_gateway(answering(b"{}"), keys=KEYS) as gateway:
        for headers in (
            {"authorization": f"Bearer {SECRET}"},
            {"x-api-key": SECRET},
            {"authorization": f"Bearer {SECRET}", "x-api-key": SECRET},
            {"authorization": f"Bearer {SECRET}-wrong"},
        ):
            answer = await ask(gateway.port, "POST", CHAT, chat(), headers)
            assert SECRET not in answer.body.decode()
        assert len(gateway.engine.requests) == 3
        for request in gateway.engine.requests:
            assert SECRET not in str(request)
        assert SECRET not in caplog.text
        assert KEYS["alice"].digest.hex() not in caplog.text + repr(gateway.controller.config)


MODEL = Model("m", Scaling(0, 1, 0), None, patience_ms=300_000)


def terms(
    priority: int | None = None,
    hold_ms: int | None = None,
    default_holds_ms: tuple[int | None, int | None] = (None, None),
    patience_ms: int | None = None,
) -> Terms:
    return Terms(
        priority=priority,
        hold_ms=hold_ms,
        default_holds_ms=default_holds_ms,
        patience_ms=patience_ms,
    )


@pytest.mark.parametrize(
    ("facts", "stated", "expected"),
    [
        # What a key says goes for requests that say nothing.
        ({}, (None, None), terms()),
        (
            {"hold_ms": 5, "hold_finished_ms": 4, "patience_ms": 9, "priority": -3},
            (None, None),
            terms(-3, None, (5, 4), 9),
        ),
        ({"hold_ms": 5}, (0, None), terms(None, 0, (5, None))),
        # Patience under the model's needs the key's leave; over it, anyone may be patient.
        ({}, (None, 0), terms(patience_ms=300_000)),
        ({}, (None, 299_999), terms(patience_ms=300_000)),
        ({}, (None, 400_000), terms(patience_ms=400_000)),
        ({"patience_ms_min": 0}, (None, 0), terms(patience_ms=0)),
        ({"patience_ms_min": 60_000}, (None, 0), terms(patience_ms=60_000)),
        ({"patience_ms_min": 60_000}, (None, 90_000), terms(patience_ms=90_000)),
        ({"patience_ms_min": 900_000}, (None, 300_000), terms(patience_ms=300_000)),
        # A key that is impatient by itself may say so too.
        ({"patience_ms": 10_000}, (None, 20_000), terms(patience_ms=20_000)),
        ({"patience_ms": 10_000}, (None, 0), terms(patience_ms=10_000)),
    ],
)
async def test_what_a_key_decides(
    facts: dict[str, int], stated: tuple[int | None, int | None], expected: Terms
) -> None:
    scope = {"type": "http", "path": CHAT, "headers": [(b"x-api-key", b"k")]}
    authenticate(scope, {"k": key("k", "k", **facts)})
    names = (b"x-rota-hold-ms", b"x-rota-patience-ms")
    said = zip(names, stated, strict=True)
    headers = {name: str(ms).encode() for name, ms in said if ms is not None}
    assert terms_of(scope, headers, MODEL) == expected


async def test_without_keys_a_request_has_what_it_states() -> None:
    headers = {b"x-rota-patience-ms": b"0", b"x-stainless-read-timeout": b"20"}
    assert terms_of({"type": "http", "path": CHAT}, headers, MODEL) == Terms(
        hold_ms=None,
        patience_ms=0,
        activation_wait_ms=15_000,
        queue_wait_ms=15_000,
    )


async def test_terms_reach_the_controller() -> None:
    keys = {"slow": key("slow", "s", priority=-5, hold_ms=1_000, patience_ms_min=60_000)}
    async with start_gateway(answering(b"{}"), keys=keys) as gateway:
        headers = {"x-api-key": "s", "x-rota-patience-ms": "0"}
        await ask(gateway.port, "POST", CHAT, chat(), headers)
        (call,) = gateway.controller.calls
        assert (call.priority, call.hold_ms, call.patience_ms) == (-5, None, 60_000)
        assert call.default_holds_ms == (1_000, None)


async def test_a_web_socket_brings_its_key_as_a_protocol() -> None:
    """Pages cannot set headers; OpenAI's own client sends it so."""
    value = f"realtime, openai-insecure-api-key.{SECRET}, openai-beta.realtime-v1"
    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "headers": [(b"sec-websocket-protocol", value.encode())],
    }
    authenticate(scope, KEYS)
    assert key_of(scope) == KEYS["alice"]
    assert identify_caller(scope, dict(scope["headers"])) == "key:alice"  # type: ignore[arg-type]
