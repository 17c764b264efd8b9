"""An engine that brings a command for its end is ended by it, within its grace, and nothing stays.
How: real engines and commands as small scripts, whose words in the log say what they were told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from rota.config.values import CommandEngine
from rota.core.events import ReplicaStopped, StopCause
from rota.node import guard
from tests.node.support import PATIENCE_S, Alive, Scene, all_end, identities, model, scene, until

STOPPED = "stopped"  # what an engine says that was ended by its command
TERMINATED = "terminated"  # and one by SIGTERM

ENGINE = f"""
import os, signal, sys, time
def end(word):
    os.write(1, word.encode() + b"\\n")
    os._exit(0)
signal.signal(signal.SIGUSR1, lambda *_: end("{STOPPED}"))
signal.signal(signal.SIGTERM, lambda *_: end("{TERMINATED}"))
{{more}}
os.write(1, b"up\\n")
while True: time.sleep(60)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
WITH_GRANDCHILD = "os.fork() or (signal.signal(signal.SIGTERM, signal.SIG_DFL), time.sleep(600))"

# Commands that end it, as words for a shell.
ASKS = "echo asked ${MODEL} at ${PORT}; kill -USR1 ${PID}"
HANGS = "echo asked; trap '' TERM; setsid sleep 600 & sleep 600"
FAILS = "echo asked; exit 3"


def engine(*stop_argv: str, more: str = "", ready: str | None = None) -> CommandEngine:
    argv = (sys.executable, "-c", ENGINE.format(more=more))
    return CommandEngine(argv, ready=ready, stop_argv=stop_argv)


def ended_by(text: str, *, more: str = "", ready: str | None = None) -> CommandEngine:
    return engine("sh", "-c", text, more=more, ready=ready)


async def wrote(it: Scene, replica: str, line: str) -> None:
    await until(lambda: line in it.node.tail(replica, 100), line)


async def up(it: Scene, name: str = "a") -> str:
    replica = await it.up(name)
    await wrote(it, replica, "up")
    return replica


def lines(state_dir: Path) -> list[str]:
    return (state_dir / "logs" / "a.log").read_text().splitlines()


def below(it: Scene) -> set[Alive]:
    return identities(guard.descendants(it.server_pid()))


def is_any_left(those: Iterable[Alive]) -> bool:
    return any(one.is_left() for one in those)


async def test_a_command_ends_it_in_place_of_sigterm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path, model("a", ended_by(ASKS))) as it:
        replica = await up(it)
        everyone = it.all_of(replica)
        facts = it.node.facts(replica)
        assert facts is not None
        it.stop(replica, grace_ms=600_000)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not is_any_left(everyone)
    assert sorted(lines(tmp_path)) == sorted(["up", f"asked a at {facts.port}", STOPPED])
    assert "cmd_stop" not in caplog.text


async def test_it_has_the_engines_folder_and_environment(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    own = ended_by('echo "$NAME in $(basename "$PWD")"; kill -USR1 ${PID}')
    own = replace(own, env={"NAME": "${MODEL}-x"}, cwd=tmp_path / "here")
    async with scene(tmp_path, model("a", own)) as it:
        replica = await up(it)
        it.stop(replica, grace_ms=600_000)
        await it.stopped()
    assert "a-x in here" in lines(tmp_path)


@pytest.mark.parametrize("more", ["", STUBBORN])
async def test_what_does_not_end_in_time_is_killed_and_the_command_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: str
) -> None:
    async with scene(tmp_path, model("a", ended_by(HANGS, more=more))) as it:
        replica = await up(it)
        it.stop(replica, grace_ms=600_000)
        await wrote(it, replica, "asked")
        await until(lambda: len(guard.descendants(it.guard_pid(replica))) >= 4, "its own children")
        everyone = it.all_of(replica)
        it.stop(replica, grace_ms=300)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not is_any_left(everyone)
    assert lines(tmp_path) == ["up", "asked"]  # once, and nobody was sent SIGTERM
    assert "did not end in" in caplog.text


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (engine("/no/such/program", "x"), "could not be run: No such file or directory: /no/such"),
        (engine("/"), "could not be run: Permission denied: /"),
        (ended_by(FAILS), "exited with code 3"),
        (ended_by("kill -KILL $$"), "was killed by signal 9"),
    ],
)
async def test_where_the_command_fails_it_is_sigterm_after_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: CommandEngine, why: str
) -> None:
    async with scene(tmp_path, model("a", own)) as it:
        replica = await up(it)
        it.stop(replica, grace_ms=600_000)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
    assert lines(tmp_path)[-1] == TERMINATED
    assert f"replica a-1: the command to end it (`cmd_stop`) {why}" in caplog.text
    assert "SIGTERM was sent" in caplog.text


