"""A recording of any scheduler replays to the same effects, kept in memory or saved and loaded.
How: simulated worlds with every trouble, recorded, saved, read and stepped through again."""

from __future__ import annotations

import stat
from pathlib import Path
from random import Random

import msgspec
import pytest

from rota.core.effects import Start, Stop
from rota.core.events import NodeJoined, RequestArrived, TimePassed
from rota.core.scheduler import Scheduler
from rota.core.types import Device
from rota.errors import RequestError
from rota.journal.file import FILES_MAX, load, save
from rota.journal.graph import Rows, freeze, thaw
from rota.journal.recorder import PAGE_STEPS, Recorder, Recording, Step
from rota.journal.replay import first_difference
from tests.core.makers import model
from tests.journal.played import play


def small() -> tuple[Scheduler, Recorder]:
    scheduler = Scheduler([model("a"), model("b", 2, scaling=(1, 1))])
    return scheduler, Recorder(scheduler)


def feed(scheduler: Scheduler, recorder: Recorder, *events: object, now_ms: int = 7) -> None:
    for event in events:
        recorder.note(now_ms, event, scheduler.step(event, now_ms))  # type: ignore[arg-type]


def joined() -> NodeJoined:
    return NodeJoined("n", (Device("d", 10),))


@pytest.mark.parametrize("seed", range(1_000, 1_008))
def test_what_was_simulated_replays_from_the_file(seed: int, tmp_path: Path) -> None:
    recording = play(seed)
    assert recording.steps
    assert first_difference(recording) is None
    saved = load(save(recording, tmp_path, "asked for"))
    assert saved.why == "asked for"
    assert [step.event for step in saved.recording.steps] == [s.event for s in recording.steps]
    assert first_difference(saved.recording) is None


@pytest.mark.parametrize("seed", range(1_000, 1_004))
def test_time_alone_changes_nothing_before_it_is_due(seed: int) -> None:
    """Why a step in which somebody only looked need not be kept (`Controller._is_due`)."""

    def look(scheduler: Scheduler) -> None:
        now_ms, wake_ms = scheduler.state.now_ms, scheduler.next_wake_ms()
        if wake_ms is None or wake_ms > now_ms + 1:
            other = thaw(freeze(scheduler))
            assert other.step(TimePassed(), now_ms + 1) == []
            assert other.next_wake_ms() == wake_ms
            other.state.now_ms = now_ms
            assert _without_effects(other) == _without_effects(scheduler)

    play(seed, 300, look)


def _without_effects(scheduler: Scheduler) -> Rows:
    other = thaw(freeze(scheduler))
    other.orders.effects = []
    return freeze(other)


def test_a_thawed_state_is_the_same_and_shares_nothing_that_changes() -> None:
    scheduler, recorder = small()
    feed(scheduler, recorder, joined(), RequestArrived("q1", "a", "peer:x"))
    rows = freeze(scheduler)
    thawed = thaw(rows)
    assert freeze(thawed) == rows
    thawed.step(RequestArrived("q2", "a", "peer:y"), 9)
    assert freeze(scheduler) == rows
    waiting = thawed.state.waiting["q1"]
    assert waiting[0] is thawed.state.demands["a"]  # two names of one thing stay so
    assert waiting[1] in thawed.state.demands["a"].waiting


def test_at_least_a_page_and_at_most_two_are_kept_and_replay() -> None:
    scheduler, recorder = small()
    feed(scheduler, recorder, joined())
    for number in range(3 * PAGE_STEPS):
        feed(scheduler, recorder, TimePassed(), now_ms=10 + number)
        if number % 97 == 0 or number % PAGE_STEPS > PAGE_STEPS - 3:
            kept = len(recorder.recording().steps)
            assert min(number + 2, PAGE_STEPS) <= kept < 2 * PAGE_STEPS
    assert first_difference(recorder.recording()) is None


def test_a_recording_does_not_change_when_the_scheduler_steps_on() -> None:
    scheduler, recorder = small()
    feed(scheduler, recorder, joined())
    before = recorder.recording()
    feed(scheduler, recorder, TimePassed())
    assert len(before.steps) == 1


def test_the_first_difference_is_named() -> None:
    scheduler, recorder = small()
    feed(scheduler, recorder, joined(), RequestArrived("q1", "a", "peer:x"))
    recording = recorder.recording()
    first, second = recording.steps
    start = first.effects[0]
    assert isinstance(start, Start)
    other = Stop(start.replica, start.model, 1, "because")

    def said(step: Step) -> str:
        return first_difference(Recording(recording.start, (step, second))) or ""

    assert said(first) == ""
    told = said(first._replace(effects=[other]))
    assert told.startswith("Step 1 (node n joined with d 10 MiB) was recorded with `stop r1 of b")
    assert "now gives `start r1 of b" in told
    assert "was recorded with `nothing more`" in said(first._replace(effects=[]))
    assert "now gives `nothing more`" in said(first._replace(effects=[*first.effects, other]))
    broke = said(first._replace(effects=[], raised="AssertionError: oh"))
    assert "was recorded as breaking (AssertionError: oh) and is now going well" in broke


def test_a_step_that_broke_breaks_again(tmp_path: Path) -> None:
    scheduler, recorder = small()
    feed(scheduler, recorder, joined(), now_ms=9)
    late = TimePassed()
    recorder.note(3, late, (), "AssertionError: (3, 9)")  # a clock that ran backwards
    saved = load(save(recorder.recording(), tmp_path, "it broke"))
    assert saved.recording.steps[-1].raised == "AssertionError: (3, 9)"
    assert first_difference(saved.recording) is None


