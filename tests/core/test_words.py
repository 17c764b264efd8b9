"""What callers are told is true: the reason, the estimate, when to come back.

A scheduler fed by hand, and the words it would use.
"""

from __future__ import annotations

import pytest

from rota.core import words
from rota.core.effects import RefusalCode, WaitKind
from rota.core.events import (
    GrantEnded,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    StopCause,
    TimePassed,
)
from tests.core.makers import Stage, model


def told(stage: Stage, name: str) -> tuple[WaitKind, str]:
    tell = words.reason(stage.scheduler.state, stage.scheduler.state.demands[name])
    return tell.kind, tell.text


def eta_ms(stage: Stage, name: str) -> int | None:
    return words.eta_ms(stage.scheduler.state, stage.scheduler.state.demands[name])


def test_the_reason_names_what_is_waited_for() -> None:
    stage = Stage(model("a"), model("b", patience_ms=60_000))
    stage.ask("a")
    assert told(stage, "a") == (WaitKind.LOADING, "a is loading")
    stage.feed(ReplicaReady("r1"))
    stage.ask("a")
    assert told(stage, "a") == (WaitKind.SLOT, "every slot of a is taken")
    stage.ask("b", after_ms=1)
    assert told(stage, "b") == (WaitKind.WORK, "waiting for a to come free")
    stage.feed(TimePassed(), after_ms=60_000)
    assert told(stage, "b") == (WaitKind.ROOM, "waiting for a to finish and leave")
    stage.feed(GrantEnded("q1", Outcome.OK))
    stage.feed(GrantEnded("q2", Outcome.OK))
    assert told(stage, "b") == (WaitKind.ROOM, "waiting for a to leave")


def test_a_load_is_estimated_by_the_last_and_counts_down() -> None:
    stage = Stage(model("a", load_ms=10_000))
    stage.ask("a")
    assert eta_ms(stage, "a") == 10_000
    stage.feed(TimePassed(), after_ms=9_000)
    assert eta_ms(stage, "a") == 1_000


def test_status_counts_down_without_news() -> None:
    stage = Stage(model("a", load_ms=10_000))
    stage.ask("a")
    stage.feed(TimePassed(), after_ms=9_000)
    models = stage.scheduler.snapshot()["models"]
    assert isinstance(models, list)
    assert models[0]["eta_s"] == 1.0


def test_a_late_load_is_expected_to_be_late_by_as_much_again() -> None:
    stage = Stage(model("a", load_ms=10_000))
    stage.ask("a")
    stage.feed(TimePassed(), after_ms=13_000)
    assert eta_ms(stage, "a") == 3_000


def test_nothing_known_is_not_guessed() -> None:
    stage = Stage(model("a"), model("b", load_ms=1_000))
    stage.ask("a")
    assert eta_ms(stage, "a") is None
    assert words.retry_after_ms(
        stage.scheduler.state, stage.scheduler.state.demands["a"], "q1"
    ) == (words.RETRY_MS_MAX)
    stage.feed(ReplicaReady("r1"))
    stage.ask("b")
    assert eta_ms(stage, "b") is None, "when another's work ends is not known"


def test_a_slot_is_estimated_by_how_long_grants_take() -> None:
    stage = Stage(model("a", slots=2))
    stage.ask("a")
    stage.feed(ReplicaReady("r1"))
    stage.feed(GrantEnded("q1", Outcome.OK), after_ms=4_000)
    for _ in range(5):
        stage.ask("a")
    assert eta_ms(stage, "a") == 2 * 4_000  # three wait for two slots


@pytest.mark.parametrize("code", RefusalCode)
def test_every_refusal_has_words_and_says_when_to_return_only_where_that_helps(
    code: RefusalCode,
) -> None:
    stage = Stage(model("a"), model("b"))
    stage.ask("a")
    stage.feed(ReplicaStopped("r1", StopCause.CRASHED, "no memory"))
    state = stage.scheduler.state
    refusal = words.refusal(state, state.demands["a"], code, "q1")
    assert refusal.code is code
    assert refusal.message.endswith((".", "y"))
    if refusal.retry_after_ms is not None:
        assert words.RETRY_MS_MIN <= refusal.retry_after_ms <= words.RETRY_MS_MAX
        assert refusal.retry_after_ms % 1_000 == 0


def test_a_model_that_fits_nowhere_is_told_what_there_is() -> None:
    stage = Stage(model("big", 30, count=2), model("bound", 8, devices=frozenset({"x"})), d0=10)
    state = stage.scheduler.state
    assert words.too_large(state, state.demands["big"].model) == (
        "It needs 30 MiB on each of 2 devices; d0 has 10 MiB."
    )
    assert words.too_large(state, state.demands["bound"].model) == (
        "It needs 8 MiB; there is no device it may use."
    )