async def test_a_command_that_ends_before_its_engine_does_has_not_failed(tmp_path: Path) -> None:
    later = "(while [ ! -e go ]; do sleep 0.01; done; kill -USR1 ${PID}) & echo asked"
    own = replace(ended_by(later), cwd=tmp_path)
    async with scene(tmp_path, model("a", own)) as it:
        replica = await up(it)
        it.stop(replica, grace_ms=600_000)
        await wrote(it, replica, "asked")
        (tmp_path / "go").touch()
        await it.stopped()
    assert lines(tmp_path) == ["up", "asked", STOPPED]


async def test_what_the_engine_leaves_behind_is_not_given_the_whole_grace(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", ended_by(ASKS, more=WITH_GRANDCHILD))) as it:
        replica = await up(it)
        everyone = it.all_of(replica)
        assert len(everyone) == 2
        it.stop(replica, grace_ms=600_000)
        await it.stopped()
        assert not is_any_left(everyone)


async def test_one_that_ended_by_itself_is_not_ended_by_its_command(tmp_path: Path) -> None:
    # Its pid, which the command names, may be another's by now.
    async with scene(tmp_path, model("a", ended_by(ASKS, more=WITH_GRANDCHILD))) as it:
        replica = await up(it)
        everyone = it.all_of(replica)
        os.kill(it.pid(replica), signal.SIGKILL)
        assert (await it.stopped()).cause is StopCause.CRASHED
        assert not is_any_left(everyone)
    assert lines(tmp_path) == ["up"]


async def test_a_stopped_one_hears_its_command(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", ended_by(ASKS))) as it:
        replica = await up(it)
        os.kill(it.pid(replica), signal.SIGSTOP)
        it.stop(replica, grace_ms=600_000)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
    assert lines(tmp_path)[-1] == STOPPED


async def test_a_start_that_comes_to_nothing_is_ended_by_its_command_too(tmp_path: Path) -> None:
    never = model("a", ended_by(ASKS, ready="/health"), start_timeout_ms=1_500)
    async with scene(tmp_path, never) as it:
        it.start("a")
        stopped = await it.stopped()
        assert stopped.cause is StopCause.NEVER_READY
    assert lines(tmp_path)[-1] == STOPPED


# ── whatever ends, and whenever ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("dies", ["guard", "guard and server"])
async def test_a_guard_that_is_killed_takes_the_command_along(tmp_path: Path, dies: str) -> None:
    async with scene(tmp_path, model("a", ended_by(HANGS))) as it:
        replica = await up(it)
        it.stop(replica, grace_ms=600_000)
        await wrote(it, replica, "asked")
        everyone = it.all_of(replica)
        if dies != "guard":
            os.kill(it.server_pid(), signal.SIGKILL)
        os.kill(it.guard_pid(replica), signal.SIGKILL)
        assert (await it.stopped()).replica == replica
        await all_end(everyone)


@pytest.mark.parametrize("command", [ASKS, HANGS])
async def test_kill_9_of_rota_ends_engine_and_command(tmp_path: Path, command: str) -> None:
    # case Z2
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.node.rota_like", str(tmp_path)),
        *ended_by(command).stop_argv,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        pids = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))
        everyone = identities([pids["server"], *pids["guards"], *pids["rest"]])
    finally:
        process.kill()
        await process.wait()
    await all_end(everyone)
    for name in ("polite", "stubborn", "parent"):
        log = tmp_path / "logs" / f"{name}.log"
        assert "asked" in log.read_text(), name
