"""Which of those who may leave does leave, and what is said of it.

A scheduler fed by hand; every step is checked by the invariants.
"""

from __future__ import annotations

from rota.core.effects import Effect, Stop
from rota.core.events import (
    GrantEnded,
    ModelsChanged,
    Outcome,
    ReplicaReady,
    RequestArrived,
    TimePassed,
)
from rota.core.types import Eviction
from tests.core.makers import Stage, granted, model, stopped

MODELS = (model("habit", 5), model("guest", 5), model("rival", 5))


def used(stage: Stage, name: str, *, times: int, every_ms: int) -> None:
    """Requests that are served at once."""
    for _ in range(times):
        assert granted(stage.ask(name, after_ms=every_ms))
        stage.feed(GrantEnded(f"q{stage.count}", Outcome.OK))


def one_of_habit_and_a_guest() -> Stage:
    """Both are ready; habit was used eleven times, guest once and last."""
    stage = Stage(*MODELS, d0=10)
    stage.ask("habit")
    stage.feed(ReplicaReady("r1"), after_ms=8_000)
    stage.feed(GrantEnded("q1", Outcome.OK))
    used(stage, "habit", times=10, every_ms=60_000)
    stage.ask("guest", after_ms=60_000)
    stage.feed(ReplicaReady("r2"), after_ms=8_000)
    stage.feed(GrantEnded("q12", Outcome.OK))
    return stage


def reasons(effects: list[Effect]) -> list[str]:
    return [effect.why for effect in effects if isinstance(effect, Stop)]


def test_the_one_least_likely_to_be_missed_leaves_and_is_told_why() -> None:
    stage = one_of_habit_and_a_guest()
    effects = stage.ask("rival", after_ms=120_000)
    assert stopped(effects) == ["guest"]
    (why,) = reasons(effects)
    assert why.startswith("makes room for rival; not used for 120.0 s, ")
    assert why.endswith(", wanted about 3 times an hour, 8 s to load again")


def test_by_least_recent_use_the_regular_leaves_and_the_file_may_say_so_at_any_time() -> None:
    stage = one_of_habit_and_a_guest()
    stage.feed(ModelsChanged(MODELS, eviction=Eviction.LRU))
    effects = stage.ask("rival", after_ms=120_000)
    assert stopped(effects) == ["habit"]
    assert reasons(effects) == ["makes room for rival; not used for 188.0 s"]


def test_a_change_of_the_catalog_forgets_no_history() -> None:
    stage = one_of_habit_and_a_guest()
    stage.feed(ModelsChanged(MODELS))
    assert stopped(stage.ask("rival", after_ms=120_000)) == ["guest"]


def test_a_dear_load_is_kept_before_a_cheap_one() -> None:
    """Wanted alike, and the dear one longer ago."""
    stage = Stage(model("dear", 5), model("cheap", 5), model("rival", 5), d0=10)
    stage.ask("dear")
    stage.feed(ReplicaReady("r1"), after_ms=60_000)
    stage.feed(GrantEnded("q1", Outcome.OK))
    stage.ask("cheap", after_ms=1_000)
    stage.feed(ReplicaReady("r2"), after_ms=2_000)
    stage.feed(GrantEnded("q2", Outcome.OK))
    assert stopped(stage.ask("rival", after_ms=300_000)) == ["cheap"]


def test_who_comes_back_when_told_wants_nothing_new() -> None:
    stage = Stage(model("a"))
    for _ in range(5):
        stage.count += 1
        ask = RequestArrived(f"q{stage.count}", "a", "ann", mark=1, activation_wait_ms=0)
        stage.feed(ask, after_ms=1_000)
        stage.feed(TimePassed())
    counts = stage.scheduler.state.demands["a"].history.counts
    assert all(0 < count <= 1 for count in counts)
