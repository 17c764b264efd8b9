"""What users see of waits and decisions: `rota queue`, `rota explain`, `rota journal`.

How: a real `rota serve` over fake engines that do not fit together, asked by threads; the verbs
run in this process against it. Damaged and differing journals are files made here.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner, Result

from rota.cli import main
from rota.cli.admin import Json
from rota.core.effects import Stop
from rota.core.events import RequestArrived, TimePassed
from rota.journal import Recording, Step
from rota.journal.file import load, save
from rota.journal.graph import freeze
from tests.cli.support import BOUND_S, Served, model, served, wait_until, write_config
from tests.core.makers import Stage


def rota(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def ask(rota: Served, model: str, request_id: str) -> str:
    """A chat under an id of the client's; the id that its answer carries."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]})
    headers = {"X-Request-Id": request_id} if request_id else {}
    headers |= {"Content-Type": "application/json", "X-Conversation-Id": "a secret plan"}
    request = Request(f"{rota.url}/v1/chat/completions", body.encode(), headers)
    try:
        with urlopen(request, timeout=BOUND_S) as answer:
            answer.read()
            return str(answer.headers["X-Request-Id"])
    except HTTPError as refused:
        refused.close()  # it holds a socket, and is kept by whoever waits for this thread
        raise


def wait_for_rows(rota: Served, kinds: list[str]) -> list[Json]:
    """The queue, once those who stand in it wait for this."""
    deadline_s = time.monotonic() + BOUND_S
    while True:
        rows: list[Json] = rota.admin.queue()["queue"]
        if [row["for"] for row in rows] == kinds:
            return rows
        assert time.monotonic() < deadline_s, rows
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("rota")
    models = model("small") + model("big") + model("slow", knobs="--load-s 600")
    with served(write_config(folder, models)) as rota:
        yield rota


def test_a_request_s_story_is_told_by_the_id_its_client_knows(running: Served) -> None:
    ours = ask(running, "small", "")
    ask(running, "big", "mine-1")
    ask(running, "small", "mine-2")
    told = rota("explain", "mine-1", "--url", running.url)
    assert told.exit_code == 0, told.output
    head, *lines = told.stdout.splitlines()
    assert head.startswith("mine-1~")
    assert head.endswith(", for big:")
    story = "\n".join(lines)
    for words in (
        "asked for big, from conversation:a secret plan",
        "r1 of small was told to stop: makes room for big; not used for",
        "r1 of small was gone,",
        "r2 of big was started on cpu: big was not loaded; small left to make room",
        "r2 was ready; the load took",
        "was granted a slot of r2 after",
        "ended ok,",
        "cost: small was loaded anew",
        "cost: that load of small took",
    ):
        assert words in story, told.stdout
    assert rota("explain", ours, "--url", running.url).stdout.startswith(f"{ours}, for small:")


# case W40
def test_what_would_happen_is_told_and_does_not(running: Served) -> None:
    ask(running, "small", "")
    # At first it is kept a little for its caller's next request.
    wait_until(lambda: running.admin.plan("big")["outcome"] == "evicts")
    before = running.admin.status()["models"]
    told = rota("explain", "plan", "big", "--url", running.url)
    assert told.exit_code == 0, told.output
    head, leaver = told.stdout.splitlines()
    assert head.startswith("evicts on cpu")
    assert head.endswith(": big would be loaded once small has left")
    assert " of small would leave: makes room for big; not used for " in leaver
    plan = json.loads(rota("explain", "plan", "big", "--json", "--url", running.url).stdout)
    assert [leaver["model"] for leaver in plan["leaves"]] == ["small"]
    told = rota("explain", "plan", "small", "--url", running.url)
    assert re.fullmatch(r"served: r\d+ of small would serve it\n", told.stdout)
    phases = [[replica["phase"] for replica in m["replicas"]] for m in before]
    after = running.admin.status()["models"]
    assert phases == [[replica["phase"] for replica in m["replicas"]] for m in after]
    assert rota("explain", "plan", "smal", "--url", running.url).exit_code == 1
    assert rota("explain", "other", "small", "--url", running.url).exit_code == 2


