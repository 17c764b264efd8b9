"""One request's story: what it waited for, who left for it, what that cost, how it ended.

How: a real scheduler is fed by hand, and the story's sentences are compared whole, so that the
words which they rest on (why a replica stops) are held to as well.
"""

from __future__ import annotations

import pytest

from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LeaseReleased,
    LoadAsked,
    NodeJoined,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    StopCause,
    TimePassed,
)
from rota.core.scheduler import Scheduler
from rota.core.types import Device, LeaseClaim, Model
from rota.journal import Step, stories
from rota.journal.story import STORIES_MAX, Stage
from tests.core.makers import model


class Tale:
    """Steps of a scheduler with one device of 10 MiB, in which models of 8 do not fit together."""

    def __init__(self, *models: Model) -> None:
        self.scheduler = Scheduler(models or [model("a"), model("b")])
        self.steps: list[Step] = []
        self.now_ms = 0
        self.feed(NodeJoined("n", (Device("d", 10),)))

    def feed(self, event: Event, *, after_ms: int = 0) -> None:
        self.now_ms += after_ms
        self.steps.append(Step(self.now_ms, event, self.scheduler.step(event, self.now_ms)))

    def ask(self, request: str, name: str, *, after_ms: int = 0) -> None:
        self.feed(RequestArrived(request, name, "peer:x"), after_ms=after_ms)

    def serve(self, request: str, name: str, replica: str) -> None:
        """Ask for a model that is cold, load it, and be done."""
        self.ask(request, name)
        self.feed(ReplicaReady(replica), after_ms=500)
        self.feed(GrantEnded(request, Outcome.OK), after_ms=250)

    def told(self, request: str) -> list[str]:
        (story,) = stories(self.steps, request)
        return [f"{line.at_s:+.1f} {line.text}" for line in story.lines]

    def stage(self, request: str) -> Stage:
        (story,) = stories(self.steps, request)
        return story.stage


@pytest.fixture
def swapped() -> Tale:
    """b is wanted 2 s after a was last used; a has gone and b loads."""
    tale = Tale()
    tale.serve("q1", "a", "r1")
    tale.ask("q2", "b", after_ms=2_000)
    tale.feed(ReplicaStopped("r1", StopCause.ASKED), after_ms=400)
    return tale


MADE_ROOM = [
    "+0.0 asked for b, from peer:x",
    (
        "+0.0 r1 of a was told to stop: makes room for b; not used for 2.0 s, "
        "wanted about 9 times an hour, 1 s to load again"
    ),
    "+0.0 waits: waiting for a to leave",
    "+0.4 r1 of a was gone, 0.400 s after it was told to stop",
    "+0.4 r2 of b was started on d: b was not loaded; a left to make room",
    "+0.4 waits: b is loading",
]


def test_of_a_request_that_made_room_and_what_that_cost(swapped: Tale) -> None:
    assert swapped.told("q2") == MADE_ROOM
    assert swapped.stage("q2") is Stage.WAITING
    swapped.feed(ReplicaReady("r2"), after_ms=3_000)
    assert swapped.stage("q2") is Stage.RUNNING
    swapped.feed(GrantEnded("q2", Outcome.OK), after_ms=600)
    assert swapped.stage("q2") is Stage.OVER
    swapped.ask("q3", "a", after_ms=1_000)
    swapped.feed(ReplicaStopped("r2", StopCause.ASKED))
    swapped.feed(ReplicaReady("r3"), after_ms=700)
    assert swapped.told("q2") == [
        *MADE_ROOM,
        "+3.4 r2 was ready; the load took 3.000 s",
        "+3.4 was granted a slot of r2 after 3.400 s; b was not loaded; a left to make room",
        "+4.0 ended ok, 0.600 s after it was granted",
        "+5.0 cost: a was loaded anew 5.000 s after r1 was told to stop",
        "+5.7 cost: that load of a took 0.700 s",
    ]


def test_of_one_that_joins_a_load_under_way(swapped: Tale) -> None:
    swapped.ask("q3", "b", after_ms=600)
    assert swapped.told("q3") == [
        (
            "-1.0 r1 of a was told to stop: makes room for b; not used for 2.0 s, "
            "wanted about 9 times an hour, 1 s to load again"
        ),
        "-0.6 r1 of a was gone, 0.400 s after it was told to stop",
        "-0.6 r2 of b was started on d: b was not loaded; a left to make room",
        "+0.0 asked for b, from peer:x",
        "+0.0 joined those who wait: b is loading",
    ]


def test_of_one_that_finds_its_model_ready() -> None:
    tale = Tale()
    tale.serve("q1", "a", "r1")
    tale.ask("q2", "a", after_ms=10)
    assert tale.told("q2") == [
        "+0.0 asked for a, from peer:x",
        "+0.0 was granted a slot of r1 after 0.000 s",
    ]


def test_of_a_load_that_fails(swapped: Tale) -> None:
    swapped.feed(ReplicaStopped("r2", StopCause.CRASHED, "no such file"), after_ms=100)
    *_, gone, refused = swapped.told("q2")
    assert gone == "+0.5 r2 is gone (crashed): no such file"
    assert refused.startswith("+0.5 was refused, model_cooling, to come back in 5 s: b failed and")


