"""Traffic that some rule decides, played with the rule and without it: what each rule is for.

Each mix is a script for `Stage`, one figure that tells how it went, and the rule (`Rules` in
core/types.py) that makes the difference. A rule whose mix plays the same without it would have
no reason to be there; `tests/sim/test_mixes.py` asserts that each has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rota.core.types import Model, ModelName, Rules, Scaling
from rota.sim.stage import Stage

MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Mix:
    """A script and the rule that it is about.

    Args:
        rule: the field of `Rules` that is switched off.
        figure: what is measured, with its unit.
        play: plays it and gives the figure; None = it did not come about while it was played.
        holds: whether a figure is as the rule has it.
    """

    name: str
    rule: str
    figure: str
    play: Callable[[Rules], float | None]
    holds: Callable[[float | None], bool]

    def with_rule(self) -> float | None:
        return self.play(Rules())

    def without_rule(self) -> float | None:
        return self.play(replace(Rules(), **{self.rule: False}))


def table() -> Iterator[str]:
    """Every mix with its rule on and off, side by side; a line as soon as it has been played."""
    yield f"{'':<66} {'rule':<16} {'on':>8} {'off':>8}"
    for mix in MIXES:
        on, off = _shown(mix.with_rule()), _shown(mix.without_rule())
        yield f"{mix.name + ': ' + mix.figure:<66} {mix.rule:<16} {on:>8} {off:>8}"


def _shown(figure: float | None) -> str:
    return "never" if figure is None else f"{figure:.4g}"


# ── barriers ─────────────────────────────────────────────────────────────────────────────


def _rival_of_steady_traffic(rules: Rules) -> float | None:
    stage = _stage(rules, [10], [_model("a"), _model("b")])
    _keep_busy(stage, "a")
    stage.caller("b", 3_000, first_ms=10_000, times=1)
    return _first_wait_s(stage, "b", 30 * MINUTE_MS)


def _two_that_must_both_go(rules: Rules) -> float | None:
    stage = _stage(rules, [10], [_model("a", 5), _model("b", 5), _model("c")])
    _keep_busy(stage, "a", "b")
    stage.caller("c", 3_000, first_ms=10_000, times=1)
    return _first_wait_s(stage, "c", 30 * MINUTE_MS)


def _overlapping_leases(rules: Rules) -> float | None:
    stage = _stage(rules, [10], [_model("a"), _model("b")])
    stage.lessee("a", 90_000)
    stage.lessee("a", 90_000, first_ms=45_000)
    stage.caller("b", 3_000, first_ms=10_000, times=1)
    return _first_wait_s(stage, "b", 60 * MINUTE_MS)


def _never_quiet(rules: Rules) -> float | None:
    stage = _stage(rules, [10], [_model("a", 5, is_exclusive_while_busy=True), _model("b", 5)])
    _keep_busy(stage, "a")
    stage.caller("b", 3_000, first_ms=20_000, times=1)
    waited_s = _first_wait_s(stage, "b", 30 * MINUTE_MS)
    assert stage.starts["a"] == 1, "what only has to fall quiet is not stopped"
    return waited_s


# ── the others ───────────────────────────────────────────────────────────────────────────


def _beside_a_long_job(rules: Rules) -> float | None:
    """Two on a device, of which one works for ten minutes, and a third that needs it whole."""
    stage = _stage(rules, [10], [_model("a", 5), _model("b", 5), _model("c")])
    stage.caller("a", 600_000, times=1)
    for n in range(6):
        stage.caller("b", 1_000, first_ms=n * 9_000)
    stage.caller("c", 3_000, first_ms=10_000, times=1)
    stage.run_until(120_000)  # c is past its patience, and the barrier stands
    before = stage.served["b"]
    stage.run_until(600_000)
    return stage.served["b"] - before


def _six_on_room_for_two(rules: Rules) -> float:
    stage = _six_hot(rules)
    return round(sum(stage.starts.values()) / (stage.now_ms / MINUTE_MS), 1)


def _six_served(rules: Rules) -> float:
    stage = _six_hot(rules)
    return round(sum(stage.served.values()) / (stage.now_ms / MINUTE_MS), 1)


def _six_hot(rules: Rules) -> Stage:
    """Loads of a minute and a patience of two: everyone who waits is past it by its turn."""
    names = [f"m{n}" for n in range(6)]
    models = [_model(name, patience_ms=120_000) for name in names]
    stage = _stage(rules, [10, 10], models, load_ms=60_000)
    _keep_busy(stage, *names)
    stage.run_until(20 * MINUTE_MS)
    return stage


def _low_among_high(rules: Rules) -> float | None:
    models = [_model("h1", priority=5), _model("h2", priority=5), _model("low")]
    stage = _stage(rules, [10], models)
    _keep_busy(stage, "h1", "h2")
    stage.caller("low", 3_000, first_ms=10_000, times=1)
    return _first_wait_s(stage, "low", 60 * MINUTE_MS)


def _told_to_return(rules: Rules) -> float | None:
    """A caller is told to come back in a minute, its model is ready after half of that, and a rival
    of higher priority asks every few seconds."""
    models = [
        _model("a", patience_ms=300_000, activation_wait_ms=10_000),
        _model("b", patience_ms=300_000, priority=5),
    ]
    stage = _stage(rules, [10], models, load_ms=30_000)
    stage.caller("a", 1_000, times=1)
    stage.caller("b", 1_000, first_ms=35_000, think_ms=5_000)
    return _first_wait_s(stage, "a", 30 * MINUTE_MS)


def _abandoned_loads(rules: Rules) -> float:
    """Two callers who give up after a while and try again, so that either's load is often nobody's
    when the other asks."""
    stage = _stage(rules, [10], [_model("a"), _model("b")], load_ms=30_000)
    stage.caller("a", 1_000, think_ms=12_000, leaves_ms=10_000)
    stage.caller("b", 1_000, first_ms=11_000, think_ms=12_000, leaves_ms=10_000)
    stage.run_until(30 * MINUTE_MS)
    return sum(stage.served.values())


MIXES = (
    Mix(
        "a rival of steady traffic on a ready model",
        "barriers",
        "s to its grant",
        _rival_of_steady_traffic,
        lambda s: s is not None and s <= 120,
    ),
    Mix(
        "two busy models that must both go",
        "barriers",
        "s to its grant",
        _two_that_must_both_go,
        lambda s: s is not None and s <= 120,
    ),
    Mix(
        "overlapping leases of 90 s",
        "barriers",
        "s to a rival's grant",
        _overlapping_leases,
        lambda s: s is not None and s <= 300,
    ),
    Mix(
        "an exclusive model that is never quiet",
        "barriers",
        "s to a neighbour's grant",
        _never_quiet,
        lambda s: s is not None and s <= 120,
    ),
    Mix(
        "beside a job that must end first",
        "whole_sets",
        "served meanwhile",
        _beside_a_long_job,
        lambda n: n is not None and n >= 20,
    ),
    Mix(
        "beside a job that must end first",
        "reopening",
        "served meanwhile",
        _beside_a_long_job,
        lambda n: n is not None and n >= 20,
    ),
    Mix(
        "six hot models on room for two",
        "residence",
        "swaps per minute",
        _six_on_room_for_two,
        lambda n: n is not None and n <= 2 * 60 / (60 + 60) + 0.1,  # it pays as long as it loads
    ),
    Mix(
        "the same",
        "residence",
        "served per minute",
        _six_served,
        lambda n: n is not None and n >= 20,
    ),
    Mix(
        "low priority under endless high",
        "outranking",
        "s to its grant",
        _low_among_high,
        lambda s: s is not None and s <= 300,
    ),
    Mix(
        "told to return, into a rival's traffic",
        "owed",
        "s to its grant",
        _told_to_return,
        lambda s: s is not None and s <= 75,
    ),
    Mix(
        "abandoned loads that call each other off",
        "called_off_once",
        "served in 30 min",
        _abandoned_loads,
        lambda n: n is not None and n > 0,
    ),
)


def _stage(rules: Rules, devices: list[int], models: list[Model], load_ms: int = 10_000) -> Stage:
    return Stage(devices, models, lambda _: load_ms, rules)


def _model(
    name: ModelName,
    memory_mib: int = 10,
    *,
    patience_ms: int = 60_000,
    activation_wait_ms: int = 45_000,
    priority: int = 0,
    is_exclusive_while_busy: bool = False,
) -> Model:
    return Model(
        name=name,
        scaling=Scaling(0, 1, 0),
        memory_mib=memory_mib,
        patience_ms=patience_ms,
        activation_wait_ms=activation_wait_ms,
        priority=priority,
        is_exclusive_while_busy=is_exclusive_while_busy,
    )


def _keep_busy(stage: Stage, *models: ModelName) -> None:
    """Two callers each, whose requests do not end at one instant for an hour and a half."""
    for model in models:
        stage.caller(model, 3_001)
        stage.caller(model, 2_003)


def _first_wait_s(stage: Stage, model: ModelName, until_ms: int) -> float | None:
    """How long the first caller of a model waited; None = until then it was not granted."""
    stage.run_until(until_ms)
    waited_ms = stage.waited_ms[model]
    return waited_ms[0] / 1_000 if waited_ms else None