def test_conversations_are_hashed_and_the_same_one_stays_the_same(tmp_path: Path) -> None:
    scheduler, recorder = small()
    arrivals = [
        RequestArrived("q1", "a", "conversation:my secret plan"),
        RequestArrived("q2", "a", "conversation:my secret plan"),
        RequestArrived("q3", "a", "conversation:another"),
    ]
    feed(scheduler, recorder, joined(), *arrivals)
    again = Recorder(scheduler)  # and in a state that a file begins with
    for recording in (recorder.recording(), again.recording()):
        path = save(recording, tmp_path, "asked for")
        assert b"secret" not in path.read_bytes()
        assert b"another" not in path.read_bytes()
        assert first_difference(load(path).recording) is None
    steps = load(save(recorder.recording(), tmp_path, "asked for")).recording.steps
    callers = [step.event.caller for step in steps if isinstance(step.event, RequestArrived)]
    assert callers[0] == callers[1] != callers[2]


def test_files_are_the_user_s_own_and_the_oldest_go(tmp_path: Path) -> None:
    _, recorder = small()
    directory = tmp_path / "journals"
    paths = [save(recorder.recording(), directory, "x") for _ in range(FILES_MAX + 2)]
    assert stat.S_IMODE(paths[-1].stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(directory.iterdir()) == paths[2:]


def test_text_that_is_no_unicode_can_be_saved(tmp_path: Path) -> None:
    scheduler, recorder = small()
    feed(scheduler, recorder, joined(), RequestArrived("q1", "a\ud800", "peer:x"))
    assert load(save(recorder.recording(), tmp_path, "x")).recording.steps


# ── damaged files ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def whole(tmp_path: Path) -> list[bytes]:
    scheduler, recorder = small()
    feed(scheduler, recorder, joined(), RequestArrived("q1", "a", "peer:x"))
    return save(recorder.recording(), tmp_path / "whole", "x").read_bytes().splitlines()


def complaint(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RequestError) as caught:
        load(path)
    return caught.value.message


BELOW_NOTHING = (
    b'{"now_ms": 1, "effects": [], "event": {"NodeJoined": {"node": "n", '
    b'"devices": [{"id": "d", "memory_mib": -1}]}}}'
)


@pytest.mark.parametrize(
    ("number", "line", "said"),
    [
        (0, b"{}", "its first line is not a journal's head"),
        (0, b'{"rota_journal": 3}', "it has format 3; this rota reads 2"),
        (0, b"\xff", "line 1 is not JSON"),
        (1, b"[]", "line 2 is not an object"),
        (1, b"{}", "the state is not a list of rows"),
        (1, b'{"start": []}', "the first row is not a scheduler"),
        (1, b'{"start": [{"list": []}]}', "the first row is not a scheduler"),
        (1, b'{"start": [{"os.system": ["ls"]}]}', "there is no 'os.system' in this rota"),
        (1, b'{"start": [{"Scheduler": {"state": 1}}]}', "a Scheduler of another version"),
        (1, b'{"start": [{"list": [{"row": 1}]}]}', "row 0 of the state: there is no row 1"),
        (1, b'{"start": [{"dict": [1]}]}', "a key without a value"),
        (2, b"[" * 100_000, "line 3 is not JSON"),
        (2, b'{"now_ms": 1, "effects": []}', "line 3: there is no event"),
        (2, b'{"now_ms": 1, "effects": [], "event": {"Stop": {}}}', "line 3: no such Stop"),
        (2, b'{"now_ms": 1, "effects": [], "event": {"TimePassed": 1}}', "no such TimePassed"),
        (2, b'{"now_ms": "1", "effects": [], "event": {"TimePassed": {}}}', "line 3: now_ms"),
        (2, b'{"now_ms": 1, "effects": [{"Phase": "ready"}], "event": {"TimePassed": {}}}', "not"),
        (2, BELOW_NOTHING, "no such NodeJoined"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    whole: list[bytes], tmp_path: Path, number: int, line: bytes, said: str
) -> None:
    whole[number] = line
    assert said in complaint(tmp_path / "damaged", whole)


def test_a_file_that_was_cut_is_not_replayed(whole: list[bytes], tmp_path: Path) -> None:
    assert "it ends after 1 of 2 steps" in complaint(tmp_path / "cut", whole[:-1])
    assert "it has only 0 lines" in complaint(tmp_path / "empty", [])
    assert "cannot read" in _missing(tmp_path)


def _missing(tmp_path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        load(tmp_path / "nowhere")
    return caught.value.message


def test_a_state_that_cannot_be_put_together_is_said(whole: list[bytes], tmp_path: Path) -> None:
    start = msgspec.json.decode(whole[1])
    start["start"].append({"list": []})
    start["start"].append({"set": [{"row": len(start["start"]) - 1}]})
    whole[1] = msgspec.json.encode(start)
    assert "unhashable" in complaint(tmp_path / "damaged", whole)


def test_whatever_is_damaged_is_said_or_replayed_and_never_crashes(
    whole: list[bytes], tmp_path: Path
) -> None:
    random = Random(1)
    path = tmp_path / "damaged"
    said = 0
    for _ in range(300):
        damaged = bytearray(b"\n".join(whole))
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            first_difference(load(path).recording)
        except RequestError:
            said += 1
    assert said > 100


@pytest.mark.parametrize("depth", [200, 900, 5_000])
def test_a_value_nested_without_end_is_said(whole: list[bytes], tmp_path: Path, depth: int) -> None:
    nested = b'{"tuple": [' * depth + b"1" + b"]}" * depth
    whole[1] = b'{"start": [{"list": [' + nested + b"]}]}"
    assert "is not a whole journal" in complaint(tmp_path / "damaged", whole)
