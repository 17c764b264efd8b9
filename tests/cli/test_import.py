"""`rota import llama-swap`, and `rota check` and `rota serve` on llama-swap's own file.

How: click's runner calls the verbs in this process; one real rota serves fake engines.
"""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from rota.cli import main
from rota.config import load
from tests.cli.support import FAKE, run, served, wait_until

FILE = """\
logLevel: info
models:
  a: {cmd: "true ${PORT}", env: ["KEY=${env.KEY_OF_A_TEST}", "B=${env.KEY_OF_A_TEST}"]}
  b: {cmd: "true ${PORT}"}
hooks: {on_startup: {preload: [c]}}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEY_OF_A_TEST", "sk")
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return path


def test_to_stdout(path: Path) -> None:
    result = CliRunner().invoke(main, ["import", "llama-swap", str(path)])
    assert result.exit_code == 0
    assert result.stdout.startswith("# Made of config.yaml by `rota import llama-swap`.\n")
    assert result.stderr.splitlines() == [
        f"warning: {path}: without effect in rota: logLevel; `rota import llama-swap` says why",
        f"warning: {path}:5:32: `preload`: `c` is no model; nothing is loaded; there is `a`, `b`",
    ]


def test_to_a_file(path: Path) -> None:
    out = path.with_name("rota.yaml")
    arguments = ["import", "llama-swap", str(path), "-o", str(out)]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (0, "")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600  # a value of the environment is in it
    assert list(load(out).models) == ["a", "b"]
    assert load(out).dialect == "rota"
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1
    assert "is there already" in again.stderr
    nowhere = CliRunner().invoke(main, [*arguments[:-1], str(path / "x")])
    assert nowhere.exit_code == 1
    assert "cannot be written: not a directory" in nowhere.stderr.lower()


def test_a_folder(path: Path) -> None:
    (path.parent / "z.yml").write_text('models: {z: {cmd: "true ${PORT}"}}')
    (path.parent / "notes.txt").write_text("nothing of ours")
    result = CliRunner().invoke(main, ["import", "llama-swap", str(path.parent)])
    assert result.stdout.startswith("# Made of config.yaml, z.yml by")
    twice = CliRunner().invoke(main, ["import", "llama-swap", str(path), str(path.parent)])
    assert twice.exit_code == 1
    assert "is there twice" in twice.stderr


def test_what_it_refuses(path: Path) -> None:
    path.write_text("models: {a: {cmd: x}}\nstartPort: 0\n")
    result = CliRunner().invoke(main, ["import", "llama-swap", str(path)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1  # macros are settled before anything else
    missing = CliRunner().invoke(main, ["import", "llama-swap", str(path / "none")])
    assert missing.exit_code == 1


def test_check_says_how_it_was_read(path: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"ok         {path}, read as llama-swap's"
    answer = json.loads(CliRunner().invoke(main, ["check", str(path), "--json"]).stdout)
    assert answer["dialect"] == "llama-swap"


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_serving_it_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    fake = FAKE.replace("${MODEL}", "${MODEL_ID}").replace("${PORT}", "${port}")
    port = a_free_port()
    fixed = f'{{macros: {{port: {port}}}, cmd: "${{fake}}", proxy: "http://127.0.0.1:${{port}}"}}'
    path.write_text(
        f'macros: {{port: "${{PORT}}", fake: "{fake}"}}\n'
        f'models: {{a: {{cmd: "${{fake}}"}}, b: {{cmd: "${{fake}}"}}, c: {fixed}, d: {fixed}}}\n'
        "groups: {pair: {swap: false, exclusive: false, members: [a, b]}}\n"
        "hooks: {on_startup: {preload: [b]}}\n"
    )
    options = ("--listen", "127.0.0.1:0", "--state", str(tmp_path / "state"))
    with served(path, *options) as rota:
        rota.wait_for(r"config\.yaml is read as llama-swap's")
        wait_until(lambda: rota.model("b")["state"] == "ready")
        assert run("load", "a", "--url", rota.url).returncode == 0
        assert {rota.model(name)["state"] for name in "ab"} == {"ready"}
        # In no group, so everyone leaves for it.
        assert run("load", "c", "--url", rota.url).returncode == 0
        wait_until(lambda: {rota.model(name)["state"] for name in "ab"} == {"cold"})
        # At the same port, where the one before has to be gone.
        assert run("load", "d", "--url", rota.url).returncode == 0
        assert rota.model("c")["state"] == "cold"
        assert rota.end() == 0
