"""An engine's output: all of it in a capped file, the end of it at hand, the engine never held up.
Real children that write much, badly, or without line ends; no timing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rota.node.guard import CappedLog
from rota.node.guards import LINES_MAX, LOG_BYTES_MAX
from tests.node.support import fake, model, scene, script, until


async def test_a_flood_does_not_hold_up_the_engine_and_the_log_stays_capped(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--log-flood-mib", "24"))) as it:
        replica = await it.up("a")
        await until(lambda: it.node.tail(replica, 1) == ["model loaded"], "the last line")
        assert len(it.node.tail(replica, 10_000)) <= LINES_MAX
    logs = {path.name: path for path in (tmp_path / "logs").iterdir()}
    assert set(logs) == {"a.log", "a.log.1"}
    assert all(path.stat().st_size <= LOG_BYTES_MAX for path in logs.values())
    assert logs["a.log"].read_text().endswith("model loaded\n")


async def test_rota_too_busy_to_listen_does_not_hold_up_the_engine(tmp_path: Path) -> None:
    text = "import sys, os\nfor n in range(8000): print(n, 'x' * 1000)\nprint('done', flush=True)\n"
    text += "open(sys.argv[1], 'w').close()\nimport time; time.sleep(600)"
    flag = tmp_path / "flag"
    async with scene(tmp_path, model("a", script(text, str(flag), ready=None))) as it:
        replica = await it.up("a")
        while not flag.exists():  # blocks the loop, and is meant to
            os.sched_yield()
        await until(lambda: it.node.tail(replica, 1) == ["done"], "the last line")
        shown = it.node.tail(replica, LINES_MAX)
        assert any("bytes are only in the log file" in line for line in shown)


async def test_bytes_that_are_no_text_are_survived(tmp_path: Path) -> None:
    text = r"""
import os, sys, time
out = sys.stdout.buffer
out.write(b"\xff\xfe\x00 broken \x80\n"); out.flush()
out.write("gr".encode() + "ü".encode()[:1]); out.flush(); time.sleep(0.1)
out.write("ü".encode()[1:] + "n\n".encode()); out.flush()
out.write(b"\r 10 %\r 99 %\r100 %\r\n"); out.flush()
os.kill(os.getpid(), 9)
"""
    async with scene(tmp_path, model("a", script(text))) as it:
        it.start("a")
        stopped = await it.stopped()
    first, second, last = stopped.detail.split("\n")[1:]
    assert "broken" in first
    assert (second, last) == ("grün", "100 %")


async def test_a_line_without_end_is_bounded_and_shown(tmp_path: Path) -> None:
    text = "import sys, time; sys.stdout.write('x' * 3_000_000 + 'end'); sys.stdout.flush()"
    async with scene(tmp_path, model("a", script(text + "; time.sleep(600)", ready=None))) as it:
        replica = await it.up("a")
        await until(lambda: "".join(it.node.tail(replica, 1)).endswith("end"), "the line")
        assert len(it.node.tail(replica, 1)[0]) < 3_000
        assert it.node.tail(replica, 0) == []


async def test_the_tail_is_whole_when_the_exit_is_told(tmp_path: Path) -> None:
    # Much output right before the end: what is shown are the very last lines, every time.
    text = "for n in range(5000): print('line', n)"
    async with scene(tmp_path, model("a", script(text))) as it:
        for _ in range(3):
            it.start("a")
            assert (await it.stopped()).detail.endswith("line 4998\nline 4999")


async def test_a_full_or_forbidden_disk_costs_the_log_and_nothing_else(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake()), model("b", fake())) as it:
        (tmp_path / "logs" / "a.log").mkdir()  # cannot be opened as a file
        (tmp_path / "logs" / "b.log").symlink_to("/dev/full")
        for name in ("a", "b"):
            replica = await it.up(name)
            assert it.node.tail(replica, 1) == ["model loaded"]


def test_a_capped_log_rotates_before_it_would_grow_too_long(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):  # a second life goes on where the first one ended
        log = CappedLog(str(path), 10)
        for chunk in (b"1234", b"5678", b"90ab"):
            log.write(chunk)
    assert path.read_bytes() == b"567890ab"
    assert (tmp_path / "log.1").read_bytes() == b"90ab1234"


async def test_output_after_the_leaders_end_is_still_written(tmp_path: Path) -> None:
    text = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"last words\\n"), os._exit(0)))
    os.write(1, b"armed\\n")
    time.sleep(600)
time.sleep(600)
"""
    async with scene(tmp_path, model("a", script(text, ready=None))) as it:
        replica = await it.up("a")
        await until(lambda: it.node.tail(replica, 1) == ["armed"], "its first line")
        os.kill(it.pid(replica), signal.SIGTERM)
        await it.stopped()
    assert (tmp_path / "logs" / "a.log").read_text() == "armed\nlast words\n"
