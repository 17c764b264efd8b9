"""What a replica's life looks like from outside: each start ends in exactly one stop, with why.
Real processes (`rota.testing.fake_engine`) under real guards; only the events are looked at.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
import uvloop

from rota.config.values import CommandEngine, DeviceConfig, LlamaCppEngine, UrlEngine
from rota.core.events import ReplicaReady, ReplicaStopped, Running, StopCause
from rota.core.types import Phase, Placement
from rota.engines.base import Endpoint
from rota.errors import ReplicaError
from tests.node.support import all_end, fake, model, scene, script, until


async def _starts_serves_and_stops(state: Path) -> None:
    async with scene(state, model("a/b", fake("--load-s", "0.1"))) as it:
        replica = it.start("a/b")
        with pytest.raises(ReplicaError):
            it.node.endpoint(replica)  # not before it is ready
        assert await it.next() == ReplicaReady(replica)
        facts = it.node.facts(replica)
        assert facts is not None
        assert it.node.endpoint(replica) == Endpoint("127.0.0.1", facts.port or 0)
        assert str(facts.port) in facts.command
        assert facts.pid in (await it.ask(replica, "/stats"))["pids"]
        assert it.node.tail(replica, 1) == ["model loaded"]
        assert facts.log_path.read_text().endswith("model loaded\n")
        everyone = it.all_of(replica)
        it.stop(replica)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not any(one.is_left() for one in everyone)  # reaped too, before it was said
        assert it.node.facts(replica) is None
        assert it.node.tail(replica, 5) == []
        with pytest.raises(ReplicaError, match="gone"):
            it.node.endpoint(replica)
        it.stop(replica)  # changes nothing
    assert it.events.empty()


async def test_it_starts_serves_and_stops(tmp_path: Path) -> None:
    await _starts_serves_and_stops(tmp_path)


def test_it_does_so_on_uvloop_too(tmp_path: Path) -> None:
    uvloop.run(_starts_serves_and_stops(tmp_path))


async def test_ready_at_once_when_nothing_is_to_be_probed(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", script("import time; time.sleep(60)", ready=None))) as it:
        await it.up("a")


async def test_connections_refused_while_loading_only_mean_not_yet(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--load-s", "0.3", "--bind-late"))) as it:
        await it.up("a")


async def test_two_starts_one_after_the_other_share_the_log(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake())) as it:
        for _ in range(2):
            replica = await it.up("a")
            it.stop(replica)
            await it.stopped()
    logs = list((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == ["a.log"]
    assert logs[0].read_text().count("model loaded") == 2


async def test_replicas_side_by_side_share_neither_port_nor_log(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake())) as it:
        replicas = [it.start("a") for _ in range(5)]
        assert {await it.next() for _ in replicas} == {ReplicaReady(one) for one in replicas}
        facts = [one for one in map(it.node.facts, replicas) if one]
        assert len({one.port for one in facts}) == 5
        assert {one.log_path.name for one in facts} == {
            "a.log", "a.2.log", "a.3.log", "a.4.log", "a.5.log",
        }  # fmt: skip


async def test_a_crash_says_how_and_with_which_last_words(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake())) as it:
        replica = await it.up("a")
        os.kill(it.pid(replica), signal.SIGSEGV)
        stopped = await it.stopped()
    assert (stopped.cause, stopped.permanent) == (StopCause.CRASHED, False)
    assert stopped.detail.startswith("a was killed by SIGSEGV. Its last lines:\n")
    assert stopped.detail.endswith("model loaded")


async def test_a_crash_while_loading_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--crash-at", "load"))) as it:
        replica = it.start("a")
        stopped = await it.stopped()
    assert (stopped.replica, stopped.cause) == (replica, StopCause.CRASHED)
    assert "exited with code 3 while it was starting" in stopped.detail
    assert stopped.detail.endswith("error: out of memory: told to crash while loading")


async def test_an_exit_with_code_0_is_a_crash_too(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", script("pass"))) as it:
        it.start("a")
        stopped = await it.stopped()
    assert stopped.cause is StopCause.CRASHED
    assert stopped.detail == "a exited with code 0 while it was starting"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (CommandEngine(("no-such-command",)), "No such file or directory: no-such-command"),
        (CommandEngine(("/dev/null",)), "Permission denied: /dev/null"),
        (CommandEngine(("sleep", "60"), cwd=Path("/no/such/folder")), "/no/such/folder"),
        (CommandEngine(("sleep", "6\0")), "null byte"),
        (LlamaCppEngine(Path("/no/such.gguf")), "no such file: /no/such.gguf"),
    ],
)  # fmt: skip
async def test_what_cannot_be_started_is_refused_for_good(
    tmp_path: Path, engine: CommandEngine | LlamaCppEngine, words: str
) -> None:
    async with scene(tmp_path, model("a", engine)) as it:
        replica = it.start("a")
        stopped = await it.stopped()
    assert (stopped.replica, stopped.cause) == (replica, StopCause.REFUSED)
    assert stopped.permanent
    assert stopped.detail.startswith("a could not be started: ")
    assert words in stopped.detail


async def test_a_probe_that_hangs_is_cut_off_and_the_start_timeout_holds(tmp_path: Path) -> None:
    # case W30, case L2
    hangs = model("hangs", fake("--probe-hangs"), start_timeout_ms=2_000)
    async with scene(tmp_path, hangs, model("next", fake())) as it:
        replica = it.start("hangs")
        await until(lambda: bool(it.node.tail(replica, 1)), "its first line")
        everyone = it.all_of(replica)
        stopped = await it.stopped()
        assert stopped.cause is StopCause.NEVER_READY
        assert "hangs was not ready after 2 s" in stopped.detail
        assert "does not answer /health" in stopped.detail
        assert not any(one.is_left() for one in everyone)
        await it.up("next")


async def test_what_it_writes_gives_a_start_more_time(tmp_path: Path) -> None:
    # case W29
    busy = fake("--load-s", "4", "--load-line-every-s", "0.1")
    async with scene(tmp_path, model("a", busy, start_timeout_ms=2_000)) as it:
        await it.up("a")


async def test_but_not_for_ever(tmp_path: Path) -> None:
    # case W29
    busy = fake("--load-s", "600", "--load-line-every-s", "0.1")
    config = model("a", busy, start_timeout_ms=1_000, start_timeout_ms_max=2_500)
    async with scene(tmp_path, config) as it:
        replica = it.start("a")
        await until(lambda: bool(it.node.tail(replica, 1)), "its first line")
        everyone = it.all_of(replica)
        stopped = await it.stopped()
        assert stopped.cause is StopCause.NEVER_READY
        assert "a was not ready after 2.5 s in all (`start_timeout_max`)" in stopped.detail
        assert "/health answers 503. Its last lines:\n" in stopped.detail
        assert stopped.detail.endswith("s to go")
        assert not any(one.is_left() for one in everyone)


async def test_one_that_falls_silent_while_it_starts_is_told_so(tmp_path: Path) -> None:
    # case W29
    text = """
