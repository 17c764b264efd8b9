"""However rota ends, its engines end with it, and the next one serves.

How: real processes: rota as users start it, engines that are stubborn, hung or have children.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

from tests.cli.support import BOUND_S, Served, model, run, served, wait_until_gone, write_config


def chat(rota: Served, name: str, *, stream: bool = False) -> int:
    """One chat; its status."""
    body = {"model": name, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    request = urllib.request.Request(
        f"{rota.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
        return int(answer.status)


def family(rota: Served, name: str) -> list[int]:
    """A model's engine and the processes it has started."""
    (replica,) = rota.model(name)["replicas"]
    with urllib.request.urlopen(f"http://127.0.0.1:{replica['port']}/stats") as answer:
        return list(json.load(answer)["pids"])


def test_kill_9_leaves_nothing_and_a_restart_serves(tmp_path: Path) -> None:
    # cases Z2, W19
    models = {
        "polite": "",
        "stubborn": "--ignore-sigterm",
        "parent": "--grandchild ignores-sigterm",
        "escaping": "--ignore-sigterm --grandchild setsid",
    }
    entries = [model(name, memory="200MiB", knobs=knobs) for name, knobs in models.items()]
    path = write_config(tmp_path, "".join(entries))
    with served(path) as rota:
        pids = []
        for name in models:
            assert chat(rota, name) == 200
            pids += family(rota, name)
        assert len(pids) == 4 + 2
        assert rota.end(signal.SIGKILL) == -signal.SIGKILL
        wait_until_gone(pids)
    with served(path) as rota:
        for name in models:
            assert chat(rota, name) == 200
        assert rota.end() == 0


def test_kill_9_in_the_middle_of_a_load_and_a_stop(tmp_path: Path) -> None:
    # cases Z2, W19; one engine is coming up and one has been told to go
    loading = model("loading", memory="300MiB", knobs="--load-s 600 --ignore-sigterm")
    going = model("going", memory="300MiB", knobs="--exit-s 600")
    path = write_config(tmp_path, loading + going)
    with served(path) as rota:
        assert chat(rota, "going") == 200
        asking = [
            threading.Thread(target=run, args=(*order, "--url", rota.url))
            for order in (("load", "loading"), ("unload", "going"))
        ]
        for one in asking:
            one.start()
        rota.wait_for("start r2 of loading")
        rota.wait_for("stop r1 of going")
        pids: list[int] = []
        while len(pids) < 2:
            pids = rota.pids()
        assert rota.end(signal.SIGKILL) == -signal.SIGKILL
        wait_until_gone(pids)
        for one in asking:
            one.join(BOUND_S)


def test_a_second_rota_on_the_port_says_who_has_it(tmp_path: Path) -> None:
    # case P2; with a state directory of its own, the port is all that is in the way
    with served(write_config(tmp_path, model("a"))) as rota:
        second = run(
            *("serve", "--config", str(tmp_path / "rota.yaml")),
            *("--listen", rota.url.removeprefix("http://"), "--state", str(tmp_path / "other")),
        )
        assert second.returncode == 1
        assert f"(pid {rota.process.pid}) listens there" in second.stderr
        assert chat(rota, "a") == 200
        assert rota.end() == 0


def test_ctrl_c_ends_an_engine_that_hangs(tmp_path: Path) -> None:
    # case W14; stopped by SIGSTOP it answers nothing, and ignores what it would be told
    path = write_config(tmp_path, model("a", knobs="--ignore-sigterm"))
    path.write_text(path.read_text().replace("scaling:", "stop_grace: 300ms, scaling:"))
    with served(path) as rota:
        assert chat(rota, "a") == 200
        pids = rota.pids()
        os.kill(pids[0], signal.SIGSTOP)
        assert rota.end(signal.SIGINT) == 0
        wait_until_gone(pids)
