"""A fake engine, for tests and benches: a real HTTP server process with knobs.

`python -m rota.testing.fake_engine --port N …` loads as long as it is told, takes memory that
it is told, and then speaks enough of OpenAI's wire format to stand in for llama.cpp: `/health`
(503 while loading), `/v1/models`, chat, completions, embeddings, jobs (`fake_jobs`) and web
sockets under any path (`fake_socket`); and `/stats` for tests.
Every way in which engines are known to misbehave is a flag.

Threads and sockets, not asyncio: that takes twice as long to import as this takes to be ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rota.testing import fake_jobs, fake_socket

Headers = dict[str, str]
LINE = b"\r\n"


class Engine:
    """What all connections share."""

    def __init__(self, knobs: argparse.Namespace) -> None:
        self.knobs = knobs
        self.ready = False
        self.slots = threading.BoundedSemaphore(knobs.slots)
        self.jobs = fake_jobs.FakeJobs(knobs.job_s, fails=knobs.job_fails)
        self.pids = [os.getpid()]
        self.memory = bytearray()
        self._lock = threading.Lock()
        self._stats: dict[str, Any] = {
            "requests": 0,  # posted work, of any kind
            "active": 0,
            "active_max": 0,
            "cancelled": 0,  # the client left before the end
            "polls": 0,
            "sockets": 0,  # open
            "last_headers": {},
            "last_body_sha256": "",
            "last_body_bytes": 0,
        }

    def stats(self) -> dict[str, Any]:
        with self._lock:
            more = {"devices": _devices(self.knobs), "jobs": self.jobs.under_way()}
            return {**self._stats, "pids": self.pids, **more}

    def count(self, key: str, by: int = 1) -> None:
        with self._lock:
            self._stats[key] += by
            self._stats["active_max"] = max(self._stats["active_max"], self._stats["active"])

    def note(self, headers: Headers, body: bytes) -> None:
        import hashlib

        with self._lock:
            self._stats["last_headers"] = headers
            self._stats["last_body_sha256"] = hashlib.sha256(body).hexdigest()
            self._stats["last_body_bytes"] = len(body)


def main() -> None:
    """Serve until a signal ends the process, or a knob does."""
    knobs = _knobs()
    engine = Engine(knobs)
    signal.signal(signal.SIGTERM, _on_sigterm(knobs))
    _say(f"fake engine, pid {os.getpid()}, port {knobs.port}")
    _crash_if(knobs.crash_at == "start", "told to crash at start")
    if knobs.grandchild:
        engine.pids.append(_grandchild(knobs.grandchild))
    if not knobs.bind_late:
        _listen(engine)
    _load(engine)
    engine.ready = True
    if knobs.bind_late:
        _listen(engine)
    _say("model loaded")
    _crash_if(knobs.crash_at == "ready", "told to crash when ready")
    while True:
        signal.pause()


def _knobs() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fake_engine", description=__doc__)
    add = parser.add_argument
    add("--port", type=int, required=True)
    add("--name", default="fake", help="the model name that answers carry")
    add("--load-s", type=float, default=0.0)
    add("--bind-late", action="store_true", help="refuse connections while loading, as vLLM does")
    add("--memory-mib", type=int, default=0, help="really take it")
    add("--device", type=Path, help="take memory from the fake devices in this file")
    add("--device-mib", type=int, default=0, help="on each of CUDA_VISIBLE_DEVICES, else the first")
    add("--release-late-s", type=float, default=0.0)
    add("--tokens", type=int, default=8)
    add("--tokens-per-second", type=float, default=0.0, help="0 = as fast as it can")
    add("--first-token-s", type=float, default=0.0)
    add("--slots", type=int, default=1_000)
    add("--ignore-sigterm", action="store_true")
    add("--exit-s", type=float, default=0.0, help="needs so long to end when it is asked to")
    add("--crash-at", default="", metavar="{start,load,ready,token:N}")
    add("--probe-hangs", action="store_true", help="/health gets a connection and no answer")
    add("--probe-hangs-while", type=Path, help="the same for as long as this file exists")
    add("--hangs-while", type=Path, help="nothing is answered for as long as this file exists")
    add("--load-line-every-s", type=float, default=0.0, help="writes while it loads")
    add("--grandchild", choices=["stays", "ignores-sigterm", "setsid"])
    add("--answer-status", type=int, default=200)
    add("--drop-after-tokens", type=int, help="reset the connection in mid-stream")
    add("--job-s", type=float, default=1.0, help="how long a job takes")
    add("--job-fails", action="store_true")
    add("--poll-status", type=int, default=200, help="what asking after a job is answered with")
    add("--log-flood-mib", type=int, default=0)
    return parser.parse_args()


def _on_sigterm(knobs: argparse.Namespace) -> Callable[[int, object], None] | signal.Handlers:
    def end_slowly(_number: int, _frame: object) -> None:
        time.sleep(knobs.exit_s)
        os._exit(0)

    if knobs.ignore_sigterm:
        return signal.SIG_IGN
    return end_slowly if knobs.exit_s else signal.SIG_DFL


def _load(engine: Engine) -> None:
    knobs = engine.knobs
    if knobs.device:
        from rota.testing.fake_devices import FakeDevices, OutOfMemory

        try:
            for device in _devices(knobs):
                FakeDevices(knobs.device).claim(
                    device, knobs.device_mib, late_s=knobs.release_late_s
                )
        except OutOfMemory as error:
            _crash_if(True, str(error))
    engine.memory = bytearray(knobs.memory_mib * 1024 * 1024)
    for page in range(0, len(engine.memory), 4096):
        engine.memory[page] = 1
    flood = b"x" * 1023 + b"\n"
    for _ in range(knobs.log_flood_mib * 1024):
        sys.stdout.buffer.write(flood)
    sys.stdout.flush()
    if knobs.crash_at == "load":
        time.sleep(knobs.load_s / 2)
        _crash_if(True, "out of memory: told to crash while loading")
    loaded_at = time.monotonic() + knobs.load_s
    while (left_s := loaded_at - time.monotonic()) > 0:
        time.sleep(min(left_s, knobs.load_line_every_s or left_s))
        if knobs.load_line_every_s:
            _say(f"loading, {left_s:.1f} s to go")


def _devices(knobs: argparse.Namespace) -> list[str]:
    from rota.testing.fake_devices import FakeDevices

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return visible.split(",")
    return FakeDevices(knobs.device).names()[:1] if knobs.device else []


def _grandchild(kind: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL if kind == "stays" else signal.SIG_IGN)
    if kind == "setsid":
        os.setsid()
    while True:
        signal.pause()


def _crash_if(crash: bool, why: str) -> None:
    if crash:
        _say(f"error: {why}")
        os._exit(3)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _listen(engine: Engine) -> None:
    server = socket.create_server(("127.0.0.1", engine.knobs.port), backlog=1024)

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(engine, connection), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _serve(engine: Engine, connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The client may leave at any moment, and that is all that these can mean.
    with contextlib.suppress(OSError, EOFError), connection:
        reader = connection.makefile("rb")
        while request := _read_request(reader):
            if engine.ready and fake_socket.is_wanted(request.headers):
                engine.note(request.headers, b"")
                engine.count("sockets")
                try:
                    fake_socket.serve(connection, reader, request.headers)
                finally:
                    engine.count("sockets", -1)
                return
            _answer(engine, Exchange(connection), request)


class Request(NamedTuple):
    method: str
    path: str
    headers: Headers
    body: bytes


def _read_request(reader: Any) -> Request | None:
    first = reader.readline().split()
    if len(first) != 3:
        return None
    headers: Headers = {}
    while (line := reader.readline()) not in (LINE, b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(reader.readline().split(b";")[0], 16):
            body += reader.read(size)
            reader.readline()
        reader.readline()
    else:
        body = reader.read(int(headers.get("content-length", 0)))
    return Request(first[0].decode(), first[1].decode().partition("?")[0], headers, body)


class Exchange:
    """The answering half of one request."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def json(self, content: object, status: int = 200) -> None:
        self._whole(json.dumps(content).encode(), b"application/json", status)

    def binary(self, body: bytes) -> None:
        self._whole(body, b"application/octet-stream", 200)

    def error(self, status: int, message: str, kind: str) -> None:
        self.json({"error": {"code": status, "message": message, "type": kind}}, status)

    def begin_stream(self) -> None:
        self._connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def event(self, content: object) -> None:
        data = b"data: " + (b"[DONE]" if content is None else json.dumps(content).encode())
        self._chunk(data + b"\n\n")

    def end_stream(self) -> None:
        self._connection.sendall(b"0\r\n\r\n")

    def reset(self) -> None:
        """Break the connection off as a dying host does: RST, no end of the body."""
        linger = struct.pack("ii", 1, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._connection.close()
        raise EOFError

    def wait(self, seconds: float) -> None:
        """Raises EOFError as soon as the client leaves."""
        deadline = time.monotonic() + seconds
        while True:
            left_s = deadline - time.monotonic()
            readable, _, _ = select.select([self._connection], [], [], max(0.0, left_s))
            if readable and not self._connection.recv(1, socket.MSG_PEEK):
                raise EOFError
            if left_s <= 0:
                return
            if readable:  # a pipelined request: let it lie
                time.sleep(min(left_s, 0.01))

    def _whole(self, body: bytes, kind: bytes, status: int) -> None:
        self._connection.sendall(
            b"HTTP/1.1 %d Fake\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"
            % (status, kind, len(body), body)
        )

    def _chunk(self, data: bytes) -> None:
        self._connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))


