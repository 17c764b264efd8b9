"""Another catalog counts from one step to the next, and nothing that runs or waits is lost.

A scheduler fed by hand; every step is checked by the invariants and the audit.
"""

from __future__ import annotations

from dataclasses import replace

from rota.core.effects import Effect
from rota.core.events import (
    GrantEnded,
    ModelsChanged,
    NodeJoined,
    Outcome,
    PinAsked,
    ReplicaReady,
    ReplicaStopped,
    Running,
    StopCause,
    TimePassed,
)
from rota.core.types import Device, Model, Phase, Placement, Scaling
from tests.core.makers import Stage, granted, model, refusals, started, stopped


def change(stage: Stage, *models: Model, relaunched: tuple[str, ...] = ()) -> list[Effect]:
    return stage.feed(ModelsChanged(models, relaunched=frozenset(relaunched)))


def test_what_stays_keeps_its_replica_its_work_and_its_queue() -> None:  # case W23
    a = model("a", 5, slots=1)
    stage = Stage(a)
    stage.ask("a")
    stage.feed(ReplicaReady("r1"))
    stage.ask("a", "ben")
    before = repr(stage.scheduler.state)
    assert not change(stage, a)
    assert repr(stage.scheduler.state).replace("review_ms=0", "") == before.replace(
        "review_ms=0", ""
    )
    assert not change(stage, replace(a, memory_mib=6, slots=9))
    assert len(stage.scheduler.state.replicas) == 1
    assert granted(stage.feed(GrantEnded("q1", Outcome.OK))) == ["q2"], "one at a time, as started"


def test_one_that_is_new_is_served_and_one_that_is_gone_is_not_found() -> None:  # case C1
    a, b, d = model("a", 4), model("b", 4), model("d", 2)
    stage = Stage(a, b)
    for name in "ab":
        stage.ask(name)
    for replica in ("r1", "r2"):
        stage.feed(ReplicaReady(replica))
    assert not stopped(change(stage, a, d)), "what runs on it ends first"
    assert refusals(stage.ask("b", "ben")) == ["model_not_found"]
    assert started(stage.ask("d")) == ["d"]
    assert stopped(stage.feed(GrantEnded("q2", Outcome.OK))) == ["b"]
    stage.feed(ReplicaStopped("r2", StopCause.ASKED))
    assert list(stage.scheduler.state.demands) == ["a", "d"]


def test_who_waits_for_one_that_goes_is_told_and_its_load_ends() -> None:
    a, b = model("a", 4), model("b", 4)
    stage = Stage(a, b)
    stage.ask("b")
    effects = change(stage, a)
    assert refusals(effects) == ["model_not_found"]
    assert stopped(effects) == ["b"]
    change(stage, a, b)
    assert not started(stage.ask("b", "ben")), "the old one is still there, and one is the most"
    assert started(stage.feed(ReplicaStopped("r1", StopCause.ASKED))) == ["b"]


def test_of_more_than_there_may_be_the_latest_leave() -> None:
    a = model("a", 1, scaling=(3, 3))
    stage = Stage(a)
    for replica in ("r1", "r2"):
        stage.feed(ReplicaReady(replica))
    stage.ask("a")
    few = replace(a, scaling=Scaling(0, 2, 0))
    assert stopped(change(stage, few)) == ["a"]
    phases = {r.id: r.phase for r in stage.scheduler.state.replicas.values()}
    assert phases == {"r1": Phase.READY, "r2": Phase.READY, "r3": Phase.STOPPING}
    assert stopped(change(stage, replace(few, scaling=Scaling(0, 0, 0)))) == ["a"]
    assert refusals(stage.ask("a", "ben")) == ["model_off"]
    assert stopped(stage.feed(GrantEnded("q1", Outcome.OK))) == ["a"]


def test_one_that_failed_is_tried_again_once_it_is_started_in_another_way() -> None:
    a = model("a", 4)
    stage = Stage(a)
    stage.ask("a")
    stage.feed(ReplicaStopped("r1", StopCause.CRASHED, "no such flag"))
    assert refusals(stage.ask("a", "ben")) == ["model_cooling"]
    change(stage, a)
    assert refusals(stage.ask("a", "cleo")) == ["model_cooling"]
    change(stage, a, relaunched=("a",))
    assert started(stage.ask("a", "dan")) == ["a"]


def test_a_pin_by_hand_outlives_a_change_and_one_of_the_file_does_not() -> None:
    a, b = model("a", 4), replace(model("b", 4), is_pinned=True)
    stage = Stage(a, b)
    stage.feed(PinAsked("a", is_pinned=True))
    change(stage, a, replace(b, is_pinned=False))
    demands = stage.scheduler.state.demands
    assert (demands["a"].is_pinned, demands["b"].is_pinned) == (True, False)


def test_a_node_that_is_back_with_a_model_that_no_file_has_ends_it() -> None:
    stage = Stage(model("a", 4))
    runs = Running("r7", "old", Placement("n1", ("d0",), (8,)), Phase.READY)
    assert stopped(stage.feed(NodeJoined("n1", (Device("d0", 10),), (runs,)))) == ["old"]
    stage.feed(ReplicaStopped("r7", StopCause.ASKED))
    stage.feed(TimePassed())
    assert list(stage.scheduler.state.demands) == ["a"]
