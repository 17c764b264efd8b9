"""Files that are no configuration at all, and the YAML that we read as text.

How: each file is written to a folder and loaded; its complaints are compared word for word.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rota.config import load
from rota.config.complaints import InvalidConfig
from rota.errors import ConfigError
from tests.config.helpers import complaints, loaded


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", ": is empty; it needs `models:` at least"),
        (b"# a comment\n", ": is empty; it needs `models:` at least"),
        (b"[1]", ":1:1: is not a mapping; it needs `models:`"),
        (b"models", ":1:1: is not a mapping; it needs `models:`"),
        (b"models:\n\ta: {}", ":2:1: a tab; YAML is indented with spaces"),
        (b"a: b: c", ":1:5: not YAML: a second `:` in one line; quote the text if it has one"),
        (b"a: @x", ":1:4: not YAML: text cannot start with `@`; quote it"),
        (b"a: {b: x ${PORT}}", ":1:11: not YAML: within `{…}` a text with `${…}` needs quotes"),
        (b"a: [1", ":1:6: not YAML: expected ',' or ']', but got '<stream end>'"),
        (b"a: *b", ":1:4: not YAML: found undefined alias 'b'"),
        (b"a: 1\n---\nb: 2", ":2:1: not YAML: but found another document"),
        (b"a: \x07", ":1:4: a control character; YAML is text"),
        (b"ok: 1\n\xff\xfe", ":2:1: is not UTF-8 text"),
        (b"[" * 5000, ": is nested too deeply"),
        (b"#" * (4 * 1024 * 1024 + 1), ": is over 4 MiB: not a configuration"),
    ],
)
def test_no_mapping(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "rota.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}{said}"


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read: no such file or directory"):
        load(tmp_path / "none.yaml")
    with pytest.raises(InvalidConfig, match="is a directory; a YAML file is wanted"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # reading one without a writer would hang
    with pytest.raises(InvalidConfig, match="is not a regular file"):
        load(tmp_path / "pipe")
    with pytest.raises(InvalidConfig, match="cannot be read: embedded null byte"):
        load(Path("a\0b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.touch(mode=0o000)
    with pytest.raises(InvalidConfig, match="cannot be read: permission denied"):
        load(path)


def test_names_are_text(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """\
        models:
          123: {url: http://far:1}
          on: {url: http://far:1}
          012: {url: http://far:1}
          1e3: {url: http://far:1}
          null: {url: http://far:1}
          org/model:8b: {url: http://far:1, aliases: [yes, 1.10, 0x1]}
        """,
    )
    assert list(config.models) == ["123", "on", "012", "1e3", "null", "org/model:8b"]
    assert config.models["org/model:8b"].aliases == ("yes", "1.10", "0x1")
    assert config.resolve("1.10") == "org/model:8b"
    assert config.resolve("unknown") == "unknown"


def test_values_stay_as_written(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """\
        models:
          a: {cmd: "true ${PORT}", memory: 1GiB, env: {A: 1.10, B: on, C: 007, D: "", E: "~"}}
        """,
    )
    engine = config.models["a"].engine
    assert getattr(engine, "env") == {"A": "1.10", "B": "on", "C": "007", "D": "", "E": "~"}  # noqa: B009


def test_duplicate_keys_name_both_lines(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        """\
        models:
          a: {url: http://far:1}
          b: {url: http://far:1, url: http://far:2}
          a: {url: http://far:1}
        """,
    ) == [
        "3:26: `url` is there twice; the first is in line 3",
        "4:3: `a` is there twice; the first is in line 2",
    ]


def test_yaml_that_is_not_read(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        """\
        models:
          a: {url: !secret far}
          b: {<<: {}, url: http://far:1}
          ? [c]
          : {url: http://far:1}
          d: {url: "http://far:1", aliases: &x [*x]}
          e: {url: http://far:1, aliases: ["\\ud800"]}
          f: {url: http://far:1, aliases: ["\\0"]}
        """,
    ) == [
        "2:12: `far` is not a URL like http://10.0.0.7:8000",
        "2:12: tags are not read; remove `!secret`",
        "3:7: merge keys (`<<`) are not read; put what models share under `defaults:`",
        "4:5: a key must be text",
        "6:37: an alias that contains itself",
        "6:37: item 1 of `aliases` has no value; text is wanted",
        "7:36: item 1 of `aliases` is empty",
        "7:36: text with a character that no command can be given",
        "8:36: item 1 of `aliases` is empty",
        "8:36: text with a character that no command can be given",
    ]


def test_aliases_that_grow_without_end(tmp_path: Path) -> None:
    levels = "".join(f"  l{n}: &l{n} [{f'*l{n - 1},' * 10}]\n" for n in range(1, 9))
    assert complaints(tmp_path, f"x:\n  l0: &l0 [a]\n{levels}")[0].endswith(
        "repeats its aliases into too many values"
    )
