"""What a child will be started with: command line, environment, placeholders, devices.
Pure functions looked at from outside; nothing is started.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rota.config.values import CommandEngine, LlamaCppEngine, UrlEngine
from rota.engines.base import Endpoint
from rota.engines.launch import Spawned, endpoint_of, launch_for

GGUF = Path("/models/a.gguf")


def argv_of(engine: Spawned) -> str:
    return " ".join(launch_for(engine, model="org/m", port=4711, environ={}).argv)


def test_placeholders_are_filled_in_wherever_they_stand() -> None:
    engine = CommandEngine(
        ("serve", "--port=${PORT}", "--at", "127.0.0.1:${PORT}", "${MODEL}", "$PORT", "${OTHER}"),
        env={"WHERE": "http://127.0.0.1:${PORT}/${MODEL}"},
        cwd=Path("/srv"),
        ready="/ready",
    )
    launch = launch_for(engine, model="org/m", port=4711, environ={})
    assert launch.argv == (
        "serve", "--port=4711", "--at", "127.0.0.1:4711", "org/m", "$PORT", "${OTHER}",
    )  # fmt: skip
    assert launch.env == {"WHERE": "http://127.0.0.1:4711/org/m"}
    assert (launch.port, launch.ready, launch.cwd) == (4711, "/ready", Path("/srv"))


def test_a_child_gets_rotas_environment_less_its_own_part() -> None:
    environ = {"PATH": "/bin", "ROTA_KEY": "secret", "ROTATE": "kept", "A": "old"}
    engine = CommandEngine(("x",), env={"A": "new"})
    launch = launch_for(engine, model="m", port=1, environ=environ)
    assert launch.env == {"PATH": "/bin", "ROTATE": "kept", "A": "new"}


def test_devices_are_told_and_go_over_what_the_file_says() -> None:
    # case G4
    environ = {"CUDA_VISIBLE_DEVICES": "7"}
    engine = CommandEngine(("x",), env={"CUDA_VISIBLE_DEVICES": "5"})
    placed = launch_for(engine, model="m", port=1, visible=["GPU-b", "GPU-a"], environ=environ)
    assert placed.env["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    on_the_cpu = launch_for(CommandEngine(("x",)), model="m", port=1, environ=environ)
    assert on_the_cpu.env["CUDA_VISIBLE_DEVICES"] == "7"


def test_llama_cpp_is_embedded_unless_a_server_is_named() -> None:
    embedded = argv_of(LlamaCppEngine(GGUF, context=2048, parallel=3, threads=2, gpu_layers=0))
    assert embedded == (
        f"{sys.executable} -P -m rota.engines.llamacpp_server --model /models/a.gguf --alias org/m "
        "--port 4711 --context 2048 --parallel 3 --threads 2 --gpu-layers 0"
    )
    assert argv_of(LlamaCppEngine(GGUF, embedding=True)).endswith(" --embedding")


def test_llama_server_is_told_the_context_over_all_slots_and_stays_on_loopback() -> None:
    engine = LlamaCppEngine(
        GGUF, server=Path("/bin/llama-server"), context=2048, parallel=3, threads=2, gpu_layers=9,
        args=("--flash-attn", "on"),
    )  # fmt: skip
    assert argv_of(engine) == (
        "/bin/llama-server --model /models/a.gguf --alias org/m --host 127.0.0.1 --port 4711 "
        "--ctx-size 6144 --parallel 3 --threads 2 --n-gpu-layers 9 --flash-attn on"
    )
    embedding = argv_of(LlamaCppEngine(GGUF, server=Path("s"), context=512, embedding=True))
    assert "--embedding --pooling mean --batch-size 512 --ubatch-size 512" in embedding


def test_the_model_file_must_exist_before_a_start_makes_sense() -> None:
    launch = launch_for(LlamaCppEngine(GGUF), model="m", port=1, environ={})
    assert (launch.files, launch.ready) == ((GGUF,), "/health")


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.7:8000", Endpoint("10.0.0.7", 8000)),
        ("http://host/", Endpoint("host", 80)),
        ("https://host/some/base/", Endpoint("host", 443, "https", "/some/base")),
        ("http://[::1]:9/v", Endpoint("::1", 9, "http", "/v")),
    ],
)
def test_where_a_url_points(url: str, endpoint: Endpoint) -> None:
    assert endpoint_of(UrlEngine(url)) == endpoint


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", "http://host:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        endpoint_of(UrlEngine(url))
