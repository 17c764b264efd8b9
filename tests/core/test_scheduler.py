"""One rule each, mostly those that were once broken; every step is checked by the invariants.

A scheduler fed by hand: what it orders, and for whom.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.effects import RefusalCode, Refuse
from rota.core.events import (
    GrantEnded,
    LoadAsked,
    NodeJoined,
    NodeLost,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    Running,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Phase, Placement
from tests.core.makers import Stage, granted, model, refusals, started, stopped

MINUTE_MS = 60_000


def closed(stage: Stage) -> list[str]:
    """The replicas that stand behind a barrier."""
    return [r.id for r in stage.scheduler.state.replicas.values() if r.closed_for is not None]


def test_past_patience_goes_before_one_that_is_older_and_more_patient() -> None:
    """The idle one is not taken from hasty's set for patient, who came first and has time."""
    stage = Stage(
        model("idle", 5),
        model("busy", 5, slots=2),
        model("patient", 5, patience_ms=10 * MINUTE_MS),
        model("hasty", 10, patience_ms=1_000),
    )
    stage.ask("busy")
    stage.ask("idle")
    stage.feed(ReplicaReady("r1"))
    stage.feed(ReplicaReady("r2"))
    stage.ask("patient", "pat", after_ms=1)
    stage.ask("hasty", "hal", after_ms=1)
    stage.feed(TimePassed(), after_ms=2_000)
    assert closed(stage) == ["r1", "r2"]
    assert not stopped(stage.feed(GrantEnded("q2", Outcome.OK)))
    assert sorted(stopped(stage.feed(GrantEnded("q1", Outcome.OK)))) == ["busy", "idle"]


def test_past_patience_a_promise_may_count_on_a_replica_that_loads() -> None:
    """Else, under steady churn, somebody is always loading and a large model never gets in."""
    stage = Stage(model("small", 5), model("whole", None, patience_ms=1_000))
    stage.ask("small")
    stage.ask("whole", "will")
    stage.feed(TimePassed(), after_ms=2_000)
    whole = stage.scheduler.state.demands["whole"]
    assert whole.promise is not None
    assert granted(stage.feed(ReplicaReady("r1"))) == ["q1"]  # those it was loaded for come first
    stage.feed(TimePassed(), after_ms=2_000)  # its residence: as long as its load took
    stage.ask("small", "sue")
    assert stopped(stage.feed(GrantEnded("q1", Outcome.OK))) == ["small"]
    assert started(stage.feed(ReplicaStopped("r1", StopCause.ASKED))) == ["whole"]


def test_an_idle_replica_whose_own_callers_come_first_is_not_evicted() -> None:
    """It would only have to be loaded again at once."""
    stage = Stage(model("a", slots=1), model("b"))
    stage.ask("a", "ann")
    stage.feed(ReplicaReady("r1"))
    stage.ask("a", "bob", after_ms=1)
    stage.feed(TimePassed(), after_ms=600_000)  # bob waited as long as he may: 429
    stage.ask("b", "ben")
    assert not stopped(stage.feed(GrantEnded("q1", Outcome.OK), after_ms=1))
    assert granted(stage.ask("a", "bob", after_ms=2_000)) == ["q4"]
    assert stopped(stage.feed(GrantEnded("q4", Outcome.OK), after_ms=1)) == ["a"]


def test_a_caller_told_busy_keeps_its_place() -> None:
    stage = Stage(model("a", slots=1))
    stage.ask("a", "ann")
    stage.feed(ReplicaReady("r1"))
    stage.ask("a", "early")
    assert refusals(stage.feed(TimePassed(), after_ms=600_000)) == ["model_busy"]
    stage.ask("a", "late", after_ms=1)
    stage.ask("a", "early", after_ms=1_000)
    assert granted(stage.feed(GrantEnded("q1", Outcome.OK))) == ["q4"]


def test_room_for_one_of_two_serves_those_who_wait_for_the_one() -> None:
    stage = Stage(model("a", scaling=(2, 2), slots=1))
    stage.feed(ReplicaReady("r1"))
    assert granted(stage.ask("a")) == ["q1"]
    assert not refusals(stage.ask("a"))
    assert granted(stage.feed(GrantEnded("q1", Outcome.OK), after_ms=10 * MINUTE_MS - 1)) == ["q2"]


def test_the_last_waiter_leaving_voids_the_promise_whatever_the_bound_on_absent_ones() -> None:
    stage = Stage(model("a", slots=9), model("b", patience_ms=0, queue_max=1))
    stage.ask("a")
    stage.feed(ReplicaReady("r1"))
    stage.ask("b", "one")
    stage.feed(RequestCancelled("q2"))
    stage.ask("b", "two")
    assert closed(stage) == ["r1"]
    stage.feed(RequestCancelled("q3"))
    assert not closed(stage)
    assert granted(stage.ask("a", "ann")) == ["q4"]


