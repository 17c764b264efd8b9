"""Lists, health and the admin surface, and who may reach the latter.
How: the real server before a fake controller; the guard also with peers that cannot be had here,
by calling the application as a server would."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import pytest

from rota.config.values import JobsConfig, KeyConfig
from rota.errors import CapacityError
from rota.gateway.app import App
from tests.gateway.conftest import Gateway, start_gateway, until
from tests.gateway.fakes import FakeController, answering, make_config
from tests.gateway.wire import CHAT, Answer, ask, chat, connect, request_bytes

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # nothing here leans on the loop

STATUS = "/rota/v1/status"


async def get(gateway: Gateway, target: str, **headers: str) -> Answer:
    return await ask(gateway.port, "GET", target, headers=headers)


# -- for everyone


async def test_models_list_reads_as_openai_s_and_as_anthropic_s() -> None:
    async with start_gateway(answering(b"")) as gateway:
        body = (await get(gateway, "/v1/models?limit=1000")).json()
        assert (body["object"], body["has_more"]) == ("list", False)
        names = [item["id"] for item in body["data"]]
        assert names == ["m", "org/model:7b", "modèle", "far"]
        assert (body["first_id"], body["last_id"]) == ("m", "far")
        item = body["data"][0]
        assert (item["object"], item["type"], item["owned_by"]) == ("model", "model", "rota")
        assert isinstance(item["created"], int)
        assert item["created_at"].endswith("+00:00")
        assert item["status"] == {"value": "ready"}
        assert item["aliases"] == ["gpt-4o-mini"]


async def test_no_models_are_an_empty_list() -> None:
    async with start_gateway(answering(b""), models={}) as gateway:
        body = (await get(gateway, "/v1/models")).json()
        assert (body["data"], body["first_id"], body["last_id"]) == ([], None, None)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("m", "m"),
        ("org/model:7b", "org/model:7b"),
        ("org%2Fmodel%3A7b", "org/model:7b"),
        ("mod%C3%A8le", "modèle"),
        ("gpt-4o-mini", "m"),
    ],
)
async def test_one_model(path: str, name: str) -> None:
    async with start_gateway(answering(b"")) as gateway:
        answer = await get(gateway, f"/v1/models/{path}")
        assert (answer.status, answer.json()["id"]) == (200, name)


@pytest.mark.parametrize("path", ["nope", "", "org/model:7b/", "%ff", "a%00b"])
async def test_unknown_model_is_not_found(path: str) -> None:
    async with start_gateway(answering(b"")) as gateway:
        answer = await get(gateway, f"/v1/models/{path}")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_probes() -> None:
    async with start_gateway(answering(b"")) as gateway:
        assert (await get(gateway, "/health")).json() == {"status": "ok"}
        assert (await get(gateway, "/")).body == b"rota is running"
        answer = await ask(gateway.port, "HEAD", "/")
        assert (answer.status, answer.header("content-length")) == (200, "15")


async def test_asking_about_models_is_not_use() -> None:
    async with start_gateway(answering(b"")) as gateway:
        for target in ("/", "/health", "/v1/models", "/v1/models/m", STATUS, "/running", "/queue"):
            assert (await get(gateway, target)).status == 200
        assert not gateway.controller.calls
        assert not gateway.controller.asked


# case W11
@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("GET", "/rota/v1/unload", 405, "method_not_allowed"),
        ("GET", "/rota/v1/journal", 405, "method_not_allowed"),
        ("GET", "/rota/v1/nope", 404, "not_found"),
    ],
)
async def test_what_is_not_there(method: str, target: str, status: int, code: str) -> None:
    async with start_gateway(answering(b"")) as gateway:
        answer = await ask(gateway.port, method, target)
        assert answer.status == status
        assert answer.json()["error"]["code"] == code
        assert isinstance(answer.json()["error"]["message"], str)
        assert answer.header("x-request-id")
        if status == 405:
            assert answer.header("allow")


async def test_what_there_is_is_told() -> None:
    models = dict(make_config().models)
    models["m"] = replace(models["m"], jobs=JobsConfig("/v1/renders", "/v1/renders/{id}"))
    async with start_gateway(answering(b""), models=models) as gateway:
        message = (await get(gateway, "/" + "x" * 5_000)).json()["error"]["message"]
        assert message == (
            f"there is nothing at /{'x' * 199}; rota answers POST /v1/chat/completions, "
            "/v1/completions, /v1/embeddings, /v1/renders, GET /v1/models, /v1/renders/{id} "
            "and a web socket at /v1/realtime?model=NAME"
        )


SOCKET = {"connection": "upgrade", "upgrade": "websocket"}


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("gpt4o-mini", " Did you mean 'gpt-4o-mini'?"),
        ("ORG/model-7b", " Did you mean 'org/model:7b'?"),
        ("modele", " Did you mean 'modèle'?"),
        ("zzz", ""),
    ],
)
async def test_who_asks_for_what_is_not_there_is_told_so_in_one_way(
    asked: str, nearest: str
) -> None:
    async with start_gateway(answering(b"")) as gateway:
        port = gateway.port
        lease = f'{{"model": "{asked}", "ttl_s": 1}}'.encode()
        answers = [
            await get(gateway, f"/v1/models/{asked}"),
            await ask(port, "POST", CHAT, chat(asked)),
            await ask(port, "GET", f"/v1/realtime?model={asked}", headers=SOCKET),
            await ask(port, "POST", f"/rota/v1/models/{asked}/load"),
            await ask(port, "POST", "/rota/v1/leases", lease),
        ]
        said = {(answer.status, answer.json()["error"]["message"]) for answer in answers}
        plain = f"There is no model named {asked!r} here; GET /v1/models lists those there are."
        assert said == {(404, plain + nearest)}
        assert not gateway.controller.calls


# -- for this machine


async def test_status_is_the_controller_s() -> None:
    async with start_gateway(answering(b"")) as gateway:
        assert (await get(gateway, STATUS)).json() == gateway.controller.status()


@pytest.mark.parametrize("path", ["/rota/v1/queue", "/queue"])
async def test_queue_is_the_controller_s(path: str) -> None:
    async with start_gateway(answering(b"")) as gateway:
        assert (await get(gateway, path)).json() == {"queue": []}


async def test_explain_is_the_controller_s_for_any_id() -> None:
    async with start_gateway(answering(b"")) as gateway:
        assert (await get(gateway, "/rota/v1/explain/a%2Fb%20c~1")).json() == {"requests": []}
        assert gateway.controller.asked == [("explain", "a/b c~1")]


async def test_plan_is_the_controller_s_for_any_name_or_alias() -> None:
    async with start_gateway(answering(b"")) as gateway:
        path = "/rota/v1/models/{}/plan"
        assert (await get(gateway, path.format("m"))).json() == {"model": "m"}
        assert gateway.controller.asked == [("plan", "m")]
        assert (await get(gateway, path.format("no%2Fsuch"))).status == 404


async def test_journal_is_saved_when_it_is_posted() -> None:
    async with start_gateway(answering(b"")) as gateway:
        answer = await ask(gateway.port, "POST", "/rota/v1/journal")
        assert answer.json() == {"path": "/state/journals/now.jsonl"}


async def test_load() -> None:
    async with start_gateway(answering(b"")) as gateway:
        port, asked = gateway.port, gateway.controller.asked
        answer = await ask(port, "POST", "/rota/v1/models/org/model:7b/load")
        assert (answer.status, answer.json()) == (202, {"model": "org/model:7b", "state": "asked"})
        answer = await ask(port, "POST", "/rota/v1/models/gpt-4o-mini/load?wait=true")
        assert answer.json() == {"model": "m", "state": "ready", "replica": "m-1"}
        assert asked == [("ask_load", "org/model:7b"), ("load", "m")]
        assert (await ask(port, "POST", "/rota/v1/models/nope/load")).status == 404
        assert (await ask(port, "POST", "/rota/v1/models/m/load?wait=perhaps")).status == 400
        assert len(asked) == 2


async def test_refused_load_is_told_like_any_refusal() -> None:
    error = CapacityError("cooling", code="model_cooling", status=503, retry_after_s=5)
    async with start_gateway(answering(b"")) as gateway:
        gateway.controller.load_error = error
        for query in ("", "?wait=true"):
            answer = await ask(gateway.port, "POST", f"/rota/v1/models/m/load{query}")
            assert (answer.status, answer.header("retry-after")) == (503, "5")
            assert answer.json()["error"]["code"] == "model_cooling"


async def test_load_is_called_off_when_the_asker_leaves() -> None:
    async with start_gateway(answering(b"")) as gateway:
        gateway.controller.loading = asyncio.Event()
        async with connect(gateway.port) as wire:
            await wire.write(request_bytes("POST", "/rota/v1/models/m/load?wait=true", b"{}"))
            await until(lambda: ("load", "m") in gateway.controller.asked)
        await until(lambda: ("load withdrawn", "m") in gateway.controller.asked)


async def test_unload() -> None:
    async with start_gateway(answering(b"")) as gateway:
        port = gateway.port
        answer = await ask(port, "POST", "/rota/v1/models/m/unload")
        assert (answer.status, answer.json()["state"]) == (202, "asked")
        answer = await ask(port, "POST", "/rota/v1/models/m/unload?wait=true&grace_s=1.5")
        assert (answer.status, answer.json()["state"]) == (200, "unloaded")
        await ask(port, "POST", "/rota/v1/unload?grace_s=0&wait=1")
        answer = await get(gateway, "/unload")
        assert (answer.status, answer.body) == (200, b"OK")
        assert gateway.controller.asked == [
            ("unload", "m", None, False),
            ("unload", "m", 1_500, True),
            ("unload", None, 0, True),
            ("unload", None, None, True),
        ]
        for odd in ("x", "-1", "nan", "inf", "1e9", ""):
            answer = await ask(port, "POST", f"/rota/v1/unload?grace_s={odd}")
            assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_running_like_llama_swap() -> None:
    async with start_gateway(answering(b"")) as gateway:
        (running,) = (await get(gateway, "/running")).json()["running"]
        assert (running["model"], running["state"]) == ("m", "ready")
        assert (running["cmd"], running["proxy"]) == ("serve 'm x'", "http://127.0.0.1:2")


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"host": "localhost"}, True),
        ({"host": "LOCALHOST:99"}, True),
        ({"host": "127.9.9.9:1"}, True),
        ({"host": "[::1]:8080"}, True),
        ({"host": "[::ffff:127.0.0.1]"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "127.0.0.1.evil.example"}, False),
        ({"host": "localhost.evil.example"}, False),
        ({"host": "192.168.0.1"}, False),
        ({"host": "[::1"}, False),
        ({"host": ""}, False),
        ({"host": "user@127.0.0.1"}, False),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, True),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, False),
        ({"host": "localhost:1", "origin": "https://localhost:1"}, False),
        ({"host": "localhost", "origin": "http://evil.example"}, False),
        ({"host": "localhost", "origin": "null"}, False),
        ({"host": "localhost", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost", "sec-fetch-site": "same-site"}, False),
        ({"host": "localhost", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost", "sec-fetch-site": "none"}, True),
        ({"host": "localhost", "x-forwarded-for": "9.9.9.9", "forwarded": "for=9.9.9.9"}, True),
    ],
)
async def test_admin_guard_by_headers(headers: dict[str, str], is_let_in: bool) -> None:
    async with start_gateway(answering(b"")) as gateway:
        for target in (STATUS, "/unload"):
            answer = await get(gateway, target, **headers)
            assert answer.status == (200 if is_let_in else 403)
            if not is_let_in:
                assert answer.json()["error"]["code"] == "forbidden"
        assert bool(gateway.controller.asked) is is_let_in


@pytest.mark.parametrize(
    ("peer", "is_let_in"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        (None, False),
    ],
)
async def test_admin_guard_by_peer(peer: str | None, is_let_in: bool) -> None:
    """The peer decides, whatever it claims in headers; the public paths stay open to it."""
    claims = {"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1", "host": "localhost"}
    for target, expected in (
        (STATUS, 200 if is_let_in else 403),
        ("/running", 200 if is_let_in else 403),
        ("/queue", 200 if is_let_in else 403),
        ("/rota/v1/explain/q", 200 if is_let_in else 403),
        ("/rota/v1/models/m/plan", 200 if is_let_in else 403),
        ("/v1/models", 200),
        ("/health", 200),
    ):
        assert await call(target, peer, claims) == expected


async def test_admin_guard_lets_the_listened_name_in() -> None:
    headers = {"host": "gpu-box.lan:8080"}
    assert await call(STATUS, "127.0.0.1", headers, host="gpu-box.lan") == 200
    assert await call(STATUS, "127.0.0.1", headers, host="0.0.0.0") == 403


async def call(
    target: str, peer: str | None, headers: dict[str, str], host: str = "127.0.0.1"
) -> int:
    """The status of a GET, as from a peer that this machine cannot be."""
    controller = FakeController(make_config(host=host), engine=None)  # type: ignore[arg-type]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": target,
        "raw_path": target.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None if peer is None else (peer, 1),
        "server": ("127.0.0.1", 1),
        "state": {},
    }
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    app = App(controller)
    await app(scope, receive, send)
    await app.close()
    return statuses[0]


async def test_two_hosts_are_none() -> None:
    async with start_gateway(answering(b"")) as gateway, connect(gateway.port) as wire:
        await wire.write(
            b"GET /rota/v1/status HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        )
        assert (await wire.read_head()).status == 403


async def test_catalog_and_keys_are_those_of_the_present_configuration() -> None:
    async with start_gateway(answering(b"")) as gateway:
        controller = gateway.controller
        models = {name: entry for name, entry in controller.config.models.items() if name != "m"}
        key = KeyConfig("me", hashlib.sha256(b"foo").digest())
        controller.config = replace(controller.config, models=models)
        assert (await ask(gateway.port, "POST", CHAT, chat())).status == 404
        assert "m" not in [m["id"] for m in (await get(gateway, "/v1/models")).json()["data"]]
        controller.config = replace(controller.config, keys={"me": key}, body_bytes_max=1)
        assert (await get(gateway, "/v1/models")).status == 401
        with_key = {"authorization": "Bearer foo"}
        assert (await ask(gateway.port, "POST", CHAT, chat(), headers=with_key)).status == 413


async def test_without_a_file_there_is_nothing_to_load_again() -> None:
    async with start_gateway(answering(b"")) as gateway:
        answer = await ask(gateway.port, "POST", "/rota/v1/reload")
        assert (answer.status, answer.json()["error"]["code"]) == (409, "no_file")
        assert "configuration" not in (await get(gateway, STATUS)).json()
        assert (await get(gateway, "/rota/v1/reload")).status == 405


async def test_mistake_of_ours_beside_the_data_path(caplog: pytest.LogCaptureFixture) -> None:
    async with start_gateway(answering(b"")) as gateway:
        gateway.controller.load_error = KeyError("oops")
        answer = await ask(gateway.port, "POST", "/rota/v1/models/m/load")
        assert (answer.status, answer.json()["error"]["type"]) == (500, "api_error")
        request_id = answer.header("x-request-id")
        (record,) = [record for record in caplog.records if record.exc_info]
        assert str(request_id) in record.getMessage()
        assert (await ask(gateway.port, "POST", CHAT, chat())).status == 200
