"""Several replicas of one model, and models that are loaded though nobody asks.

A scheduler fed by hand; every step is checked by the invariants and the audit.
"""

from __future__ import annotations

from dataclasses import replace

from rota.core.effects import Start, Stop
from rota.core.events import (
    GrantEnded,
    NodeJoined,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.types import Device, Phase, Preload
from tests.core.makers import Stage, granted, model, started, stopped

WIDE = model("wide", 5, scaling=(0, 3), slots=1, load_ms=10_000)


def crowd(stage: Stage) -> None:
    """One request at work, one that waits for its slot."""
    stage.ask("wide", "ann")
    stage.feed(ReplicaReady("r1"))
    stage.ask("wide", "ben")


def test_one_more_comes_when_somebody_has_waited_long_enough_for_a_slot() -> None:
    stage = Stage(WIDE, d0=20)
    crowd(stage)
    assert stage.scheduler.next_wake_ms() == 5_000
    assert not started(stage.feed(TimePassed(), after_ms=4_999))
    effects = stage.feed(TimePassed(), after_ms=1)
    assert started(effects) == ["wide"]
    assert [e.why for e in effects if isinstance(e, Start)] == [
        "every slot of wide was taken for 5 s"
    ]
    assert not started(stage.feed(TimePassed(), after_ms=60_000)), "one at a time"
    assert granted(stage.feed(ReplicaReady("r2"))) == ["q2"]
    stage.ask("wide", "cleo")
    assert started(stage.feed(TimePassed(), after_ms=5_000)) == ["wide"]
    stage.feed(ReplicaReady("r3"))
    stage.ask("wide", "dan")
    assert not started(stage.feed(TimePassed(), after_ms=60_000)), "three are the most"


def test_none_comes_when_a_slot_came_free_in_time() -> None:
    stage = Stage(WIDE, d0=20)
    crowd(stage)
    assert granted(stage.feed(GrantEnded("q1", Outcome.OK), after_ms=4_000)) == ["q2"]
    assert not started(stage.feed(TimePassed(), after_ms=60_000))


def test_one_more_never_costs_another_its_work_and_waits_for_idleness() -> None:
    """other was used a moment ago: not before it has been idle for as long as a load takes."""
    stage = Stage(WIDE, model("other", 5, load_ms=30_000), d0=10)
    crowd(stage)
    stage.ask("other", "olga")
    stage.feed(ReplicaReady("r2"))
    assert not stopped(stage.feed(TimePassed(), after_ms=10_000)), "it works"
    stage.feed(GrantEnded("q3", Outcome.OK))
    assert not stopped(stage.feed(TimePassed(), after_ms=14_999))
    assert stage.scheduler.next_wake_ms() == 25_000, "as long as loads of it took: 0 and 30 s"
    assert stopped(stage.feed(TimePassed(), after_ms=1)) == ["other"]
    assert started(stage.feed(ReplicaStopped("r2", StopCause.ASKED))) == ["wide"]


def test_who_has_none_goes_before_who_has_one() -> None:
    """Memory comes free for one: that of the model which has no replica."""
    stage = Stage(WIDE, model("none", 5), model("old", 5), d0=10)
    crowd(stage)
    stage.ask("old", "olga")
    stage.feed(ReplicaReady("r2"))
    stage.feed(TimePassed(), after_ms=20_000)
    stage.ask("none", "nora")
    stage.feed(GrantEnded("q3", Outcome.OK))
    assert started(stage.feed(ReplicaStopped("r2", StopCause.ASKED))) == ["none"]


def test_the_one_more_is_the_first_to_make_room() -> None:
    stage = Stage(WIDE, model("rare", 5), model("new", 5), d0=15)
    stage.ask("rare", "rita")
    stage.feed(ReplicaReady("r1"))
    stage.feed(GrantEnded("q1", Outcome.OK))
    stage.ask("wide", "ann")
    stage.feed(ReplicaReady("r2"))
    stage.ask("wide", "ben")
    stage.feed(TimePassed(), after_ms=5_000)
    stage.feed(ReplicaReady("r3"))
    for request in ("q2", "q3"):
        stage.feed(GrantEnded(request, Outcome.OK))
    effects = stage.ask("new", "nora")
    assert [e.replica for e in effects if isinstance(e, Stop)] == ["r3"], "not rare's only one"


def test_the_load_of_one_more_is_called_off_for_who_has_none() -> None:
    stage = Stage(WIDE, model("none", 5, load_ms=1_000), d0=10)
    crowd(stage)
    stage.feed(TimePassed(), after_ms=5_000)
    assert stopped(stage.ask("none", "nora")) == ["wide"]


def test_the_latest_step_down_first_and_the_oldest_is_asked_first() -> None:
    stage = Stage(
        replace(WIDE, scaling=replace(WIDE.scaling, min=1, idle_timeout_ms=60_000)), d0=20
    )
    stage.feed(ReplicaReady("r1"))
    for caller in ("ann", "ben"):
        stage.ask("wide", caller)
    stage.feed(TimePassed(), after_ms=5_000)
    stage.feed(ReplicaReady("r2"))
    for request in ("q1", "q2"):
        stage.feed(GrantEnded(request, Outcome.OK))
    effects = stage.feed(TimePassed(), after_ms=60_000)
    assert [e.replica for e in effects if isinstance(e, Stop)] == ["r2"]


def test_one_that_serves_does_not_step_down_for_one_that_only_loads() -> None:
    stage = Stage(model("a", 1, scaling=(1, 2), idle_ms=1_000), d0=10)
    stage.feed(ReplicaReady("r1"))
    stage.ask("a", "ann")
    stage.ask("a", "ben")
    stage.feed(TimePassed(), after_ms=5_000)
    for request in ("q1", "q2"):
        stage.feed(GrantEnded(request, Outcome.OK))
    assert not stopped(stage.feed(TimePassed(), after_ms=10_000))
    effects = stage.feed(ReplicaReady("r2"))
    assert [e.replica for e in effects if isinstance(e, Stop)] == ["r1"]


def test_min_is_kept_through_crashes_with_a_growing_pause() -> None:
    stage = Stage(model("a", 1, scaling=(1, 1)), d0=10)
    pauses_ms = []
    for number in range(1, 5):
        failed_ms = stage.now_ms
        assert not started(stage.feed(ReplicaStopped(f"r{number}", StopCause.CRASHED)))
        wake_ms = stage.scheduler.next_wake_ms()
        assert wake_ms is not None
        assert started(stage.feed(TimePassed(), after_ms=wake_ms - failed_ms)) == ["a"]
        pauses_ms.append(wake_ms - failed_ms)
    assert pauses_ms == [5_000, 10_000, 20_000, 40_000]


# ── loaded though nobody asks ────────────────────────────────────────────────────────────────


def test_a_default_model_is_back_when_the_one_that_displaced_it_has_gone() -> None:  # case W55
    default = replace(model("default", 6, idle_ms=1_000), preload=Preload.ALWAYS)
    stage = Stage(default, model("big", 8, idle_ms=60_000), d0=10)
    assert {r.phase for r in stage.scheduler.state.replicas.values()} == {Phase.STARTING}
    stage.feed(ReplicaReady("r1"))
    assert not stopped(stage.feed(TimePassed(), after_ms=3_600_000)), "it does not step down"
    assert stopped(stage.ask("big", "ben")) == ["default"]
    assert started(stage.feed(ReplicaStopped("r1", StopCause.ASKED))) == ["big"]
    stage.feed(ReplicaReady("r2"))
    stage.feed(GrantEnded("q1", Outcome.OK))
    assert stopped(stage.feed(TimePassed(), after_ms=60_000)) == ["big"], "its ttl has passed"
    assert started(stage.feed(ReplicaStopped("r2", StopCause.ASKED))) == ["default"]


def test_one_that_is_preloaded_once_steps_down_and_stays_down() -> None:
    once = replace(model("once", 6, idle_ms=60_000), preload=Preload.ONCE)
    stage = Stage(once, d0=10)
    stage.feed(ReplicaReady("r1"))
    assert stopped(stage.feed(TimePassed(), after_ms=60_000)) == ["once"]
    assert not started(stage.feed(ReplicaStopped("r1", StopCause.ASKED)))


def test_nobody_leaves_for_a_preload_and_nobody_who_waits_is_passed() -> None:
    default = replace(model("default", 2), preload=Preload.ALWAYS)
    stage = Stage(model("a", 8), model("b", 8), default, d0=8)
    assert started(stage.feed(NodeJoined("n1", (Device("d1", 1),)))) == []
    stage.feed(UnloadAsked("default", 0))
    stage.feed(ReplicaStopped("r1", StopCause.ASKED))
    stage.ask("a", "ann")
    stage.feed(ReplicaReady("r2"))
    stage.ask("b", "ben")
    stage.feed(GrantEnded("q1", Outcome.OK))
    assert started(stage.feed(ReplicaStopped("r2", StopCause.ASKED))) == ["b"]


def test_one_unloaded_by_hand_is_not_preloaded_again_until_it_is_asked_for() -> None:
    default = replace(model("default", 2), preload=Preload.ALWAYS)
    stage = Stage(default, d0=8)
    stage.feed(ReplicaReady("r1"))
    stage.feed(UnloadAsked("default", 0))
    assert not started(stage.feed(ReplicaStopped("r1", StopCause.ASKED)))
    assert started(stage.ask("default")) == ["default"]
