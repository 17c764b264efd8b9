"""What would happen, told beforehand, is what happens then; and asking changes nothing.

How: small stages with known outcomes, and simulated worlds in which each state is asked about.
"""

from __future__ import annotations

from random import Random

import pytest

from rota.core.coexistence import FREE, Coexistence, Group, Groups, Matrix
from rota.core.effects import Stop
from rota.core.events import GrantEnded, NodeJoined, Outcome, ReplicaReady, RequestArrived
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Phase
from rota.journal import rehearse
from rota.journal.graph import freeze
from rota.journal.rehearsal import Meets, Rehearsal
from tests.core.makers import Stage, model
from tests.journal.played import play


def asked(scheduler: Scheduler, name: str) -> Rehearsal:
    rows = freeze(scheduler)
    told = rehearse(rows, RequestArrived("plan", name, caller="plan"), scheduler.state.now_ms)
    assert freeze(scheduler) == rows
    return told


def ready_stage() -> Stage:
    """`small`, ready and idle, on the only device; `big` needs the room, `tiny` fits beside."""
    stage = Stage(
        model("small", 6, load_ms=700),
        model("big", 8, load_ms=3_000),
        model("tiny", 2),
        model("off", 1, scaling=(0, 0)),
        model("huge", 99),
    )
    stage.ask("small")
    stage.feed(ReplicaReady("r1"), after_ms=700)
    stage.feed(GrantEnded("q1", Outcome.OK))
    return stage


def test_what_is_ready_is_served() -> None:
    told = asked(ready_stage().scheduler, "small")
    assert told == Rehearsal("small", Meets.SERVED, "r1 of small would serve it", eta_s=0)


def test_what_fits_is_loaded_and_nobody_leaves() -> None:
    told = asked(ready_stage().scheduler, "tiny")
    assert (told.outcome, told.node, told.devices) == (Meets.LOADS, "n0", ("d0",))
    assert told.leavers == ()


def test_who_would_leave_is_named_with_the_reason_and_the_cost() -> None:
    stage = ready_stage()
    told = asked(stage.scheduler, "big")
    assert (told.outcome, told.devices, told.eta_s) == (Meets.EVICTS, ("d0",), 4.0)
    (leaver,) = told.leavers
    assert (leaver.replica, leaver.model, leaver.load_s) == ("r1", "small", 0.7)
    assert stage.scheduler.state.replicas["r1"].phase is Phase.READY
    (stop,) = [effect for effect in stage.ask("big") if isinstance(effect, Stop)]
    assert stop.why == leaver.why, "and so it happens"
    assert asked(stage.scheduler, "big").outcome is Meets.WAITS


def test_what_is_waited_for_is_said() -> None:
    stage = ready_stage()
    stage.ask("small")
    told = asked(stage.scheduler, "big")
    assert (told.outcome, told.text) == (Meets.WAITS, "waiting for small to come free")
    assert asked(stage.scheduler, "small").text == "every slot of small is taken"


@pytest.mark.parametrize(("name", "code"), [("off", "model_off"), ("huge", "model_failed")])
def test_a_refusal_is_told(name: str, code: str) -> None:
    told = asked(ready_stage().scheduler, name)
    assert (told.outcome, told.code) == (Meets.REFUSED, code)


def test_in_any_state_asking_is_answered_and_changes_nothing() -> None:
    random = Random(5)
    seen: set[Meets] = set()

    def ask_sometimes(scheduler: Scheduler) -> None:
        if random.random() < 0.05:
            seen.add(asked(scheduler, random.choice(list(scheduler.state.demands))).outcome)

    for seed in range(4):
        play(seed, 1_000, ask_sometimes)
    assert seen >= {Meets.SERVED, Meets.LOADS, Meets.WAITS}


def ruled_stage(rules: Coexistence) -> Stage:
    """`a` and `b`, ready and idle on one device; `c` would fit beside them."""
    stage = Stage(model("a", 2), model("b", 2), model("c", 2))
    stage.scheduler = Scheduler(
        [demand.model for demand in stage.scheduler.state.demands.values()], coexistence=rules
    )
    stage.feed(NodeJoined("n0", (Device("d0", 10),)))
    for number, name in enumerate("ab", 1):
        stage.ask(name)
        stage.feed(ReplicaReady(f"r{number}"), after_ms=10)
        stage.feed(GrantEnded(f"q{number}", Outcome.OK))
    return stage


@pytest.mark.parametrize(
    ("rules", "leaves", "rule"),
    [
        (FREE, "", None),
        (Groups((Group("g", frozenset("c"), exclusive=False),)), "", None),
        (Groups((Group("g", frozenset("bc"), exclusive=False),)), "b", "group `g` swaps"),
        (Matrix((("x", "a & b"), ("y", "a & c"))), "b", "set `y` of the matrix"),
        (
            Matrix((("x", "a & b"),)),
            "ab",
            "c is in no set of the matrix and runs alone",
        ),
    ],
)
def test_the_rule_that_says_so_is_named(rules: Coexistence, leaves: str, rule: str | None) -> None:
    told = asked(ruled_stage(rules).scheduler, "c")
    assert "".join(sorted(leaver.model for leaver in told.leavers)) == leaves
    assert told.rule == rule