def test_an_endpoint_that_is_to_be_kept_is_not_looked_at_without_pause() -> None:
    stage = Stage(model("far", count=0, scaling=(1, 1)))
    assert not started(stage.feed(ReplicaStopped("r1", StopCause.REFUSED)))
    assert started(stage.ask("far")) == ["far"]  # but at once for a caller
    assert refusals(stage.feed(ReplicaStopped("r2", StopCause.REFUSED))) == ["no_endpoint"]
    assert not started(stage.feed(TimePassed(), after_ms=9_999))
    assert started(stage.feed(TimePassed(), after_ms=1)) == ["far"]


def test_waits_that_follow_one_another_end_when_the_caller_cannot_stand_more() -> None:
    stage = Stage(model("a", slots=1))
    stage.ask("a", "ann")
    stage.feed(ReplicaReady("r1"))
    stage.feed(GrantEnded("q1", Outcome.OK))
    stage.ask("a", "bob")
    stage.ask("a", "carl")  # may wait 10 min for a slot, and 45 s for a load
    stage.feed(ReplicaStopped("r1", StopCause.CRASHED, "gone"), after_ms=590_000)
    assert not refusals(stage.feed(TimePassed(), after_ms=9_999))
    assert refusals(stage.feed(TimePassed(), after_ms=1)) == ["model_loading"]


def test_a_load_asked_by_hand_and_given_up_starts_nothing_and_is_nobody_elses() -> None:
    stage = Stage(model("a"), model("b"))
    stage.ask("a")
    stage.feed(ReplicaReady("r1"))
    stage.feed(LoadAsked("hand", "b"))
    stage.feed(RequestCancelled("hand"))
    assert not stopped(stage.feed(GrantEnded("q1", Outcome.OK)))
    stage.ask("b", "")
    stage.feed(ReplicaStopped("r1", StopCause.ASKED))
    assert granted(stage.feed(ReplicaReady("r2"))) == ["q2"]


def test_a_second_unload_does_not_lengthen_the_grace() -> None:
    stage = Stage(model("a"))
    stage.ask("a")
    stage.feed(ReplicaReady("r1"))
    stage.feed(UnloadAsked("a", 1_000))
    stage.feed(UnloadAsked("a", 3_600_000))
    assert stopped(stage.feed(TimePassed(), after_ms=1_000)) == ["a"]


def test_who_is_told_to_return_finds_the_load_done_when_it_takes_what_it_took() -> None:
    """`Retry-After` is the estimate: of twenty who wait, all return to a ready replica."""
    stage = Stage(model("a", load_ms=50_000, slots=20))
    for n in range(20):
        stage.ask("a", f"caller{n}")
    effects = stage.feed(TimePassed(), after_ms=45_000)
    backs = [e.refusal.retry_after_ms for e in effects if isinstance(e, Refuse)]
    assert len(backs) == 20
    assert all(back is not None and 5_000 <= back <= 7_000 for back in backs)
    assert len(set(backs)) > 1, "they do not all return at one instant"


def test_the_alarms_do_not_pile_up() -> None:
    """Hundreds of cycles of load, work and idling leave a handful of alarms."""
    stage = Stage(model("a", idle_ms=1_000))
    for n in range(300):
        stage.ask("a", f"c{n}")
        stage.feed(ReplicaReady(f"r{n + 1}"), after_ms=10)
        stage.feed(GrantEnded(f"q{n + 1}", Outcome.OK), after_ms=10)
        stage.feed(TimePassed(), after_ms=1_000)
        stage.feed(ReplicaStopped(f"r{n + 1}", StopCause.ASKED), after_ms=10)
    stage.scheduler.next_wake_ms()
    assert len(stage.scheduler.orders.alarms) <= 8
    assert not stage.scheduler.state.demands["a"].left


def test_a_scheduler_without_a_node_keeps_those_who_ask_waiting() -> None:
    scheduler = Scheduler([model("a")])
    assert not started(scheduler.step(LoadAsked("q1", "a"), 0))
    assert scheduler.state.waiting


def test_a_replica_that_cannot_be_reached_is_replaced() -> None:
    """Its process may live on with a dead port; kept, it would fail each caller for ever."""
    stage = Stage(model("a", slots=2, scaling=(1, 1)))
    stage.feed(ReplicaReady("r1"))
    stage.ask("a", "ann")
    stage.ask("a", "ben")
    assert not stopped(stage.feed(GrantEnded("q1", Outcome.UNREACHABLE)))  # others still run
    assert stopped(stage.feed(GrantEnded("q2", Outcome.UNREACHABLE))) == ["a"]
    assert started(stage.feed(ReplicaStopped("r1", StopCause.ASKED))) == ["a"]


