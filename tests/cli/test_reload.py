"""`rota reload` and `rota check --diff`: what they say, and what they leave alone.
How: real processes: a rota with fake engines that does not watch its file, and the verbs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.support import FAKE, model, run, served, write_config


def test_a_reload_says_what_has_changed(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a") + model("b"))
    with served(path, "--no-watch") as rota:
        env = {"ROTA_URL": rota.url}
        rota.admin.load("a").result()
        pids = rota.pids()
        assert run("reload", env=env).stdout == f"loaded {path}:\nnothing changes\n"

        changed = model("a", memory="500MiB", scaling="{max: 1, idle_timeout: 1m}")
        write_config(tmp_path, changed + model("c"), top="hold_max: 1m\n")
        path.write_text(path.read_text().replace("1000MiB", "2000MiB"))
        done = run("reload", env=env)
        assert done.stdout.splitlines() == [
            f"loaded {path}:",
            "added      c",
            "removed    b",
            "changed    a: now scaling; at its next start memory",
            "changed    the file's hold_max",
        ]
        assert done.stderr.startswith("warning: `devices`: rota goes on with what it was started")
        assert rota.pids() == pids
        assert "ready, outdated  r1" in run("ps", env=env).stdout
        assert f"{path}: devices will count when rota is restarted" in run("ps", env=env).stdout
        assert json.loads(run("reload", "--json", env=env).stdout)["unchanged"] == ["a", "c"]

        write_config(tmp_path, "  a: {}\n")
        done = run("reload", env=env)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"error: {path}:5:3: `a` has neither" in done.stderr
        assert f"{path} is wrong; what was loaded at 20" in run("ps", env=env).stdout
        assert rota.pids() == pids
        assert rota.end() == 0


def test_a_diff_is_against_what_runs(tmp_path: Path) -> None:
    path = write_config(tmp_path, model("a"))
    folder = tmp_path / "new"
    folder.mkdir()
    wanted = write_config(folder, model("b") + f'  a: {{cmd: "{FAKE} -v"}}\n')
    with served(path, "--no-watch") as rota:
        env = {"ROTA_URL": rota.url}
        done = run("check", str(wanted), "--diff", env=env)
        assert done.returncode == 0
        assert done.stdout.splitlines() == [
            f"in place of {path}:",
            "added      b",
            "changed    a: now scaling; at its next start cmd, memory",
        ]
        told = json.loads(run("check", str(wanted), "--diff", "--json", env=env).stdout)
        assert (told["reloaded"], told["added"]) == (False, ["b"])
        same = run("check", str(path), "--diff", env=env)
        assert same.stdout == f"in place of {path}:\nnothing changes\n"
        wanted.write_text("models: {a: {cmd: x, colour: red}}\n")
        done = run("check", str(wanted), "--diff", env=env)
        assert done.returncode == 1
        assert f"error: {wanted}:1:22: unknown key `colour`" in done.stderr
        assert [m["name"] for m in rota.admin.status()["models"]] == ["a"]
        assert rota.end() == 0
    assert run("check", str(path), "--diff", env=env).returncode == 4
