"""Whose file it is, seen from its keys; and llama-swap's are loaded in place of ours.
How: small files of either, loaded; the dialect, warnings and complaints are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.config import load
from rota.config.complaints import InvalidConfig
from tests.config.helpers import write

OURS = [
    'models: {a: {cmd: "true ${PORT}", scaling: {max: 1}}}',
    'models: {a: {cmd: "true ${PORT}", env: {A: b}}}',
    "models: {a: {url: http://far:1}}",
    'defaults: {scaling: {max: 1}}\nmodels: {a: {cmd: "true ${PORT}"}}',
    'listen: 127.0.0.1:1\nmodels: {a: {cmd: "true ${PORT}"}}',
]
THEIRS = [
    'models: {a: {cmd: "true ${PORT}"}}',
    'models: {a: {cmd: "true ${PORT}", aliases: [b]}}',
    'models: {a: {cmd: "true ${PORT}", ttl: 60}}',
    'models: {a: {cmd: "true ${PORT}", env: [A=b]}}',
    'startPort: 9000\nmodels: {a: {cmd: "true ${PORT}"}}',
    'x: &x {ttl: 5, cmd: "true ${PORT}"}\nmodels: {a: {<<: *x}}',
    'macros: {a: "true ${PORT}"}\nmodels: {a: {cmd: "${a}"}}\ngroups: {g: {members: [a]}}',
    'models: {a: {cmd: "true ${PORT}"}}\napiKeys: [${env.KEY_OF_A_TEST}]',
]


@pytest.mark.parametrize("text", OURS)
def test_ours(text: str, tmp_path: Path) -> None:
    assert load(write(tmp_path, text)).dialect == "rota"


@pytest.mark.parametrize("text", THEIRS)
def test_theirs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_A_TEST", "k" * 20)
    config = load(write(tmp_path, text))
    assert config.dialect == "llama-swap"
    assert config.models["a"].model.scaling.kind == "on demand"


def test_keys_of_both_are_complained_of_as_ours(tmp_path: Path) -> None:
    path = write(tmp_path, "models: {a: {cmd: 'true ${PORT}', ttl: 5, scaling: {max: 1}}}")
    with pytest.raises(InvalidConfig, match="unknown key `ttl`; here it is `scaling"):
        load(path)


def test_complaints_speak_of_the_lines_that_are_there(tmp_path: Path) -> None:
    text = """\
        # a comment
        ttl: &unused 5

        models:
          b:
            ttl: 60
            cmd: true ${PORT}
          a:
            ttl: 60
            aliases: [" x"]
            cmd: >
              true
              ${PORT}
        matrix:
          sets:
            one: a & b
            two: a &
        """
    with pytest.raises(InvalidConfig) as caught:
        load(write(tmp_path, text))
    lines = [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]
    assert [line.partition(": ")[0] for line in lines] == ["rota.yaml:10:5", "rota.yaml:17:5"]
    assert "cannot be an alias" in lines[0]


def test_a_models_line_is_the_one_that_is_there(tmp_path: Path) -> None:
    text = "startPort: 1\nmodels:\n  b: {cmd: 'true ${PORT}'}\n  a: {cmd: 'true ${PORT}'}\n"
    config = load(write(tmp_path, text))
    assert [(m.name, m.line) for m in config.models.values()] == [("b", 3), ("a", 4)]


def test_what_has_no_effect_is_told_in_one_line(tmp_path: Path) -> None:
    models = ", ".join(f"{name}: {{cmd: 'true ${{PORT}}', name: x}}" for name in "ab")
    text = f"logLevel: info\nmodels: {{{models}}}"
    path = write(tmp_path, text)
    assert load(path).warnings == (
        f"{path}: without effect in rota: logLevel, name (2); `rota import llama-swap` says why",
    )


def test_merge_keys_without_end_are_no_trouble(tmp_path: Path) -> None:
    for text in ("a: &a\n  b: &b {<<: *a}\n  <<: *b\nmodels: *a", "models: &m {<<: *m}"):
        with pytest.raises(InvalidConfig):
            load(write(tmp_path, text))
