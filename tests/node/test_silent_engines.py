"""An engine that runs and answers nothing is told of, once; its end is for others to order.
Real engines, stopped by a signal or hung by a knob.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rota.config.values import ModelConfig
from rota.core.events import ReplicaReady, ReplicaSilent, ReplicaStopped, StopCause
from tests.node.support import fake, model, scene, script

SILENT_MS = 800


async def test_a_stopped_engine_is_told_of_once_and_ends_by_its_grace(tmp_path: Path) -> None:
    # case W14, case W15
    config = model("a", fake(), silent_after_ms=SILENT_MS)
    async with scene(tmp_path, config) as it:
        replica = await it.up("a")
        os.kill(it.pid(replica), signal.SIGSTOP)
        silent = await it.next()
        assert isinstance(silent, ReplicaSilent)
        assert silent.replica == replica
        assert silent.detail.startswith(
            "a has answered nothing for 0.8 s: it accepts connections but does not answer /health"
        )
        assert silent.detail.endswith("model loaded")
        assert it.node.facts(replica)  # its end is for others to order
        it.stop(replica, grace_ms=200)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
    assert it.events.empty()


async def test_one_whose_port_is_closed_is_told_of(tmp_path: Path) -> None:
    text = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
asked, _ = server.accept()
server.close()
asked.recv(1000)
asked.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
time.sleep(600)
"""
    config = model("a", script(text, "${PORT}"), silent_after_ms=SILENT_MS)
    async with scene(tmp_path, config) as it:
        await it.up("a")
        silent = await it.next()
        assert isinstance(silent, ReplicaSilent)
        assert "nothing listens on port" in silent.detail


async def test_bytes_of_answers_count_while_its_health_hangs(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    config = model("a", fake("--probe-hangs-while", str(hangs)), silent_after_ms=SILENT_MS)
    async with scene(tmp_path, config) as it:
        replica = await it.up("a")
        hangs.touch()
        for _ in range(3 * SILENT_MS // 20):
            it.node.heard(replica)
            await asyncio.sleep(0.02)
        assert it.events.empty()
        assert isinstance(await it.next(), ReplicaSilent)  # since nobody heard it


@pytest.mark.parametrize(
    "config",
    [
        model("a", script("import time; time.sleep(60)", ready=None), silent_after_ms=40),
        model("a", fake(), silent_after_ms=0),
    ],
    ids=["nothing to ask", "never"],
)
async def test_nobody_listens_where_it_is_not_wanted(tmp_path: Path, config: ModelConfig) -> None:
    async with scene(tmp_path, config) as it:
        replica = await it.up("a")
        os.kill(it.pid(replica), signal.SIGSTOP)
        for _ in range(20):
            it.node.heard(replica)
            await asyncio.sleep(0.01)
        assert it.events.empty()


async def test_hearing_one_that_is_starting_or_gone_changes_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake())) as it:
        replica = it.start("a")
        it.node.heard(replica)
        assert await it.next() == ReplicaReady(replica)
        it.stop(replica)
        await it.stopped()
        it.node.heard(replica)
