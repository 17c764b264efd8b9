"""`rota check`, and what the command says of itself.

How: click's runner calls the verbs in this process; output is compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rota import __version__
from rota.cli import main

GOOD = """\
listen: 127.0.0.1:9000
state: /tmp/rota-state
devices: {cpu: {memory: 8GiB}}
models:
  a: {cmd: "true ${PORT}", memory: 1GiB, scaling: {max: 1}, aliases: [x, y]}
  b: {cmd: "true ${PORT}", memory: 2GiB, scaling: {min: 1}}
  c: {cmd: "true ${PORT}", memory: 1GiB, scaling: {max: 1, idle_timeout: 0}}
  d: {url: http://far:1}
  e: {cmd: "true ${PORT}"}
"""


def test_ok(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text(GOOD)
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"ok         {path}",
        "listen     127.0.0.1:9000",
        "state      /tmp/rota-state",
        "devices    cpu 8 GiB",
        "always     b: takes 2 GiB, 10 slots",
        "on demand  a: takes 1 GiB, 10 slots, steps down after 10m, also called x, y",
        "           c: takes 1 GiB, 10 slots, stays once loaded",  # case K3
        "elsewhere  d: http://far:1",
        "off        e: takes a whole device, 10 slots",
    ]
    assert result.stderr.splitlines() == [
        f"warning: {path}:9:3: `e` states no scaling, so it is off; add `scaling: {{max: 1}}`"
    ]


@pytest.mark.parametrize(
    ("rules", "lines"),
    [
        (
            """\
groups:
  g: {members: [b, a], persistent: true}
  h: {members: [c], swap: false, exclusive: false}
""",
            [
                "groups     g: a, b; one at a time; alone; persistent",
                "           h: c; all together; beside others",
            ],
        ),
        (
            'matrix: {sets: {x: "a & b", y: b & (c | a)}}',
            ["matrix     x: a & b", "           y: b & (c | a)"],
        ),
    ],
)
def test_rules_are_said(tmp_path: Path, rules: str, lines: list[str]) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text(GOOD + rules)
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.stdout.splitlines()[-len(lines) :] == lines


def test_ok_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text(GOOD)
    result = CliRunner().invoke(main, ["check", str(path), "--json"])
    answer = json.loads(result.stdout)
    assert answer["ok"]
    assert answer["models"][0] == {
        "name": "a",
        "kind": "on demand",
        "engine": "command",
        "memory_mib": 1024,
        "device_count": 1,
        "slots": 10,
        "aliases": ["x", "y"],
        "line": 5,
    }
    assert [m["kind"] for m in answer["models"]] == [
        *("on demand", "always", "on demand", "elsewhere", "off"),
    ]
    assert len(answer["warnings"]) == 1


def test_one_slot_is_not_slots(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text(
        'models: {a: {cmd: "sh ${PORT}", memory: 1GiB, concurrency: 1, scaling: {max: 1}}}'
    )
    result = CliRunner().invoke(main, ["check", str(path)])
    assert "a: takes 1 GiB, 1 slot, steps" in result.stdout


def test_problems(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text("modles: {}\n")
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"error: {path}: `models` is missing; nothing is served",
        f"error: {path}:1:1: unknown key `modles`; did you mean `models`?",
        "2 problems",
    ]


def test_problems_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text("models: {a: {}}\n")
    result = CliRunner().invoke(main, ["check", str(path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "ok": False,
        "path": str(path),
        "problems": [
            {
                "line": 1,
                "column": 10,
                "text": "`a` has neither `cmd`, `model` nor `url`: nothing to run",
            }
        ],
    }


def test_a_file_that_is_open_to_others_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text("listen: 0.0.0.0:80\nmodels: {a: {url: http://far:1}}\n")
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 0
    assert "`rota serve` needs --open" in result.stderr
    result = CliRunner().invoke(main, ["serve", "--config", str(path)])
    assert result.exit_code == 1
    assert "listen on 127.0.0.1 or say --open" in result.stderr


def test_version_and_help() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"rota, version {__version__}\n"
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for verb in ("serve", "check", "ps", "load", "unload", "demo"):
        assert f"\n  {verb} " in result.output
        assert CliRunner().invoke(main, [verb, "--help"]).exit_code == 0
    assert "..." not in result.output.partition("Commands:")[2]  # each verb's line is whole


@pytest.mark.parametrize(
    "arguments",
    [["unload"], ["unload", "a", "--all"], ["serve"], ["nope"], ["unload", "a", "--grace", "-1"]],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_help_loads_nothing_heavy() -> None:
    heavy = "{'pydantic', 'ruamel', 'rich', 'uvicorn', 'starlette', 'asyncio'}"
    script = f"import sys, rota.cli; print({heavy} & {{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"
