"""Each rule of waiting decides something: with it a mix of traffic goes well, without it not.

The scripts of `rota.sim.mixes`, with all rules on and with the one in question off.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
from click.testing import CliRunner

from rota.cli import main
from rota.core.types import Rules
from rota.sim import mixes
from rota.sim.mixes import MIXES, Mix

CASES = pytest.mark.parametrize("mix", MIXES, ids=lambda mix: f"{mix.name}, {mix.figure}")


@CASES
def test_with_the_rule_it_holds(mix: Mix) -> None:
    figure = mix.with_rule()
    assert mix.holds(figure), figure


@CASES
def test_without_the_rule_it_does_not(mix: Mix) -> None:
    figure = mix.without_rule()
    assert not mix.holds(figure), figure


def test_each_rule_has_its_mix() -> None:
    assert {mix.rule for mix in MIXES} == {rule.name for rule in fields(Rules)}


def test_the_command_prints_them_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "MIXES", [mix for mix in MIXES if mix.rule == "owed"])
    result = CliRunner().invoke(main, ["sim", "--mixes"])
    heads, row = result.output.splitlines()
    assert heads.split() == ["rule", "on", "off"]
    assert row.split()[-3:-1] == ["owed", "70"]
    assert result.exit_code == 0
