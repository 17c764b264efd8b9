"""The same groups give the same evictions as llama-swap's, over every pair and triple.
How: its documented rule, written down here by itself, against what an imported file comes to."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from rota.config import load
from rota.core.coexistence import FREE
from tests.config.helpers import write
from tests.config.llama_swap.helpers import converted, refused

NAMES = "abcdefg"
MODELS = "models:\n" + "".join(f'  {name}: {{cmd: "true ${{PORT}}"}}\n' for name in NAMES)


def who_leaves(
    homes: dict[str, str], flags: dict[str, tuple[bool, bool, bool]], target: str, present: set[str]
) -> set[str]:
    """Of the target's own group everyone if it swaps; of others, if the target's is exclusive,
    everyone whose group is not persistent."""
    swap, exclusive, _ = flags[homes[target]]
    own = {name for name in present if homes[name] == homes[target]}
    others = {name for name in present - own if not flags[homes[name]][2]}
    return (own if swap else set()) | (others if exclusive else set())


@pytest.mark.parametrize("flags", list(product((True, False), repeat=3)))
def test_groups(flags: tuple[bool, bool, bool], tmp_path: Path) -> None:
    rules = {
        "one": flags,
        "two": (False, True, False),
        "three": (True, False, True),
        "default": (True, True, False),
    }
    homes = {"a": "one", "b": "one", "c": "two", "d": "two", "e": "three"}
    homes |= dict.fromkeys("fg", "default")
    text = MODELS + "groups:\n"
    for group in ("one", "two", "three"):
        members = [name for name, home in homes.items() if home == group]
        for key, is_so in zip(("swap", "exclusive", "persistent"), rules[group], strict=True):
            text += f"  {group}: {{\n" if key == "swap" else ""
            text += f"    {key}: {'true' if is_so else 'false'},\n"
        text += f"    members: [{', '.join(members)}]}}\n"
    coexistence = load(write(tmp_path, text)).coexistence
    for target in NAMES:
        for size in (1, 2, 3):
            for present in combinations(sorted(set(NAMES) - {target}), size):
                (option,) = coexistence.options(target, frozenset(present))
                assert option.leaving == who_leaves(homes, rules, target, set(present)), (
                    target,
                    present,
                )


def test_no_groups_are_one_group(tmp_path: Path) -> None:
    coexistence = load(write(tmp_path, MODELS)).coexistence
    (option,) = coexistence.options("a", frozenset("bcd"))
    assert option.leaving == frozenset("bcd")


def test_memory_keeps_nobody_apart(tmp_path: Path) -> None:
    text = f"{MODELS}groups: {{g: {{swap: false, members: [{', '.join(NAMES)}]}}}}"
    config = load(write(tmp_path, text))
    need = sum(entry.model.memory_mib or 0 for entry in config.models.values())
    assert need < config.devices[0].memory_mib
    assert config.coexistence.options("a", frozenset("bcd"))[0].leaving == frozenset()
    assert config.devices[0].visible is None  # engines see what they saw


def test_a_matrix(tmp_path: Path) -> None:
    text = MODELS + (
        "matrix:\n  vars: {x: b}\n  evict_costs: {x: 10}\n"
        "  sets: {one: a & c, two: a & x, all: +two & d}\n"
    )
    coexistence = load(write(tmp_path, text)).coexistence
    assert coexistence.options("a", frozenset("bc"))[0].leaving == frozenset("c")
    assert coexistence.options("g", frozenset("ab"))[0].leaving == frozenset("ab")


def test_one_model_needs_no_rule(tmp_path: Path) -> None:
    assert load(write(tmp_path, 'models: {a: {cmd: "true ${PORT}"}}')).coexistence == FREE


def test_an_alias_as_a_member_is_its_model() -> None:
    page = converted(
        'models: {a: {cmd: "x ${PORT}", aliases: [aa]}, b: {cmd: "x ${PORT}"}}\n'
        "groups: {g: {members: [aa]}}"
    )
    assert "      - a\n" in page.text
    assert [str(note) for note in page.notes] == [
        "`groups`: `aa` is an alias; its model `a` is taken"
    ]


# --- Quartermaster's sizes ---

SIZED = """\
vramBudgetGB: 24
models:
  big: {cmd: "true ${PORT}", estVramGB: 18.5}
  small: {cmd: "true ${PORT}", estVramGB: 4.25}
  huge: {cmd: "true ${PORT}", estVramGB: 30}
  unsized: {cmd: "true ${PORT}"}
  ears: {cmd: "true ${PORT}"}
groups:
  asr: {members: [ears], persistent: true, exclusive: false}
"""


def test_sizes_decide_where_there_is_a_budget(tmp_path: Path) -> None:
    config = load(write(tmp_path, SIZED))
    assert [(device.id, device.memory_mib) for device in config.devices] == [("gpu", 24 * 1024)]
    sizes = {name: entry.model.memory_mib for name, entry in config.models.items()}
    assert sizes == {"big": 18_944, "small": 4_352, "huge": 24_576, "unsized": 1, "ears": 1}
    rules = config.coexistence

    def leave(target: str, *present: str) -> set[str]:
        return set(rules.options(target, frozenset(present))[0].leaving)

    assert leave("big", "small", "ears") == set()  # as memory allows
    assert leave("big", "small", "unsized", "ears") == {"unsized"}
    assert leave("unsized", "big", "small", "ears") == {"big", "small"}
    assert leave("ears", "big", "unsized") == set()
    assert not rules.may_displace("big", "ears")


def test_with_every_size_known_memory_alone_decides(tmp_path: Path) -> None:
    text = "vramBudgetGB: 8\nmodels:\n" + "".join(
        f'  {name}: {{cmd: "true ${{PORT}}", estVramGB: 3}}\n' for name in "ab"
    )
    assert load(write(tmp_path, text)).coexistence == FREE


def test_listeners_and_patience() -> None:
    page = converted(
        SIZED + 'listeners: {":1250": {groups: [asr]}, ":1300": {groups: [asr]}}\n'
        "slotCache: {enable: true}\n"
        "routing: {scheduler: {settings: {fifo: {holdMs: 20000, patienceMs: 90000}}}}\n"
    ).text
    assert "# listen: 0.0.0.0:1250   # others can reach it: needs `keys:` or --open\n" in page
    for line in ("hold: 20s", "hold_finished: 20s", "patience: 1m30s"):
        assert f"  {line}" in page
    assert "# slotCache: no counterpart; saving KV slots to disk is not built yet\n" in page


def test_keys_for_some_models_are_left_out() -> None:
    page = converted(SIZED + "apiKeys: [open-to-all, some-only]\napiKeyModels: {some-only: [big]}")
    assert page.text.count("sha256") == 1
    assert "some-only" not in page.text
    assert "open-to-all" not in page.text
    (line,) = refused(SIZED + "apiKeys: [some-only]\napiKeyModels: {some-only: [big]}")
    assert "leaves no key that opens all models" in line