def _answer(engine: Engine, exchange: Exchange, request: Request) -> None:
    _hang_while(engine.knobs.hangs_while, exchange)
    path = request.path
    work = WORK.get(path)
    if request.method == "POST" and work:
        engine.note(request.headers, request.body)
        _work(engine, exchange, work, request.body)
    elif path in ("/health", "/v1/health"):
        if engine.knobs.probe_hangs:
            exchange.wait(3600)
        _hang_while(engine.knobs.probe_hangs_while, exchange)
        if engine.ready:
            exchange.json({"status": "ok"})
        else:
            exchange.error(503, "Loading model", "unavailable_error")
    elif path == "/v1/models":
        model = {"id": engine.knobs.name, "object": "model", "created": 0, "owned_by": "fake"}
        exchange.json({"object": "list", "data": [model]})
    elif path.startswith(fake_jobs.PATHS):
        _answer_about_job(engine, exchange, request)
    elif path == "/stats":
        exchange.json(engine.stats())
    else:
        exchange.error(404, f"no such path: {path}", "not_found_error")


def _hang_while(path: Path | None, exchange: Exchange) -> None:
    while path and path.exists():
        exchange.wait(0.01)


def _answer_about_job(engine: Engine, exchange: Exchange, request: Request) -> None:
    """A POST that begins one, and what is asked below the same path."""
    path = next(path for path in fake_jobs.PATHS if request.path.startswith(path))
    job, _, below = request.path.removeprefix(path).strip("/").partition("/")
    engine.note(request.headers, request.body)
    if request.method == "POST" and not job:
        engine.count("requests")
        return exchange.json(engine.jobs.begin(path))
    engine.count("polls")
    if engine.knobs.poll_status != 200:
        return exchange.error(engine.knobs.poll_status, "told to answer so", "fake_error")
    asked = engine.jobs.drop if request.method == "DELETE" else engine.jobs.show
    found = asked(job)
    if found is None or (below and not engine.jobs.is_done(job)):
        return exchange.error(404, f"no such job: {job}", "not_found_error")
    return exchange.binary(fake_jobs.CONTENT) if below else exchange.json(found)