def test_an_unknown_request_is_said_in_words(running: Served) -> None:
    told = rota("explain", "no/such id", "--url", running.url)
    assert told.exit_code == 1
    assert "There is no request 'no/such id' in the journal, which goes back" in told.stderr


def test_a_saved_journal_replays_and_tells_the_same(running: Served) -> None:
    ask(running, "big", "mine-3")
    live = rota("explain", "mine-3", "--url", running.url)
    saved = rota("journal", "--url", running.url)
    path = saved.stdout.strip()
    assert b"secret" not in Path(path).read_bytes()
    told = rota("explain", "--journal", path)
    assert told.exit_code == 0, told.stderr
    assert "steps, replayed to the same effects" in told.stderr
    assert "mine-3~" in told.stdout
    assert "→ start r1 of small" in told.stdout
    one = rota("explain", "--journal", path, "--request", "mine-3")
    assert one.stdout.splitlines()[0] == live.stdout.splitlines()[0]
    assert len(one.stdout.splitlines()) == len(live.stdout.splitlines())
    assert rota("explain", "--journal", path, "--request", "nix").exit_code == 1
    as_json = json.loads(rota("explain", "--journal", path, "--json").stdout)
    assert as_json["difference"] is None


def test_the_queue_shows_who_waits_and_for_what(running: Served) -> None:
    assert ask(running, "big", "")  # so that it is idle, and leaves
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, running, "slow", f"wait-{n}") for n in range(2)]
        try:
            rows = wait_for_rows(running, ["loading", "loading"])
            assert [row["ahead"] for row in rows] == [0, 1]
            assert {(row["model"], row["is_here"]) for row in rows} == {("slow", True)}
            told = rota("queue", "--url", running.url)
            assert told.stdout.splitlines()[0].split()[:2] == ["PLACE", "REQUEST"]
            assert "slow is loading" in told.stdout
            assert "wait-0~" in told.stdout
        finally:
            running.admin.unload("slow", grace_s=0)
        assert all(future.exception() is not None for future in waiting)
    assert rota("queue", "--url", running.url).stdout == "nobody waits\n"


def test_a_journal_that_replays_differently_fails_and_says_where(tmp_path: Path) -> None:
    stage = Stage()
    start = freeze(stage.scheduler)
    wrong = Stop("r9", "m", 0, "nobody knows why\x1b[2J")
    path = save(Recording(start, (Step(5, TimePassed(), [wrong]),)), tmp_path, "x")
    told = rota("explain", "--journal", str(path))
    assert told.exit_code == 1
    assert "Step 1 (time passed) was recorded with `stop r9 of m; nobody" in told.stderr
    assert "now gives `nothing more`" in told.stderr
    assert "\x1b" not in told.output


def test_a_journal_of_a_scheduler_that_broke_says_so(tmp_path: Path) -> None:
    step = Step(5, RequestArrived("q", "m", "peer:x"), (), "KeyError: 'm'")
    path = save(Recording(freeze(Stage().scheduler), (step,)), tmp_path, "KeyError")
    assert load(path).why == "KeyError"
    told = rota("explain", "--journal", str(path))
    assert "the scheduler broke on it: KeyError: 'm'" in told.stdout
    assert told.exit_code == 1  # mended since: it goes well now
    assert "was recorded as breaking (KeyError: 'm') and is now going well" in told.stderr


@pytest.mark.parametrize("arguments", [(), ("--request", "q")])
def test_what_to_explain_must_be_said(arguments: tuple[str, ...]) -> None:
    told = rota("explain", *arguments)
    assert told.exit_code == 2
    assert "name a request, or a journal" in told.stderr


def test_a_damaged_journal_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"\x00\x01")
    told = rota("explain", "--journal", str(path))
    assert told.exit_code == 1
    assert told.stderr.startswith(f"error: {path} is not a whole journal: line 1 is not JSON")
