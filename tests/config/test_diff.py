"""What changes between two files, by which key, and from when on it counts.
How: files are loaded and compared; each field of the values is looked up in the schema."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from rota.config import diff, schema
from rota.config.diff import Changed, Diff, compare
from rota.config.values import (
    CommandEngine,
    Config,
    LlamaCppEngine,
    ModelConfig,
    UrlEngine,
)
from rota.core.types import Model
from tests.config.helpers import loaded

BEFORE = """\
    listen: 127.0.0.1:8080
    devices: {gpu0: {memory: 24GiB}}
    defaults: {scaling: {max: 1}}
    models:
      a: {cmd: "true ${PORT}", memory: 1GiB}
      b: {cmd: "true ${PORT}", memory: 1GiB}
      far: {url: "http://10.0.0.7:8000"}
"""


def changes(folder: Path, *edits: tuple[str, str]) -> Diff:
    """From `BEFORE` to the same after some replacements."""
    after = BEFORE
    for old, new in edits:
        assert old in after, old
        after = after.replace(old, new)
    return compare(loaded(folder, BEFORE), loaded(folder, after))


def test_nothing_changes(tmp_path: Path) -> None:
    found = changes(tmp_path, ("    defaults:", "    # moved down a line\n    defaults:"))
    assert found == Diff(unchanged=("a", "b", "far"))
    assert not found


def test_models_come_and_go(tmp_path: Path) -> None:
    found = changes(tmp_path, ("      b: {", "      d: {"))
    assert found == Diff(added=("d",), removed=("b",), unchanged=("a", "far"))
    assert found


@pytest.mark.parametrize(
    ("now", "after", "keys"),
    [
        ('a: {cmd: "true', 'a: {cmd: "true -v', Changed(next_start=("cmd",))),
        ("a: {", "a: {env: {TOKEN: secret}, ", Changed(next_start=("env",))),
        ("a: {", "a: {concurrency: 3, ", Changed(next_start=("concurrency",))),
        ("a: {", "a: {start_timeout: 1m, start_timeout_max: 4m, ", Changed(
            next_start=("start_timeout", "start_timeout_max"))),
        ("a: {", "a: {aliases: [x], patience: 1m, ", Changed(now=("patience", "aliases"))),
        ("a: {", "a: {scaling: {min: 1}, port: 80, ", Changed(("scaling",), ("port",))),
        ("a: {", "a: {hold: 10s, priority: 0, ", Changed()),
    ],
)  # fmt: skip
def test_keys_of_a_model(tmp_path: Path, now: str, after: str, keys: Changed) -> None:
    found = changes(tmp_path, (now, after))
    assert found == Diff(
        changed={"a": keys} if keys else {},
        unchanged=("b", "far") if keys else ("a", "b", "far"),
    )


def test_another_url_counts_at_once(tmp_path: Path) -> None:
    found = changes(tmp_path, ("10.0.0.7", "10.0.0.8"))
    assert found.changed == {"far": Changed(now=("url",))}


def test_another_kind_of_engine(tmp_path: Path) -> None:
    found = changes(
        tmp_path, ('far: {url: "http://10.0.0.7:8000"}', 'far: {cmd: "true ${PORT}", memory: 1GiB}')
    )
    assert found.changed["far"].next_start[:2] == ("url", "cmd")


def test_what_defaults_mean_for_models_is_said_of_these(tmp_path: Path) -> None:
    found = changes(tmp_path, ("defaults: {", "defaults: {priority: 3, "))
    assert found.changed == {name: Changed(now=("priority",)) for name in ("a", "b", "far")}
    assert not found.top


def test_keys_at_the_top(tmp_path: Path) -> None:
    found = changes(
        tmp_path,
        (":8080", ":8081"),
        ("24GiB", "23GiB"),
        ("    models:", "    hold_max: 1m\n    eviction: lru\n    state: /elsewhere\n    models:"),
    )
    assert found.top == Changed(
        now=("hold_max", "eviction"), restart=("listen", "devices", "state")
    )
    assert found.unchanged == ("a", "b", "far")


def test_rules_that_come_count_at_once(tmp_path: Path) -> None:
    groups = "    groups: {g: {members: [a, b]}}\n    models:"
    assert changes(tmp_path, ("    models:", groups)).top == Changed(now=("groups",))
    sets = "    matrix: {sets: {x: a & b}}\n    models:"
    assert changes(tmp_path, ("    models:", sets)).top == Changed(now=("matrix",))


@pytest.mark.parametrize(
    ("values", "table", "keys"),
    [
        (Config, diff._TOP, schema.FileKeys),
        (ModelConfig, diff._OF_ENTRY, schema.ModelKeys),
        (Model, diff._OF_MODEL, schema.ModelKeys),
        (CommandEngine, diff._OF_ENGINE, schema.ModelKeys),
        (LlamaCppEngine, {}, schema.ModelKeys),
        (UrlEngine, {}, schema.ModelKeys),
    ],
)
def test_each_field_is_told_by_a_key_of_the_file(
    values: type, table: dict[str, str | None], keys: type[schema.Keys]
) -> None:
    names = {field.name for field in fields(values)}
    assert set(table) <= names
    told = {diff.key_of(name, table) for name in names} - {None}
    assert told <= set(keys.model_fields)


def test_what_counts_later_is_there() -> None:
    every = {field.name for kind in (Config, ModelConfig, Model) for field in fields(kind)}
    assert every >= diff._RESTART | diff._NEXT_START
