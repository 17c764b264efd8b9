"""The queue as users see it: who waits, at which place, for what, and how long still.
How: a real scheduler is fed by hand, and the rows are looked at."""

from __future__ import annotations

from rota.core.events import NodeJoined, ReplicaReady, RequestArrived, TimePassed
from rota.core.scheduler import Scheduler
from rota.core.types import Device
from rota.waiting import Row, waiting
from tests.core.makers import model


def fleet() -> Scheduler:
    """One device on which only one of a, b and c fits; b and c wait behind a, which loads."""
    models = [model("a", load_ms=4_000), model("b"), model("c")]
    scheduler = Scheduler(models)
    scheduler.step(NodeJoined("n", (Device("d", 10),)), 0)
    for number, (name, caller) in enumerate((("a", "x"), ("b", "x"), ("c", "y"), ("b", "z"))):
        arrived = RequestArrived(f"q{number}", name, f"peer:{caller}")
        scheduler.step(arrived, 100 * number)
    return scheduler


def picked(rows: list[Row], *keys: str) -> list[tuple[object, ...]]:
    return [tuple(row[key] for key in keys) for row in rows]


def test_everyone_stands_in_line_by_arrival_with_a_reason() -> None:
    scheduler = fleet()
    scheduler.step(TimePassed(), 1_000)
    rows = waiting(scheduler.state)
    assert picked(rows, "request", "model", "caller", "position", "ahead", "waited_s") == [
        ("q0", "a", "peer:x", None, 0, 1.0),  # it loads: it waits for no room
        ("q1", "b", "peer:x", 1, 0, 0.9),
        ("q2", "c", "peer:y", 2, 0, 0.8),
        ("q3", "b", "peer:z", 1, 1, 0.7),
    ]
    assert picked(rows[:1], "for", "reason", "eta_s") == [("loading", "a is loading", 3.0)]
    assert all(row["reason"] for row in rows)
    assert all(row["wants"] == "request" for row in rows)


def test_nobody_waits_for_a_model_that_serves_them() -> None:
    scheduler = Scheduler([model("a", slots=2)])
    scheduler.step(NodeJoined("n", (Device("d", 10),)), 0)
    scheduler.step(RequestArrived("q", "a", "peer:x"), 0)
    scheduler.step(ReplicaReady("r1"), 10)
    assert waiting(scheduler.state) == []


def test_a_caller_who_was_told_to_come_back_keeps_its_place() -> None:
    scheduler = fleet()
    scheduler.step(TimePassed(), 45_000)  # q0 has waited as long as it may
    rows = waiting(scheduler.state)
    first = rows[0]
    assert (first["request"], first["is_here"]) == ("q0", False)
    assert isinstance(first["back_in_s"], float)
    assert first["back_in_s"] > 0
    assert [row["is_here"] for row in rows[1:]] == [True] * 3


def test_an_absent_caller_is_not_said_to_wait_for_a_slot_that_is_free() -> None:
    scheduler = fleet()
    scheduler.step(TimePassed(), 45_000)  # q0 has waited as long as it may
    scheduler.step(ReplicaReady("r1"), 46_000)
    first = waiting(scheduler.state)[0]
    assert (first["request"], first["is_here"], first["for"]) == ("q0", False, "return")
    assert first["reason"] == "a is ready and kept for it"