def test_nobody_is_evicted_for_a_load_that_cannot_begin() -> None:
    stage = Stage(model("a"), model("gone"))
    stage.ask("a")
    stage.feed(ReplicaReady("r1"))
    stage.feed(GrantEnded("q1", Outcome.OK))
    hopeless = RequestArrived("q2", "gone", "ben", obstacle="gone has no file")
    (refusal,) = stage.feed(hopeless)
    assert isinstance(refusal, Refuse)
    assert refusal.refusal.code is RefusalCode.MODEL_FAILED
    assert refusal.refusal.message == "gone has no file"
    mended = RequestArrived("q3", "gone", "ben")
    assert stopped(stage.feed(mended)) == ["a"]


@pytest.mark.parametrize(
    ("said", "defaults", "is_tool_call", "outcome", "expected"),
    [
        (None, (None, None), True, Outcome.OK, 100),
        (None, (7, 5), True, Outcome.OK, 7),
        (None, (7, 5), False, Outcome.OK, 5),
        (None, (None, 0), False, Outcome.OK, 0),
        (None, (7, None), False, Outcome.OK, 10),
        (3, (7, 5), True, Outcome.OK, 3),
        (None, (7, 5), False, Outcome.CANCELLED, 0),
    ],
)
def test_a_caller_s_own_defaults_stand_in_for_the_model_s(
    said: int | None,
    defaults: tuple[int | None, int | None],
    is_tool_call: bool,
    outcome: Outcome,
    expected: int,
) -> None:
    stage = Stage(replace(model("a"), hold_ms=100, hold_finished_ms=10))
    ask = RequestArrived("q", "a", "ann", hold_ms=said, default_holds_ms=defaults)
    stage.feed(ask)
    stage.feed(ReplicaReady("r1"))
    stage.feed(GrantEnded("q", outcome, is_tool_call))
    demand = stage.scheduler.state.demands["a"]
    assert max(demand.held_until_ms - stage.now_ms, 0) == expected


def test_a_replica_that_a_node_brings_back_stands_for_those_who_were_told() -> None:
    """Seed 20116: and who waited for a load now waits for a slot, by its own bound on that."""
    stage = Stage(model("a"))
    stage.ask("a", "ann")
    stage.feed(ReplicaReady("r1"))
    stage.feed(NodeLost("n0"))
    told = RequestArrived("told", "a", "ben", activation_wait_ms=0, queue_wait_ms=0)
    assert refusals(stage.feed(told)) == ["model_waiting"]
    stage.feed(RequestArrived("hasty", "a", "cleo", queue_wait_ms=5_000))
    runs = Running("r1", "a", Placement("n0", ("d0",), (8,)), Phase.READY, grants=("q1",))
    back = stage.feed(NodeJoined("n0", (Device("d0", 10),), (runs,)), after_ms=10_000)
    assert refusals(back) == ["model_busy"]
    demand = stage.scheduler.state.demands["a"]
    assert demand.owes(demand.replicas["r1"])


def test_one_that_is_to_fall_quiet_stands_for_who_was_told_first() -> None:
    """b comes where c was, beside e, which bears nothing beside its work and is owed to ann."""
    e = replace(model("e", 4), is_exclusive_while_busy=True)
    stage = Stage(e, model("c", 5), model("b", 6), d0=10)
    stage.ask("c", "cleo")
    stage.feed(ReplicaReady("r1"))
    stage.feed(GrantEnded("q1", Outcome.OK))
    told = RequestArrived("told", "e", "ann", activation_wait_ms=0)
    assert refusals(stage.feed(told)) == ["model_loading"]
    stage.feed(ReplicaReady("r2"))
    assert stopped(stage.ask("b", "ben")) == ["c"]
    assert closed(stage) == []
    assert granted(stage.feed(replace(told, request="back"), after_ms=60_000)) == ["back"]
    assert not started(stage.feed(ReplicaStopped("r1", StopCause.ASKED)))
    assert started(stage.feed(GrantEnded("back", Outcome.OK))) == ["b"]


def test_behind_a_barrier_who_lost_patience_sooner_is_served_before_who_leads_the_lane() -> None:
    """pat came first and has time; hal came later, yet before bea, whose barrier it is."""
    stage = Stage(model("a", 8, patience_ms=60_000), model("b", 8, patience_ms=60_000), d0=10)
    stage.ask("a", "ann")
    stage.feed(ReplicaReady("r1"))
    stage.feed(RequestArrived("pat", "a", "pat", patience_ms=10 * MINUTE_MS))
    stage.feed(RequestArrived("hal", "a", "hal"), after_ms=1)
    stage.ask("b", "bea", after_ms=1)
    stage.feed(TimePassed(), after_ms=MINUTE_MS)
    assert closed(stage) == ["r1"]
    assert granted(stage.feed(GrantEnded("q1", Outcome.OK))) == ["hal"]
    assert stopped(stage.feed(GrantEnded("hal", Outcome.OK))) == ["a"]