import sys, time
for n in range(10): print("downloading", n, flush=True); time.sleep(0.1)
time.sleep(600)
"""
    async with scene(tmp_path, model("a", script(text), start_timeout_ms=1_000)) as it:
        it.start("a")
        stopped = await it.stopped()
    assert stopped.cause is StopCause.NEVER_READY
    assert "not ready after 1 s without output (`start_timeout`)" in stopped.detail
    assert stopped.detail.endswith("downloading 9")


async def test_a_node_says_what_it_was_told_to_run(tmp_path: Path) -> None:
    slow = fake("--load-s", "600", "--ignore-sigterm")
    async with scene(tmp_path, model("up", fake()), model("slow", slow)) as it:
        assert it.node.joined().running == ()
        up, starting, stopping = await it.up("up"), it.start("slow"), it.start("slow")
        await until(lambda: bool(it.node.tail(stopping, 1)), "its first line")
        it.stop(stopping, grace_ms=600_000)
        placement = Placement("here", (), ())
        assert it.node.joined().running == (
            Running(up, "up", placement, Phase.READY),
            Running(starting, "slow", placement, Phase.STARTING),
            Running(stopping, "slow", placement, Phase.STOPPING),
        )
        it.stop(stopping, grace_ms=0)
        assert (await it.stopped()).replica == stopping
        os.kill(it.pid(up), signal.SIGKILL)
        assert (await it.stopped()).replica == up
        assert [one.replica for one in it.node.joined().running] == [starting]


async def test_one_that_never_listens_is_told_so(tmp_path: Path) -> None:
    async with scene(
        tmp_path, model("a", script("import time; time.sleep(60)"), start_timeout_ms=300)
    ) as it:
        it.start("a")
        stopped = await it.stopped()
    assert stopped.cause is StopCause.NEVER_READY
    assert "nothing listens on port" in stopped.detail


async def test_a_wrong_readiness_path_is_named_with_its_answer(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake(ready="/wrong"), start_timeout_ms=2_000)) as it:
        it.start("a")
        stopped = await it.stopped()
    assert "/wrong answers 404" in stopped.detail


async def test_a_stop_in_the_midst_of_a_load_is_heeded_at_once(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--load-s", "600"))) as it:
        replica = it.start("a")
        await until(lambda: bool(it.node.tail(replica, 1)), "its first line")
        everyone = it.all_of(replica)
        it.stop(replica)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        await all_end(everyone)


async def test_a_stop_right_behind_the_start_is_heeded(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--load-s", "600"))) as it:
        replica = it.start("a")
        it.stop(replica)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        replica = it.start("a")
        await asyncio.sleep(0)  # the life has begun, its guard not yet
        it.stop(replica)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)


@pytest.mark.parametrize("turns", range(12))
async def test_a_stop_at_any_step_of_a_start_ends_in_one_stop(tmp_path: Path, turns: int) -> None:
    async with scene(tmp_path, model("a", fake())) as it:
        replica = it.start("a")
        for _ in range(turns * 3):
            await asyncio.sleep(0.001)
        it.stop(replica, grace_ms=1_000)
        event = await it.next()
        if event == ReplicaReady(replica):
            event = await it.next()
        assert event == ReplicaStopped(replica, StopCause.ASKED)
    assert it.events.empty()


async def test_a_second_stop_can_only_shorten_the_grace(tmp_path: Path) -> None:
    # case Z3
    async with scene(tmp_path, model("a", fake("--ignore-sigterm"))) as it:
        replica = await it.up("a")
        it.stop(replica, grace_ms=600_000)
        await asyncio.sleep(0.05)
        it.stop(replica, grace_ms=50)
        it.stop(replica, grace_ms=600_000)
        assert (await it.stopped()).cause is StopCause.ASKED


async def test_close_ends_everything(tmp_path: Path) -> None:
    stubborn = model("stubborn", fake("--ignore-sigterm", "--grandchild", "setsid"))
    async with scene(tmp_path, stubborn, model("loading", fake("--load-s", "600"))) as it:
        replica = await it.up("stubborn")
        loading = it.start("loading")
        await until(lambda: bool(it.node.tail(loading, 1)), "its first line")
        everyone = it.all_of(replica) | it.all_of(loading)
        assert len(everyone) >= 3
    assert not any(one.is_left() for one in everyone)
    assert not list((tmp_path / "replicas").iterdir())
    assert {(await it.stopped()).cause for _ in range(2)} == {StopCause.ASKED}


async def test_placement_reaches_the_child(tmp_path: Path) -> None:
    # case G4
    cards = [DeviceConfig(f"gpu{n}", 1000, f"GPU-{n}") for n in range(3)]
    text = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); os.kill(0, 9)"
    async with scene(tmp_path, model("a", script(text)), devices=cards) as it:
        it.start("a", "gpu2", "gpu0")
        assert (await it.stopped()).detail.endswith("\nGPU-2,GPU-0")


async def test_a_machine_without_stated_devices_offers_its_memory(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        (device,) = it.node.joined().devices
    assert device.id == "cpu"
    assert device.memory_mib > 0


async def test_a_url_is_asked_once_and_never_started(tmp_path: Path) -> None:
    async with scene(tmp_path, model("served", fake())) as served:
        port = served.node.endpoint(await served.up("served")).port
        urls = {
            "plain": UrlEngine(f"http://127.0.0.1:{port}/base/"),
            "probed": UrlEngine(f"http://127.0.0.1:{port}", ready="/health"),
            "wrong": UrlEngine(f"http://127.0.0.1:{port}", ready="/nothing"),
        }
        async with scene(tmp_path / "2", *(model(*pair) for pair in urls.items())) as it:
            plain = await it.up("plain")
            assert it.node.endpoint(plain) == Endpoint("127.0.0.1", port, "http", "/base")
            it.stop(plain)
            assert await it.stopped() == ReplicaStopped(plain, StopCause.ASKED)
            await it.up("probed")
            it.start("wrong")
            stopped = await it.stopped()
            assert (stopped.cause, stopped.permanent) == (StopCause.REFUSED, False)
            assert "answers 404" in stopped.detail


async def test_a_url_where_nothing_listens_is_refused_for_now(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    async with scene(tmp_path, model("far", UrlEngine(f"http://127.0.0.1:{port}"))) as it:
        it.start("far")
        stopped = await it.stopped()
    assert (stopped.cause, stopped.permanent) == (StopCause.REFUSED, False)
    assert f"far does not answer at http://127.0.0.1:{port}" in stopped.detail
