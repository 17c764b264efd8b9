"""The verbs that ask a running rota, without one.

How: a small HTTP server on a free port answers what each test tells it to.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner, Result

from rota.cli import main

READY = {
    "name": "smol",
    "state": "ready",
    "scaling": {"kind": "on demand"},
    "waiting": 0,
    "reason": None,
    "replicas": [
        {
            "id": "r1",
            "phase": "ready",
            "pid": 123,
            "devices": ["cpu"],
            "memory_mib": [600],
            "in_flight": 0,
            "idle_s": 75.0,
            "why": "smol was not loaded",
        }
    ],
}
WAITING = {
    "name": "big",
    "aliases": ["large"],
    "state": "waiting",
    "scaling": {"kind": "on demand"},
    "waiting": 3,
    "reason": "waiting for smol to leave",
    "eta_s": 90,
    "replicas": [],
}
DEVICE = {"id": "cpu", "node": "local", "memory_mib": 1024, "used_mib": 600, "promised_mib": 0}
STATUS = {"models": [READY, WAITING], "devices": [DEVICE]}


class Fake(ThreadingHTTPServer):
    """Answers `(status, body)` per path; what it was asked is in `asked`."""

    daemon_threads = True

    def __init__(self, answers: dict[str, tuple[int, object]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.asked: list[str] = []
        self.bodies: list[object] = []
        self.may_load = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Fake)
        server.asked.append(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length") or 0)
        server.bodies.append(json.loads(self.rfile.read(length)) if length else None)
        if self.path.endswith("/status"):
            server.may_load.set()
        if "/load" in self.path:
            server.may_load.wait(60)  # so that the status is seen first
        status, body = server.answers[self.path.partition("?")[0]]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake(**answers: tuple[int, object]) -> Iterator[Fake]:
    paths = {f"/rota/v1/{name.replace('__', '/')}": answer for name, answer in answers.items()}
    with Fake(paths) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def run(server: Fake, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--url", server.url])


def refusal(code: str, message: str) -> dict[str, object]:
    return {"error": {"message": message, "code": code}}


def test_ps() -> None:
    with fake(status=(200, STATUS)) as server:
        result = run(server, "ps")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:4] == ["MODEL", "STATE", "REPLICA", "PID"]
    assert " ".join(lines[1]) == "smol ready r1 123 cpu 600 MiB idle 1 min 15 s"
    assert " ".join(lines[2]) == "big waiting 3"
    assert " ".join(lines[3]) == "waiting for smol to leave"
    assert " ".join(lines[4]) == "local/cpu: 600 MiB of 1 GiB used"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"in_flight": 2, "idle_s": None}, "2"),
        ({"in_flight": 2, "idle_s": None, "leases": 1}, "2, leased"),
        ({"idle_s": None, "leases": 1}, "leased"),
        ({"idle_s": 3.0, "leases": 0, "held_s": 7.5}, "idle 3.0 s, held 7.5 s"),
    ],
)
def test_ps_says_what_keeps_a_replica(facts: dict[str, object], said: str) -> None:
    replica = READY["replicas"][0] | facts  # type: ignore[index]
    models = [
        {**READY, "replicas": [replica], "pinned": True},
        {**WAITING, "reason": None, "waiting": 0, "pinned": True},
    ]
    with fake(status=(200, {"models": models, "devices": []})) as server:
        lines = run(server, "ps").stdout.splitlines()
    assert lines[1].startswith("smol   ready, pinned    r1  ")
    assert lines[1].endswith(f"600 MiB  {said}")
    assert lines[2].split() == ["big", "waiting,", "pinned"]


def test_ps_shows_nothing_that_a_terminal_obeys() -> None:
    odd = {**WAITING, "name": "[red]\x1b[2Jbig", "reason": "a\n    b\r\n  c"}
    with fake(status=(200, {"models": [odd], "devices": []})) as server:
        result = run(server, "ps")
    assert result.stdout.splitlines()[1].split() == ["[red]", "[2Jbig", "waiting", "3"]
    assert result.stdout.splitlines()[2:] == ["  a b c"]


def test_ps_of_long_last_words_keeps_its_columns() -> None:
    failed = {**WAITING, "state": "failed", "reason": None, "last_failure": "word " * 100}
    with fake(status=(200, {"models": [failed, READY], "devices": []})) as server:
        lines = run(server, "ps").stdout.splitlines()
    assert lines[2] == "  " + " ".join(["word"] * 100)  # whole, since this is no terminal
    assert all(len(line) < 80 for line in (*lines[:2], *lines[3:]))
    assert lines == [line.rstrip() for line in lines]


def test_ps_for_programs() -> None:
    with fake(status=(200, STATUS)) as server:
        result = run(server, "ps", "--json")
    assert json.loads(result.stdout) == STATUS


def test_load_says_what_happens_on_the_way() -> None:
    loaded = {"model": "big", "state": "ready", "replica": "r2"}
    with fake(status=(200, STATUS), models__large__load=(200, loaded)) as server:
        result = run(server, "load", "large")
    assert result.exit_code == 0
    assert server.asked[0] == "POST /rota/v1/models/large/load?wait=true"
    assert result.stderr.startswith("large: waiting 0.")
    assert result.stderr.endswith(", about 1 min 30 s to go: waiting for smol to leave\n")
    assert result.stdout.startswith("big is ready (r2) after ")


def test_load_does_not_say_twice_that_it_loads() -> None:
    loading = {**WAITING, "state": "loading", "reason": "big is loading", "eta_s": None}
    loaded = {"model": "big", "state": "ready", "replica": "r2"}
    status = {"models": [loading], "devices": []}
    with fake(status=(200, status), models__big__load=(200, loaded)) as server:
        result = run(server, "load", "big")
    assert re.fullmatch(r"big: loading \d+\.\d s\n", result.stderr)


def test_load_for_programs_says_nothing_else() -> None:
    loaded = {"model": "a/b", "state": "ready", "replica": "r2"}
    with fake(**{"models__a%2Fb__load": (200, loaded)}) as server:
        server.may_load.set()
        result = run(server, "load", "a/b", "--json")
    assert (json.loads(result.stdout), result.stderr) == (loaded, "")


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (404, "model_not_found", 1),
        (409, "model_off", 1),
        (500, "model_failed", 1),
        (503, "model_cooling", 1),
        (503, "no_room", 3),
        (503, "shutting_down", 3),
        (429, "queue_full", 3),
    ],
)
def test_load_is_refused(status: int, code: str, exit_code: int) -> None:
    with fake(models__a__load=(status, refusal(code, "no\nlast words"))) as server:
        server.may_load.set()
        result = run(server, "load", "a", "--json")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == "error: no\nerror: last words\n"


def test_unload() -> None:
    gone = {"model": "a", "state": "unloaded"}
    with fake(models__a__unload=(200, gone), unload=(200, {**gone, "model": None})) as server:
        assert run(server, "unload", "a", "--grace", "2.5").stdout == "a is down\n"
        assert run(server, "unload", "--all").stdout == "every model is down\n"
        assert json.loads(run(server, "unload", "a", "--json").stdout) == gone
    assert server.asked == [
        "POST /rota/v1/models/a/unload?wait=true&grace_s=2.5",
        "POST /rota/v1/unload?wait=true",
        "POST /rota/v1/models/a/unload?wait=true",
    ]


def test_nothing_answers() -> None:
    with socket.socket() as taken:  # bound and not listening: refused for sure
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(main, ["ps"], env={"ROTA_URL": url})
    assert result.exit_code == 4
    assert result.stderr == (
        f"error: no rota answers at {url} (connection refused); start one with `rota serve`, or "
        "say where it is with --url or ROTA_URL\n"
    )


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"", b'"text"', b"{}", b"[" * 99_999])
@pytest.mark.parametrize("status", [200, 404, 500])
def test_something_else_answers(status: int, body: bytes) -> None:
    with fake(status=(status, body)) as server:
        result = run(server, "ps")
    assert result.exit_code == 4
    assert f"what answers at {server.url} is not rota (HTTP {status})" in result.stderr


@pytest.mark.parametrize("verb", [("load", "a", "--json"), ("unload", "a")])
def test_something_else_answers_what_is_asked_for(verb: tuple[str, ...]) -> None:
    said = (200, {"ok": True})
    with fake(models__a__load=said, models__a__unload=said) as server:
        server.may_load.set()
        result = run(server, *verb)
    assert (result.exit_code, result.stdout) == (4, "")


def test_it_goes_away_while_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = threading.Thread(target=lambda: listener.accept()[0].close())
        closing.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = CliRunner().invoke(main, ["unload", "a", "--url", url])
        closing.join()
    assert result.exit_code == 4
    assert f"no rota answers at {url}" in result.stderr


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[::1", "http://a:b", "http://ä"])
def test_no_url(url: str) -> None:
    result = CliRunner().invoke(main, ["ps", "--url", url])
    assert result.exit_code == 1
    assert "is not a URL like http://127.0.0.1:8080" in result.stderr