def _work(engine: Engine, exchange: Exchange, work: Work, body: bytes) -> None:
    engine.count("requests")
    try:
        asked = json.loads(body)
        assert isinstance(asked, dict)
    except (ValueError, AssertionError):
        return exchange.error(400, "the body is not a JSON object", "invalid_request_error")
    if not engine.ready:
        return exchange.error(503, "Loading model", "unavailable_error")
    if engine.knobs.answer_status != 200:
        return exchange.error(engine.knobs.answer_status, "told to answer so", "fake_error")
    try:
        while not engine.slots.acquire(blocking=False):
            exchange.wait(0.005)
        engine.count("active")
        try:
            return work(engine, exchange, asked)
        finally:
            engine.count("active", -1)
            engine.slots.release()
    except (OSError, EOFError):
        engine.count("cancelled")
        raise


def _chat(engine: Engine, exchange: Exchange, asked: dict[str, Any]) -> None:
    call = _tool_call(asked)
    called = {"tool_calls": [call]} if call else {}
    ending = "tool_calls" if call else "stop"

    def full(text: str, usage: object) -> dict[str, Any]:
        message = {"role": "assistant", "content": text} | called
        choice = {"index": 0, "message": message, "finish_reason": ending}
        return {"object": "chat.completion", "choices": [choice], "usage": usage}

    def piece(text: str | None, finish: str | None) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""} | called if text is None else {"content": text}
        choice = {"index": 0, "delta": {} if finish else delta, "finish_reason": finish and ending}
        return {"object": "chat.completion.chunk", "choices": [choice]}

    _generate(engine, exchange, asked, full, piece)


