"""`rota serve` from its first line to its exit code, and what may go wrong on the way.

How: real processes: rota as users start it, fake engines below it, signals, and the verbs.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rota.node.memory import available_mib
from tests.cli.support import model, run, served, wait_until, wait_until_gone, write_config


def test_a_model_is_loaded_seen_and_unloaded(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a") + model("off", scaling="{max: 0}"))
    with served(path) as rota:
        env = {"ROTA_URL": rota.url}
        said = "\n".join(rota.lines)
        assert "devices, as stated: cpu 1000 MiB" in said
        assert "model a: on demand" in said
        assert "model off: off" in said

        loaded = run("load", "a", env=env)
        assert (loaded.returncode, loaded.stdout[:17]) == (0, "a is ready (r1) a")
        assert rota.model("a")["state"] == "ready"
        assert "ready  r1 " in run("ps", env=env).stdout
        assert run("load", "off", env=env).returncode == 1

        pids = rota.pids()
        assert run("unload", "--all", "--grace", "0", env=env).returncode == 0
        wait_until_gone(pids)
        assert rota.model("a")["state"] == "cold"
        assert rota.end() == 0


def test_leases_outlive_rota_as_records(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    with served(path) as rota:
        env = {"ROTA_URL": rota.url}
        assert run("lease", "a", env=env).returncode == 1
        leased = run("lease", "a", "--load", "--reason", "a render", env=env)
        assert leased.returncode == 0, leased.stderr
        lease = leased.stdout.strip()
        assert "leased" in run("ps", env=env).stdout
        assert f"{lease}  a      r1" in run("leases", env=env).stdout
        assert run("lease", "--renew", lease, "--ttl", "5m", env=env).stdout.strip() == lease
        assert run("pin", "a", env=env).returncode == 0
        assert "ready, pinned" in run("ps", env=env).stdout
        database = tmp_path / "state" / "rota.sqlite"
        wait_until(lambda: _count(database, "a render"))
        assert rota.end(signal.SIGKILL) == -signal.SIGKILL
    with served(path) as rota:
        env = {"ROTA_URL": rota.url}
        said = run("leases", env=env).stdout
        assert said.startswith("nothing is leased")
        assert f"{lease}  a      r1" in said
        assert "rota was restarted" in said
        assert "is over at " in run("release", lease, env=env).stdout
        assert rota.end() == 0


def _count(database: Path, reason: str) -> int:
    with closing(sqlite3.connect(database)) as connection:
        ask = "SELECT count(*) FROM leases WHERE reason = ?"
        return int(connection.execute(ask, (reason,)).fetchone()[0])


def test_a_damaged_database_is_said_at_the_start(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "rota.sqlite").write_bytes(b"no database at all" * 1_000)
    result = run("serve", "--config", str(path))
    assert result.returncode == 1
    assert "rota.sqlite is damaged (file is not a database); move it away" in result.stderr


def test_the_log_has_a_line_per_decision(tmp_path: Path) -> None:
    with served(write_config(tmp_path, model("a") + model("b"))) as rota:
        rota.admin.load("a").result()
        rota.admin.load("b").result()
        rota.wait_for(r"INFO +rota\.controller: stop r1 of a; makes room for b")
        rota.wait_for(r"INFO +rota\.controller: start r2 of b on local cpu 600 MiB")
        assert rota.end() == 0
        assert rota.lines[-2:] == [rota.wait_for("rota: ended$").string, "(ended)"]


@contextmanager
def chat(url: str, name: str) -> Iterator[http.client.HTTPResponse]:
    """A streamed chat whose answer has begun."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"model": name, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        with connection.getresponse() as response:
            assert response.readline().startswith(b"data: ")
            yield response


def test_sigterm_drains(tmp_path: Path) -> None:
    # A stream of 20 tokens at 20 a second is under way when the signal comes.
    path = write_config(tmp_path, model("a", knobs="--tokens 20 --tokens-per-second 20"))
    with served(path) as rota, chat(rota.url, "a") as response:
        pids = rota.pids()
        rota.process.send_signal(signal.SIGTERM)
        assert response.read().rstrip().endswith(b"data: [DONE]")
        assert rota.wait() == 0
        wait_until_gone(pids)


