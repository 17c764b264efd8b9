"""Rules of who may stand together, as the scheduler keeps them beside memory.

A scheduler fed by hand with memory for everyone, so that only the rules make anybody leave.
"""

from __future__ import annotations

from dataclasses import replace

from rota.core.coexistence import Coexistence, Group, Groups, Matrix
from rota.core.effects import Effect, Stop
from rota.core.events import (
    GrantEnded,
    NodeJoined,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    StopCause,
)
from rota.core.types import Device, Model
from tests.core.makers import Stage, granted, model, refusals, started, stopped


def group(name: str, members: str, *, swap: bool, exclusive: bool, stays: bool = False) -> Group:
    return Group(name, frozenset(members), swap, exclusive, stays)


def running(coexistence: Coexistence, *models: Model, up: str) -> Stage:
    """A stage on which those are up and idle, in that order."""
    stage = Stage(*models, coexistence=coexistence, d0=1_000)
    for name in up:
        effects = stage.ask(name)
        for effect in effects:
            if isinstance(effect, Stop):
                stage.feed(ReplicaStopped(effect.replica, StopCause.ASKED))
        replica = next(
            r.id for r in stage.scheduler.state.replicas.values() if r.model.name == name
        )
        assert granted(stage.feed(ReplicaReady(replica))) == [f"q{stage.count}"]
        stage.feed(GrantEnded(f"q{stage.count}", Outcome.OK), after_ms=1_000)
    return stage


def why(effects: list[Effect]) -> list[str]:
    return [effect.why for effect in effects if isinstance(effect, Stop)]


A, B, C, D = (model(name, 1) for name in "abcd")


def test_one_of_a_group_at_a_time_and_the_reason_names_the_group() -> None:
    rules = Groups((group("chat", "ab", swap=True, exclusive=False),))
    stage = running(rules, A, B, C, up="ac")
    effects = stage.ask("b")
    assert stopped(effects) == ["a"], "c is in no group, and there is memory"
    assert why(effects) == ["makes room for b: group `chat` swaps"]
    assert not started(effects), "not before a has ended"
    assert started(stage.feed(ReplicaStopped("r1", StopCause.ASKED))) == ["b"]


def test_a_group_that_is_not_exclusive_comes_in_beside_one_that_is() -> None:  # case W40
    rules = Groups(
        (
            group("big", "a", swap=True, exclusive=True),
            group("small", "bc", swap=False, exclusive=False),
        )
    )
    stage = running(rules, A, B, C, up="a")
    assert started(stage.ask("b")) == ["b"]
    stage = running(rules, A, B, C, up="bc")
    assert stopped(stage.ask("a")) == ["b", "c"]


def test_what_is_persistent_leaves_for_nobody_outside_not_for_memory_either() -> None:
    rules = Groups((group("keep", "a", swap=True, exclusive=False, stays=True),))
    big = replace(model("b"), memory_mib=1_000)
    stage = running(rules, A, big, up="a")
    effects = stage.ask("b")
    assert not stopped(effects)
    assert refusals(effects) == ["no_room"]


def test_who_must_leave_and_works_is_waited_for() -> None:
    rules = Groups((group("chat", "ab", swap=True, exclusive=True),))
    stage = Stage(A, B, coexistence=rules, d0=1_000)
    stage.ask("a")
    stage.feed(ReplicaReady("r1"))
    assert not stopped(stage.ask("b"))
    assert stopped(stage.feed(GrantEnded("q1", Outcome.OK))) == ["a"]


def test_no_later_one_comes_in_where_it_would_have_to_leave_for_an_earlier() -> None:
    """a waits for b's work; c may stand beside b, and beside a once it is there; not
    before a has come, who would make it leave."""
    rules = Groups(
        (
            group("all", "a", swap=True, exclusive=True),
            group("rest", "bcd", swap=False, exclusive=False),
        )
    )
    quick = replace(A, patience_ms=0)
    stage = Stage(quick, B, C, coexistence=rules, d0=1_000)
    stage.ask("b")
    stage.feed(ReplicaReady("r1"))
    stage.ask("a", "ben")
    assert not started(stage.ask("c", "cleo", after_ms=1))
    stage.feed(GrantEnded("q1", Outcome.OK))
    assert started(stage.feed(ReplicaStopped("r1", StopCause.ASKED))) == ["a", "c"]


def test_the_matrix_takes_the_set_that_costs_least() -> None:
    rules = Matrix((("bc", "b & c"), ("ac", "a & c"), ("ab", "a & b")), {}, {"b": 10, "c": 1})
    stage = running(rules, A, B, C, up="bc")
    effects = stage.ask("a")
    assert stopped(effects) == ["c"]
    assert why(effects) == ["makes room for a: set `ab` of the matrix"]


def test_the_matrix_takes_a_dearer_set_when_the_cheaper_works() -> None:
    rules = Matrix((("bc", "b & c"), ("ac", "a & c"), ("ab", "a & b")), {}, {"b": 10, "c": 1})
    stage = running(rules, A, B, C, up="bc")
    stage.ask("c", "cleo")
    assert stopped(stage.ask("a", "ann")) == ["b"], "c works, and b does not"


def test_rules_are_of_one_machine() -> None:
    rules = Groups((group("chat", "ab", swap=True, exclusive=True),))
    stage = Stage(A, replace(B, devices=frozenset({"d1"})), coexistence=rules, d0=10)
    stage.feed(NodeJoined("n1", (Device("d1", 10),)))
    assert started(stage.ask("a")) == ["a"]
    assert started(stage.ask("b", "ben")) == ["b"]