def _tool_call(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The first of the tools offered is called, unless the last message is what one said."""
    tools, messages = asked.get("tools"), asked.get("messages")
    if not tools or (messages and messages[-1].get("role") == "tool"):
        return None
    function = {"name": tools[0]["function"]["name"], "arguments": "{}"}
    return {"index": 0, "id": "call-1", "type": "function", "function": function}


def _complete(engine: Engine, exchange: Exchange, asked: dict[str, Any]) -> None:
    def full(text: str, usage: object) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def piece(text: str | None, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text or "", "finish_reason": finish, "logprobs": None}
        return {"object": "text_completion", "choices": [choice]}

    _generate(engine, exchange, asked, full, piece)


def _generate(
    engine: Engine,
    exchange: Exchange,
    asked: dict[str, Any],
    full: Callable[[str, object], dict[str, Any]],
    piece: Callable[[str | None, str | None], dict[str, Any]],
) -> None:
    knobs = engine.knobs
    streamed = bool(asked.get("stream"))
    tokens = min(int(asked.get("max_tokens") or knobs.tokens), knobs.tokens)
    words = [f"word{n} " for n in range(tokens)]
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    head = {"id": "fake-1", "created": int(time.time()), "model": asked.get("model", knobs.name)}
    with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
    no_usage = {"usage": None} if with_usage else {}
    exchange.wait(knobs.first_token_s)
    if streamed:
        exchange.begin_stream()
        exchange.event(head | piece(None, None) | no_usage)
    for n, word in enumerate(words):
        _crash_if(knobs.crash_at == f"token:{n}", f"told to crash at token {n}")
        _hang_while(knobs.hangs_while, exchange)
        if knobs.drop_after_tokens == n:
            exchange.reset()
        if knobs.tokens_per_second:
            exchange.wait(1 / knobs.tokens_per_second)
        if streamed:
            exchange.event(head | piece(word, None) | no_usage)
    if not streamed:
        return exchange.json(head | full("".join(words), usage))
    exchange.event(head | piece("", "stop") | no_usage)
    if with_usage:
        exchange.event(head | piece("", None) | {"choices": [], "usage": usage})
    exchange.event(None)
    return exchange.end_stream()


def _embed(engine: Engine, exchange: Exchange, asked: dict[str, Any]) -> None:
    exchange.wait(engine.knobs.first_token_s)
    given = asked.get("input", "")
    inputs = given if isinstance(given, list) and not _is_tokens(given) else [given]
    data = [
        {"object": "embedding", "index": n, "embedding": [float(n), 0.5, 0.25]}
        for n in range(len(inputs))
    ]
    usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
    model = asked.get("model", engine.knobs.name)
    exchange.json({"object": "list", "data": data, "model": model, "usage": usage})


def _is_tokens(given: list[Any]) -> bool:
    return bool(given) and all(isinstance(one, int) for one in given)


Work = Callable[[Engine, Exchange, dict[str, Any]], None]
WORK: dict[str, Work] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _complete,
    "/v1/embeddings": _embed,
}


if __name__ == "__main__":
    main()
