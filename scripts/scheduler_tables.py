"""The tables of docs/scheduler.md, made by asking the scheduler itself.

`python scripts/scheduler_tables.py` writes them into the page, between the markers;
`--check` says whether they are as they should be, and a test asks that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from rota.core import effects, events
from rota.core.events import (
    Event,
    GrantEnded,
    NodeJoined,
    NodeLost,
    Outcome,
    ReplicaReady,
    ReplicaSilent,
    ReplicaStopped,
    RequestArrived,
    ShutdownAsked,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Model, Phase, Scaling

PAGE = Path(__file__).parents[1] / "docs" / "scheduler.md"
IDLE_MS = 60_000

STEPS: dict[str, tuple[Event, ...]] = {
    "STARTING": (RequestArrived("q1", "a", "ann"),),
    "READY, at work": (RequestArrived("q1", "a", "ann"), ReplicaReady("r1")),
    "READY, idle": (
        RequestArrived("q1", "a", "ann"),
        ReplicaReady("r1"),
        GrantEnded("q1", Outcome.OK),
    ),
    "DRAINING": (
        RequestArrived("q1", "a", "ann"),
        ReplicaReady("r1"),
        UnloadAsked("a", 30_000),
    ),
    "STOPPING": (RequestArrived("q1", "a", "ann"), UnloadAsked("a", 0)),
}
"""How a replica gets into each phase."""

THEN: dict[str, tuple[Event, int]] = {
    "it is ready": (ReplicaReady("r1"), 0),
    "its last grant ends": (GrantEnded("q1", Outcome.OK), 0),
    "another model needs its room": (RequestArrived("q2", "b", "ben"), 0),
    "`idle_timeout` passes, or the grace": (TimePassed(), IDLE_MS),
    "unload asked, with grace": (UnloadAsked("a", 30_000), 0),
    "shutdown asked, no grace": (ShutdownAsked(0), 0),
    "it answers nothing any more": (ReplicaSilent("r1"), 0),
    "its node is lost": (NodeLost("n0"), 0),
    "it is gone": (ReplicaStopped("r1", StopCause.CRASHED), 0),
}


def state_table() -> str:
    """From each phase, where each fact leads."""
    lines = ["| " + " | ".join(("", *STEPS)) + " |", "| --- " * (len(STEPS) + 1) + "|"]
    for fact, (event, after_ms) in THEN.items():
        cells = [_phase_after(steps, event, after_ms) for steps in STEPS.values()]
        lines.append(f"| {fact} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _phase_after(steps: tuple[Event, ...], event: Event, after_ms: int) -> str:
    one = Scaling(0, 1, IDLE_MS)
    scheduler = Scheduler([Model("a", one, 8), Model("b", one, 8)])
    scheduler.step(NodeJoined("n0", (Device("d0", 10),)), 0)
    for step in steps:
        scheduler.step(step, 0)
    before = _phase(scheduler)
    scheduler.step(event, after_ms)
    after = _phase(scheduler)
    return "·" if after == before else after


def _phase(scheduler: Scheduler) -> str:
    replica = scheduler.state.replicas.get("r1")
    if replica is None:
        return "gone"
    is_at_work = replica.phase is Phase.READY and bool(replica.grants)
    idle = ", idle" if replica.phase is Phase.READY else ""
    return replica.phase.name + (", at work" if is_at_work else idle)


def words_table(union: object) -> str:
    """Each event or effect with the first line of its docstring."""
    lines = ["| name | what it says |", "| --- | --- |"]
    for kind in get_args(union):
        said = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"| `{kind.__name__}` | {said} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "states": state_table,
    "events": lambda: words_table(events.Event),
    "effects": lambda: words_table(effects.Effect),
}


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        assert rest, f"no marker for {name}"
        page = before + begin + table() + end + after
    return page


def main() -> int:
    """Write or check."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        if rewritten(page) == page:
            return 0
        sys.stderr.write("docs/scheduler.md is stale: run python scripts/scheduler_tables.py\n")
        return 1
    PAGE.write_text(rewritten(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
