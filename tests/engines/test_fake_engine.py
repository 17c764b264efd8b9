"""The fake engine speaks the wire format that real ones do, and misbehaves as it is told.
One real process per knob; spoken to over plain sockets and http.client.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from rota.testing.fake_devices import FakeDevices, OutOfMemory

PATIENCE_S = 30.0


class Fake:
    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.port = port
        self.process = process

    def post(self, path: str, body: object) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body), {"X-Test": "yes"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def fake(*knobs: str, wait: bool = True, **env: str) -> Iterator[Fake]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "rota.testing.fake_engine", "--port", str(port), *knobs]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    assert process.stdout is not None
    try:
        while wait and (line := process.stdout.readline()):
            if line == "model loaded\n":
                break
        yield Fake(port, process)
    finally:
        process.kill()
        process.communicate()


def events_of(body: bytes) -> list[Any]:
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_chat_streamed_is_what_clients_rely_on() -> None:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    with fake("--tokens", "3") as engine:
        status, answer = engine.post("/v1/chat/completions", body)
        first, *words, last, usage = events_of(answer)
    assert status == 200
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert [word["choices"][0]["delta"]["content"] for word in words] == [
        "word0 ", "word1 ", "word2 ",
    ]  # fmt: skip
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert all(one["usage"] is None for one in [first, *words, last])
    assert {(one["id"], one["created"], one["model"]) for one in [first, *words, last, usage]} == {
        (first["id"], first["created"], "m")
    }


def test_whole_answers() -> None:
    with fake("--tokens", "2", "--name", "n") as engine:
        _, chat = engine.post("/v1/chat/completions", {"model": "m"})
        message = json.loads(chat)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "word0 word1 "}
        _, text = engine.post("/v1/completions", {"prompt": "p", "max_tokens": 1})
        assert json.loads(text)["choices"][0]["text"] == "word0 "
        assert json.loads(text)["model"] == "n"
        _, streamed = engine.post("/v1/completions", {"stream": True})
        assert [one["choices"][0]["text"] for one in events_of(streamed)][1:3] == [
            "word0 ", "word1 ",
        ]  # fmt: skip
        _, several = engine.post("/v1/embeddings", {"input": ["a", "b"]})
        assert [one["index"] for one in json.loads(several)["data"]] == [0, 1]
        _, tokens = engine.post("/v1/embeddings", {"input": [1, 2, 3]})
        assert len(json.loads(tokens)["data"]) == 1
        assert engine.get("/v1/models")[1]["data"][0]["id"] == "n"
        assert engine.get("/nothing")[0] == 404
        assert engine.post("/v1/completions", [])[0] == 400


def test_a_tool_that_is_offered_is_called_until_it_has_said_something() -> None:
    path = "/v1/chat/completions"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    told = {"messages": [{"role": "tool", "content": "nothing"}], "tools": tools}
    with fake() as engine:
        choice = json.loads(engine.post(path, asked)[1])["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
        _, streamed = engine.post(path, asked | {"stream": True})
        assert b'"name": "look"' in streamed
        assert b'"finish_reason": "tool_calls"' in streamed
        assert json.loads(engine.post(path, told)[1])["choices"][0]["finish_reason"] == "stop"


def test_it_counts_what_it_sees() -> None:
    with fake() as engine:
        body = {"model": "m", "long": "x" * 100_000}
        engine.post("/v1/chat/completions", body)
        _until(lambda: engine.get("/stats")[1]["active"] == 0)  # a moment after its answer
        _, stats = engine.get("/stats")
    assert (stats["requests"], stats["active"], stats["active_max"]) == (1, 0, 1)
    assert stats["last_headers"]["x-test"] == "yes"
    assert stats["last_body_sha256"] == hashlib.sha256(json.dumps(body).encode()).hexdigest()
    assert stats["pids"] == [engine.process.pid]


def test_a_chunked_body_is_read() -> None:
    with fake() as engine:
        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=PATIENCE_S)
        parts = iter([b'{"model"', b': "m"}'])
        connection.request("POST", "/v1/completions", parts, encode_chunked=True)
        assert connection.getresponse().status == 200
        connection.close()
        assert engine.get("/stats")[1]["last_body_bytes"] == 14


def test_a_client_that_leaves_is_noticed_and_counted() -> None:
    with fake("--tokens", "1000000", "--tokens-per-second", "100") as engine:
        for stream in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=PATIENCE_S)
            connection.request("POST", "/v1/completions", json.dumps({"stream": stream}))
            _until(lambda: engine.get("/stats")[1]["active"] == 1)
            connection.close()
            _until(lambda: engine.get("/stats")[1]["active"] == 0)
        assert engine.get("/stats")[1]["cancelled"] == 2


def test_loading_answers_503_and_work_waits_for_slots() -> None:
    with fake("--load-s", "600", wait=False) as engine:
        _until(lambda: _accepts(engine.port))
        assert engine.get("/health")[0] == 503
        assert engine.post("/v1/completions", {})[0] == 503
    with fake("--slots", "1", "--first-token-s", "0.05") as engine:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda _: engine.post("/v1/completions", {})[0], range(4))
        assert list(answers) == [200] * 4
        assert engine.get("/stats")[1]["active_max"] == 1


def test_it_fails_as_it_is_told() -> None:
    with fake("--answer-status", "418") as engine:
        status, body = engine.post("/v1/completions", {})
        assert (status, json.loads(body)["error"]["code"]) == (418, 418)
    with fake("--drop-after-tokens", "2") as engine:
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            engine.post("/v1/completions", {"stream": True})
        assert engine.get("/health")[0] == 200
    with fake("--crash-at", "token:1") as engine:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            engine.post("/v1/completions", {})
        assert engine.wait() == 3
    for step in ("start", "load", "ready"):
        with fake("--crash-at", step, wait=False) as engine:
            assert engine.wait() == 3
    with fake("--ignore-sigterm") as engine:
        engine.process.terminate()
        assert engine.get("/health")[0] == 200


def test_memory_comes_from_the_shared_devices_and_goes_back(tmp_path: Path) -> None:
    devices = FakeDevices.create(tmp_path / "devices.json", {"gpu0": 100, "gpu1": 100})
    knobs = ("--device", str(tmp_path / "devices.json"), "--device-mib", "60")
    with fake(*knobs) as first:
        assert devices.used_mib() == {"gpu0": 60, "gpu1": 0}
        with fake(*knobs, CUDA_VISIBLE_DEVICES="gpu1") as second:
            assert devices.used_mib() == {"gpu0": 60, "gpu1": 60}
            assert second.get("/stats")[1]["devices"] == ["gpu1"]
        with fake(*knobs, wait=False) as third:
            assert third.wait() == 3
            output = third.process.stdout
            assert output is not None
            assert "out of memory: tried to allocate 60 MiB on gpu0" in output.read()
        first.process.kill()
        first.wait()
    assert devices.used_mib() == {"gpu0": 0, "gpu1": 0}
    assert devices.peak_mib() == {"gpu0": 60, "gpu1": 60}


def test_memory_can_come_back_late(tmp_path: Path) -> None:
    # case W26
    devices = FakeDevices.create(tmp_path / "devices.json", {"gpu0": 100})
    knobs = ("--device", str(tmp_path / "devices.json"), "--device-mib", "60")
    with fake(*knobs, "--release-late-s", "0.2") as engine:
        engine.process.kill()
        engine.wait()
        assert devices.used_mib() == {"gpu0": 60}
    _until(lambda: devices.used_mib() == {"gpu0": 0})


def test_a_claim_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    devices = FakeDevices.create(tmp_path / "devices.json", {"gpu0": 100})
    devices.claim("gpu0", 80)
    with pytest.raises(OutOfMemory, match="20 MiB of 100 MiB are free"):
        devices.claim("gpu0", 30)
    assert devices.names() == ["gpu0"]


def test_its_memory_is_really_taken() -> None:
    with fake("--memory-mib", "50") as engine:
        status = Path(f"/proc/{engine.process.pid}/status").read_text()
    (resident,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    assert int(resident.split()[1]) > 50 * 1024


def test_it_ends_as_slowly_as_it_is_told_to() -> None:
    with fake("--exit-s", "0.3") as engine:
        engine.process.terminate()
        assert engine.get("/health") == (200, {"status": "ok"})  # until then it serves
        assert engine.wait() == 0


def test_a_grandchild_stays_when_it_is_told_to() -> None:
    with fake("--grandchild", "ignores-sigterm") as engine:
        own, grandchild = engine.get("/stats")[1]["pids"]
        try:
            engine.process.terminate()
            engine.wait()
            os.kill(grandchild, signal.SIGTERM)
            assert Path(f"/proc/{grandchild}").exists()
            assert own == engine.process.pid
        finally:
            os.kill(grandchild, signal.SIGKILL)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_hangs_for_as_long_as_a_file_exists(tmp_path: Path) -> None:
    all_hangs, probe_hangs = tmp_path / "all", tmp_path / "probe"
    with fake("--hangs-while", str(all_hangs), "--probe-hangs-while", str(probe_hangs)) as it:
        for path, asked in ((all_hangs, "/stats"), (probe_hangs, "/health")):
            path.touch()
            with socket.create_connection(("127.0.0.1", it.port), PATIENCE_S) as client:
                client.sendall(f"GET {asked} HTTP/1.1\r\n\r\n".encode())
                client.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                if path == probe_hangs:
                    assert it.get("/stats")[0] == 200
                path.unlink()
                client.settimeout(PATIENCE_S)
                assert client.recv(12) == b"HTTP/1.1 200"


def test_it_writes_while_it_loads() -> None:
    with fake("--load-s", "0.2", "--load-line-every-s", "0.05", wait=False) as it:
        assert it.process.stdout is not None
        lines = [it.process.stdout.readline() for _ in range(3)]
    assert lines[1].startswith("loading, ")


def test_a_job_is_done_after_its_time_and_forgotten_when_deleted() -> None:
    with fake("--job-s", "0.2") as engine:
        status, body = engine.post("/v1/videos", {"prompt": "x"})
        job = json.loads(body)
        assert (status, job["status"]) == (200, "in_progress")
        assert engine.get(f"/v1/videos/{job['id']}/content")[0] == 404
        deadline = time.monotonic() + PATIENCE_S
        while engine.get(f"/v1/videos/{job['id']}")[1]["status"] != "completed":
            assert time.monotonic() < deadline
        assert engine.get("/stats")[1]["jobs"] == 0
        assert engine.get("/v1/videos/none")[0] == 404


@pytest.mark.parametrize(
    ("knobs", "expected"), [(("--job-fails",), "failed"), (("--poll-status", "500"), None)]
)
def test_a_job_that_ends_badly(knobs: tuple[str, ...], expected: str | None) -> None:
    with fake("--job-s", "0", *knobs) as engine:
        job = json.loads(engine.post("/v1/jobs", {})[1])["id"]
        status, said = engine.get(f"/v1/jobs/{job}")
        assert (status, said.get("status")) == (200 if expected else 500, expected)


def test_a_web_socket_echoes_and_obeys() -> None:
    offered = [Subprotocol("a"), Subprotocol("b")]
    with (
        fake() as engine,
        connect(f"ws://127.0.0.1:{engine.port}/x", subprotocols=offered) as client,
    ):
        assert client.subprotocol == "b"
        for message in ("text", b"bytes", b"\0" * 70_000):
            client.send(message)
            assert client.recv(PATIENCE_S) == message
        assert engine.get("/stats")[1]["sockets"] == 1
        assert client.ping().wait(PATIENCE_S)
        client.send("close 4001 bye")
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(PATIENCE_S)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "bye")
