"""The answer comes from our own child or not at all: races, occupied ports, orphans.
Real sockets and processes; only the choice of the "free" port is forced, to lose the race.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rota.core.events import StopCause
from rota.node import ports, processes
from tests.node.support import fake, get, model, scene, script, until


@contextmanager
def foreign_engine(port: int, *knobs: str) -> Iterator[int]:
    """A server of someone else's that answers /health with 200, until the block ends."""
    command = [sys.executable, "-m", "rota.testing.fake_engine", "--port", str(port), *knobs]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _held_by(port: int, pid: int) -> str:
    name = Path(sys.executable).name  # python, python3 or python3.11, as the tests were started
    return f"port {port} is held by {name} (pid {pid})"


async def is_up(port: int) -> None:
    await until(lambda: ports.holder_of(port) is not None, f"a listener on {port}")


def next_ports(monkeypatch: pytest.MonkeyPatch, *chosen: int) -> None:
    """What the next choices of a free port come to; afterwards they are real again."""
    forced = list(chosen)
    real = ports.free_port
    monkeypatch.setattr(ports, "free_port", lambda: forced.pop(0) if forced else real())


async def test_an_occupied_port_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child cannot bind and exits, or would bind much later: another port is tried.
    for knobs in ((), ("--bind-late", "--load-s", "0.5")):
        port = ports.free_port()
        with foreign_engine(port) as foreign:
            await is_up(port)
            next_ports(monkeypatch, port)
            async with scene(tmp_path, model("a", fake(*knobs))) as it:
                replica = await it.up("a")
                assert it.node.endpoint(replica).port != port
                assert foreign not in (await it.ask(replica, "/stats"))["pids"]


async def test_an_answer_of_someone_elses_is_never_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        chosen = [ports.free_port() for _ in range(3)]
        pids = [stack.enter_context(foreign_engine(port)) for port in chosen]
        for port in chosen:
            await is_up(port)
        next_ports(monkeypatch, *chosen)
        never_binds = model("a", script("import time; time.sleep(600)"))
        async with scene(tmp_path, never_binds) as it:
            it.start("a")
            stopped = await it.stopped()
    assert (stopped.cause, stopped.permanent) == (StopCause.REFUSED, False)
    for port, pid in zip(chosen, pids, strict=True):
        assert _held_by(port, pid) in stopped.detail


async def test_a_foreign_server_that_hangs_is_noticed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = ports.free_port()
    with foreign_engine(port, "--probe-hangs"):
        await is_up(port)
        next_ports(monkeypatch, port)
        async with scene(tmp_path, model("a", fake("--bind-late", "--load-s", "0.5"))) as it:
            replica = await it.up("a")
            assert it.node.endpoint(replica).port != port


async def test_an_orphan_of_an_earlier_rota_on_the_port_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = ports.free_port()
    text = (
        "import subprocess, sys; print(subprocess.Popen("
        f"[sys.executable, '-m', 'rota.testing.fake_engine', '--port', '{port}'],"
        " stdout=subprocess.DEVNULL).pid)"
    )
    orphan = int(subprocess.check_output([sys.executable, "-c", text]))
    try:
        await is_up(port)
        next_ports(monkeypatch, port)
        async with scene(tmp_path, model("a", fake())) as it:
            replica = await it.up("a")
            assert orphan not in (await it.ask(replica, "/stats"))["pids"]
    finally:
        os.kill(orphan, signal.SIGKILL)


async def test_racing_starts_on_one_port_each_get_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = ports.free_port()
    next_ports(monkeypatch, port, port)
    async with (
        scene(tmp_path / "1", model("a", fake())) as one,
        scene(tmp_path / "2", model("b", fake())) as two,
    ):
        one.start("a")
        two.start("b")
        await asyncio.gather(one.next(), two.next())
        ends = [one.node.endpoint("a-1").port, two.node.endpoint("b-1").port]
        assert len(set(ends)) == 2
        for it, replica, own in ((one, "a-1", ends[0]), (two, "b-1", ends[1])):
            stats = await asyncio.to_thread(get, own, "/stats")
            assert stats["pids"] == [it.pid(replica)]


async def test_a_port_once_given_is_given_to_no_second_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = ports.free_port()
    next_ports(monkeypatch, port, port)
    async with scene(tmp_path, model("a", fake("--load-s", "0.2", "--bind-late"))) as it:
        replicas = [it.start("a"), it.start("a")]
        for _ in replicas:
            await it.next()
        assert it.node.endpoint(replicas[0]).port == port
        assert it.node.endpoint(replicas[1]).port != port


async def test_a_fixed_port_is_used_and_who_holds_it_is_named(tmp_path: Path) -> None:
    # case P2
    port = ports.free_port()
    async with scene(tmp_path, model("a", fake(port=port))) as it:
        replica = await it.up("a")
        assert it.node.endpoint(replica).port == port
        it.stop(replica)
        await it.stopped()
        with foreign_engine(port) as foreign:
            await is_up(port)
            it.start("a")
            stopped = await it.stopped()
            assert (stopped.cause, stopped.permanent) == (StopCause.REFUSED, False)
            assert _held_by(port, foreign) in stopped.detail
        await it.up("a")


async def test_a_fixed_port_lost_in_the_midst_of_a_load_is_named(tmp_path: Path) -> None:
    port = ports.free_port()
    engine = fake("--bind-late", "--load-s", "600", port=port)
    async with scene(tmp_path, model("a", engine)) as it:
        replica = it.start("a")
        await until(lambda: bool(it.node.tail(replica, 1)), "its first line")
        with foreign_engine(port) as foreign:
            stopped = await it.stopped()
    assert stopped.cause is StopCause.REFUSED
    assert _held_by(port, foreign) in stopped.detail


async def test_where_the_owner_cannot_be_told_the_answer_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a system without /proc.
    monkeypatch.setattr(processes, "PROC", tmp_path / "no-proc")
    async with scene(tmp_path, model("a", fake())) as it:
        await it.up("a")


def test_a_containers_proxy_stands_for_our_child(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        nobody = 2**22 + 1
        foreign = ports.foreign_holder(port, nobody)
        assert foreign is not None
        assert foreign.pid == os.getpid()
        monkeypatch.setattr(ports, "CONTAINER_PROXIES", {foreign.name})
        assert ports.foreign_holder(port, nobody) is None


def test_our_own_listener_is_not_foreign() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ports.foreign_holder(server.getsockname()[1], os.getpid()) is None


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("diagnosis", [True, False])
def test_listeners_are_found_on_each_address_that_loopback_reaches(
    address: str, diagnosis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not diagnosis:
        monkeypatch.delattr(socket, "AF_NETLINK")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
        server.listen()
        holder = ports.holder_of(server.getsockname()[1])
    assert holder is not None
    assert holder.pid == os.getpid()
    assert f"(pid {os.getpid()})" in str(holder)


@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
@pytest.mark.parametrize("diagnosis", [True, False])
def test_listeners_elsewhere_are_not_in_the_way(
    address: str, diagnosis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not diagnosis:
        monkeypatch.delattr(socket, "AF_NETLINK")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
        server.listen()
        port = server.getsockname()[1]
        assert ports.is_free(port)
        assert not ports.listening(port)


def test_a_port_without_a_listener_has_no_holder() -> None:
    assert ports.holder_of(ports.free_port()) is None