@contextmanager
def born_with_hangup(handled: signal.Handlers) -> Iterator[None]:
    """Children inherit what is done with SIGHUP; these tests may themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, handled)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_ends_as_well(tmp_path: Path) -> None:
    with served(write_config(tmp_path, model("a"))) as rota:
        rota.admin.load("a").result()
        pids = rota.pids()
        assert rota.end(signal.SIGINT) == 0
        wait_until_gone(pids)


def test_a_hangup_loads_the_file_again_until_the_terminal_is_gone(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    ours, theirs = os.openpty()
    on_terminal = served(path, "--no-watch", terminal=theirs)
    with born_with_hangup(signal.SIG_DFL), on_terminal as rota:
        os.close(theirs)
        rota.admin.load("a").result()
        pids = rota.pids()
        write_config(tmp_path, model("a") + model("b"))
        rota.process.send_signal(signal.SIGHUP)
        rota.wait_for(r"rota\.reload: loaded again \(signal\): added b")
        assert rota.pids() == pids
        os.close(ours)  # the kernel tells rota
        assert rota.wait() == 0
        wait_until_gone(pids)


def test_without_a_terminal_a_hangup_loads_the_file_again(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    with born_with_hangup(signal.SIG_DFL), served(path, "--no-watch") as rota:
        for wrong in ("  a: {}\n", "  a: {cmd: x}\n"):
            write_config(tmp_path, wrong)
            rota.process.send_signal(signal.SIGHUP)
            rota.wait_for(r"not loaded again \(signal\)")
        rota.wait_for(r"ERROR +rota\.reload: .*rota.yaml:5:3: `a` has neither `cmd`")
        write_config(tmp_path, model("b"))
        rota.process.send_signal(signal.SIGHUP)
        rota.wait_for("added b; removed a")
        assert rota.admin.load("b").result()["state"] == "ready"
        assert rota.end() == 0


def test_a_change_of_the_file_is_seen(tmp_path: Path) -> None:
    with served(write_config(tmp_path, model("a"))) as rota:
        write_config(tmp_path, model("a") + model("b"))
        rota.wait_for(r"loaded again \(watch\): added b$")
        assert rota.end() == 0


def test_nohup_is_honoured(tmp_path: Path) -> None:
    with born_with_hangup(signal.SIG_IGN), served(write_config(tmp_path, model("a"))) as rota:
        rota.process.send_signal(signal.SIGHUP)
        assert rota.admin.load("a").result()["state"] == "ready"
        assert rota.end() == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    # A stream without an end in sight, so the drain would take its 10 s.
    path = write_config(tmp_path, model("a", knobs="--tokens 100000 --tokens-per-second 10"))
    with served(path) as rota, chat(rota.url, "a"):
        pids = rota.pids()
        rota.process.send_signal(signal.SIGTERM)
        rota.wait_for("ending")
        assert rota.end() == 128 + signal.SIGTERM
        wait_until_gone(pids)


def test_a_signal_while_a_model_loads(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a", knobs="--load-s 600"))
    with served(path) as rota:
        answers: list[object] = []
        asking = threading.Thread(
            target=lambda: answers.append(run("load", "a", "--url", rota.url))
        )
        asking.start()
        rota.wait_for("start r1 of a")
        assert rota.end() == 0
        asking.join(60)
        assert "shutting down" in str(answers)


def test_killed_and_started_again(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a", scaling="{min: 1}", knobs="--ignore-sigterm"))
    with served(path) as rota:
        rota.admin.load("a").result()
        pids = rota.pids()
        assert rota.end(signal.SIGKILL) == -signal.SIGKILL
        wait_until_gone(pids)
    with served(path) as rota:
        rota.admin.load("a").result()
        assert rota.pids()


# case P2
def test_the_port_is_taken(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = run("serve", "--config", str(path), "--listen", f"127.0.0.1:{port}")
    assert second.returncode == 1
    assert f"error: cannot listen on 127.0.0.1:{port}: Address already in use; " in second.stderr
    assert f"(pid {os.getpid()}) listens there" in second.stderr


def test_the_state_directory_is_taken(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    with served(path) as rota:
        second = run("serve", "--config", str(path))
        assert second.returncode == 1
        assert f"another rota (pid {rota.process.pid}, listening on " in second.stderr
        assert rota.url.removeprefix("http://") in second.stderr
        # Another state directory is another rota.
        with served(path, "--state", str(tmp_path / "other")) as other:
            assert other.end() == 0
        assert rota.end() == 0


def test_a_broken_file_starts_nothing(tmp_path: Path) -> None:
    path = write_config(tmp_path, "  a: {}\n")
    done = run("serve", "--config", str(path))
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: {path}:5:3: `a` has neither `cmd`, `model` nor `url`: nothing to run\n"
    )
    assert not (tmp_path / "state").exists()


def test_what_will_not_fit_is_said(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a", memory="900TiB"))
    path.write_text(path.read_text().replace("devices: {cpu: {memory: 1000MiB}}\n", ""))
    with served(path) as rota:
        rota.wait_for(r"devices, as found: cpu ")
        rota.wait_for(r"WARNING rota: model a will not fit: it needs 921600 GiB")
        assert rota.end() == 0


def test_always_on_models_that_do_not_fit_what_is_found(tmp_path: Path) -> None:
    half = f"{available_mib() * 2 // 3}MiB"
    always = [model(name, memory=half, scaling="{min: 1}") for name in "ab"]
    path = write_config(tmp_path, "".join(always))
    path.write_text(path.read_text().replace("devices: {cpu: {memory: 1000MiB}}\n", ""))
    with served(path) as rota:
        rota.wait_for(r"models that always run will not fit together: a, b")
        assert rota.end() == 0


def test_a_state_directory_of_no_use(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "logs").touch()
    done = run("serve", "--config", str(path))
    assert done.returncode == 1
    assert f"error: cannot use the state directory {tmp_path / 'state'}: " in done.stderr


def test_an_engines_words_stay_in_their_line(tmp_path: Path) -> None:
    script = tmp_path / "bad.sh"
    script.write_text("printf 'one\\033[2J\\ntwo\\n'; exit 3\n")
    path = write_config(
        tmp_path, f'  a: {{cmd: "sh {script} ${{PORT}}", memory: 1MiB, scaling: {{max: 1}}}}\n'
    )
    with served(path) as rota:
        done = run("load", "a", "--url", rota.url)
        assert done.returncode == 1
        assert "\x1b" not in done.stderr
        assert rota.end() == 0
        assert not [line for line in rota.lines if "\x1b" in line or line.startswith("two")]


def test_ipv6(tmp_path: Path) -> None:
    with served(write_config(tmp_path, model("a")), "--listen", "[::1]:0") as rota:
        assert rota.url.startswith("http://[::1]:")
        assert rota.model("a")["state"] == "cold"
        assert rota.end() == 0