def test_of_one_that_is_told_to_come_back(swapped: Tale) -> None:
    swapped.feed(TimePassed(), after_ms=45_000)
    assert swapped.told("q2")[-1].startswith("+45.4 was refused, model_loading, to come back in 60")


def test_of_one_whose_client_leaves(swapped: Tale) -> None:
    swapped.feed(RequestCancelled("q2"), after_ms=100)
    assert swapped.told("q2")[-1] == "+0.5 its client left"
    assert swapped.stage("q2") is Stage.OVER


def test_of_one_that_is_cut_off_by_its_engine_s_end(swapped: Tale) -> None:
    swapped.feed(ReplicaReady("r2"))
    swapped.feed(ReplicaStopped("r2", StopCause.CRASHED, "out of memory"), after_ms=100)
    swapped.feed(GrantEnded("q2", Outcome.FAILED), after_ms=1)
    assert swapped.told("q2")[-1] == "+0.5 was cut off: r2 is gone (crashed): out of memory"


def test_of_a_load_by_hand() -> None:
    tale = Tale()
    tale.feed(LoadAsked("load", "a"))
    tale.feed(ReplicaReady("r1"), after_ms=900)
    assert tale.told("load") == [
        "+0.0 a load of a was asked for by hand",
        "+0.0 r1 of a was started on d: a was not loaded",
        "+0.0 waits: a is loading",
        "+0.9 r1 was ready; the load took 0.900 s",
        "+0.9 was told that r1 is ready",
    ]


def test_of_one_that_waits_for_a_slot() -> None:
    tale = Tale(model("a", slots=1))
    tale.ask("q1", "a")
    tale.feed(ReplicaReady("r1"))
    tale.ask("q2", "a", after_ms=100)
    tale.feed(GrantEnded("q1", Outcome.OK), after_ms=200)
    assert tale.told("q2") == [
        "+0.0 asked for a, from peer:x",
        "+0.0 waits: every slot of a is taken",
        "+0.2 was granted a slot of r1 after 0.200 s; every slot was taken",
    ]


def test_of_one_that_the_scheduler_broke_on() -> None:
    tale = Tale()
    tale.steps.append(Step(0, RequestArrived("q1", "a", "peer:x"), (), "KeyError: 'a'"))
    assert tale.told("q1")[-1] == "+0.0 the scheduler broke on it: KeyError: 'a'"
    assert tale.stage("q1") is Stage.OVER


def test_a_request_is_found_by_its_client_s_id_and_by_ours() -> None:
    tale = Tale()
    tale.ask("theirs~run-1", "a")
    tale.ask("run-2", "a")
    tale.ask("theirs~run-3", "a")
    assert [story.request for story in stories(tale.steps, "theirs")] == [
        "theirs~run-1",
        "theirs~run-3",
    ]
    for wanted, found in (
        ("run-1", "theirs~run-1"),
        ("theirs~run-3", "theirs~run-3"),
        ("run-2", "run-2"),
    ):
        assert [story.request for story in stories(tale.steps, wanted)] == [found]
    for number in range(20):
        tale.ask(f"same~run-{number + 4}", "a")
    assert [story.request for story in stories(tale.steps, "same")][-1] == "same~run-23"
    assert len(stories(tale.steps, "same")) == STORIES_MAX
    assert not stories(tale.steps, "run")
    assert not stories(tale.steps, "")


def test_a_lease_has_a_story_too() -> None:
    tale = Tale(model("a"), model("b", load_ms=2_000))
    tale.feed(LeaseAsked("lease-1", "a", "peer:x", 60_000, load=True))
    tale.feed(ReplicaReady("r1"), after_ms=500)
    tale.feed(LeaseReleased("lease-1"), after_ms=1_500)
    assert tale.told("lease-1") == [
        "+0.0 a lease of a for 60.000 s was asked for, from peer:x",
        "+0.0 r1 of a was started on d: a was not loaded",
        "+0.0 waits: a is loading",
        "+0.5 r1 was ready; the load took 0.500 s",
        "+0.5 was given its lease of r1 after 0.500 s",
        "+2.0 its lease was over after 1.500 s: released",
    ]
    assert tale.stage("lease-1") is Stage.OVER


def test_a_job_and_the_load_that_was_called_off_for_it_are_told() -> None:
    tale = Tale()
    tale.ask("q1", "a")
    tale.feed(RequestCancelled("q1"), after_ms=100)
    tale.ask("q2", "b", after_ms=900)
    tale.feed(ReplicaStopped("r1", StopCause.ASKED), after_ms=50)
    tale.feed(ReplicaReady("r2"), after_ms=450)
    job = LeaseClaim("job-1", 60_000, "a render")
    tale.feed(GrantEnded("q2", Outcome.OK, lease=job), after_ms=250)
    assert tale.told("q2") == [
        "+0.0 asked for b, from peer:x",
        "+0.0 r1 of a was told to stop: called off: nobody waits for it, and b needs its room",
        "+0.0 waits: waiting for a to leave",
        "+0.1 r1 of a was gone, 0.050 s after it was told to stop",
        "+0.1 r2 of b was started on d: b was not loaded; a left to make room",
        "+0.1 waits: b is loading",
        "+0.5 r2 was ready; the load took 0.450 s",
        "+0.5 was granted a slot of r2 after 0.500 s; b was not loaded; a left to make room",
        "+0.8 ended ok, 0.250 s after it was granted and goes on as job-1",
    ]
