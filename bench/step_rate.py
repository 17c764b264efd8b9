"""What a step of the scheduler costs, with 10 to 10,000 replicas, and how that grows.

Each step is timed by itself: requests to ready models (arrive, end); a queue of 1,000 of three
priorities behind one full model (one ends, the next is granted, one arrives); a demand for room
where everybody is busy, asked for again and again; fifty such demands at once; a thousand callers
who were told to come back, one of whom does and is told again; a swap while fifty wait (one falls
idle and is stopped for the first of them), where the whole queue is walked; and a swap in a fleet
where all are idle, and one is to be found. A step is decided on the loop that also moves bytes, so
what counts is that all but the swaps stay far below a millisecond, whatever the fleet. Time is the
processor's, so that neighbours on the machine do not count.

    python bench/step_rate.py [--steps 2000] [--replicas-max 10000]

The fleet is nodes of eight devices, four replicas on each; then, up to 1,000 replicas, one node
with all the devices, where no node can be told to be full as a whole.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from _machine import header
from rota.core.effects import Start, Stop
from rota.core.events import (
    Event,
    GrantEnded,
    NodeJoined,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    Running,
    StopCause,
)
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Model, Phase, Placement, Scaling

PER_DEVICE = 4
PER_NODE = 8
SLOTS = 4
QUEUED = 1_000
SIZES = (10, 100, 1_000, 10_000)
ONE_NODE_MAX = 1_000
SWAPS = 10


@dataclass(frozen=True)
class Case:
    """What is done again and again, and what its cost follows from.

    Args:
        is_busy: whether every replica has a grant.
        wanting: how many models wait for room.
    """

    name: str
    reason: str
    is_busy: bool = False
    wanting: int = 0


READY = Case("ready models", "the model asked for, nothing else")
BEHIND = Case("1,000 queued behind one", "the heads of its three lanes; an insertion in one")
ONE = Case("one wants room", "joins its queue: no walk", is_busy=True, wanting=1)
FIFTY = Case("fifty want room", "joins its queue: no walk", is_busy=True, wanting=50)
TOLD = Case("1,000 told to return", "all callers of one model", is_busy=True, wanting=1)
SWAP = Case(
    "a swap while fifty wait", "the queue, and each node's fullness once", is_busy=True, wanting=50
)
IDLE = Case("a swap, all idle", "each idle replica is weighed", wanting=SWAPS)


def main() -> None:
    """Measure and print a table for each shape of fleet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--replicas-max", type=int, default=SIZES[-1])
    arguments = parser.parse_args()
    print(header())
    for title, per_node, largest in (
        ("nodes of 8 devices", PER_NODE, arguments.replicas_max),
        ("one node", None, min(ONE_NODE_MAX, arguments.replicas_max)),
    ):
        print(
            f"\n{title:<28} {'replicas':>8} {'n':>6} {'median µs':>10} {'p95 µs':>9} {'steps/s':>9}"
        )
        sizes = [size for size in SIZES if size <= largest]
        for case in (READY, BEHIND, ONE, FIFTY, TOLD, SWAP, IDLE):
            medians = []
            for replicas in sizes:
                seen_us = measured(case, replicas, per_node, arguments.steps)
                medians.append(statistics.median(seen_us))
                print(row(case.name, replicas, seen_us))
            print(f"{'':<28} grows {growth(medians)} for each tenfold: {case.reason}")


def measured(case: Case, replicas: int, per_node: int | None, steps: int) -> list[float]:
    """Microseconds of each step of a case."""
    scheduler = fleet(replicas, per_node, is_busy=case.is_busy, wanting=case.wanting)
    if case is SWAP:
        return timed_swaps(scheduler, [GrantEnded(f"first{n}", Outcome.OK) for n in range(SWAPS)])
    if case is IDLE:
        asks = [RequestArrived(f"wants{n}", f"w{n}", "c") for n in range(SWAPS)]
        return timed_swaps(scheduler, asks)
    traffic = {READY: ready_traffic(replicas), BEHIND: queue_traffic(), TOLD: told_traffic()}
    return timed(scheduler, traffic.get(case) or room_traffic(case.wanting), steps)


def fleet(replicas: int, per_node: int | None, *, is_busy: bool, wanting: int) -> Scheduler:
    """A scheduler with this many ready replicas, four to a device, and models that wait.

    The nodes report them as running already, as when rota comes back to a fleet at work.
    """
    ready = [_model(f"m{n}") for n in range(replicas)]
    scheduler = Scheduler([*ready, *(_model(f"w{n}") for n in range(wanting))])
    device_count = -(-replicas // PER_DEVICE)
    for first in range(0, device_count, per_node or device_count):
        last = min(first + (per_node or device_count), device_count)
        scheduler.step(_joined(f"n{first}", range(first, last), replicas, is_busy=is_busy), 0)
    for n in range(wanting if is_busy else 0):
        scheduler.step(RequestArrived(f"wants{n}", f"w{n}", "c", priority=n % 3), 0)
    return scheduler


def _joined(node: str, devices: range, replicas: int, *, is_busy: bool) -> NodeJoined:
    running = [
        Running(
            replica=f"was{n}",
            model=f"m{n}",
            placement=Placement(node, (f"d{device}",), (10,)),
            phase=Phase.READY,
            grants=(f"first{n}",) if is_busy else (),
        )
        for device in devices
        for n in range(device * PER_DEVICE, min((device + 1) * PER_DEVICE, replicas))
    ]
    listed = []
    for device in devices:
        held = min((device + 1) * PER_DEVICE, replicas) - device * PER_DEVICE
        listed.append(Device(f"d{device}", 10 * held))
    return NodeJoined(node, tuple(listed), tuple(running))


def ready_traffic(replicas: int) -> Iterator[Event]:
    """Requests to ready models, one after the other."""
    n = 0
    while True:
        yield RequestArrived(f"q{n}", f"m{n % replicas}", f"c{n % 50}")
        yield GrantEnded(f"q{n}", Outcome.OK)
        n += 1


def queue_traffic() -> Iterator[Event]:
    """A full model with a thousand behind it, whose queue is served highest first: one ends,
    another arrives."""
    arrived = [_asks(n) for n in range(QUEUED - 1 + SLOTS)]
    yield from arrived
    running = [f"q{n}" for n in range(SLOTS)]
    waiting = sorted(arrived[SLOTS:], key=lambda ask: -(ask.priority or 0))
    n = len(arrived)
    while True:
        yield GrantEnded(running.pop(0), Outcome.OK)
        running.append(waiting.pop(0).request)
        ask = _asks(n)
        yield ask
        waiting.append(ask)
        waiting.sort(key=lambda ask: -(ask.priority or 0))
        n += 1


def _asks(n: int) -> RequestArrived:
    return RequestArrived(f"q{n}", "m0", f"c{n}", priority=n % 3)


def room_traffic(wanting: int) -> Iterator[Event]:
    """More and more requests, of three priorities, for models that wait for room."""
    n = 0
    while True:
        yield RequestArrived(f"q{n}", f"w{n % wanting}", f"c{n}", priority=n % wanting % 3)
        n += 1


def told_traffic() -> Iterator[Event]:
    """Callers of a model without room who cannot wait: each is told to come back, and does."""
    n = 0
    while True:
        yield RequestArrived(f"q{n}", "w0", f"c{n % QUEUED}", activation_wait_ms=0, queue_wait_ms=0)
        n += 1


def timed(scheduler: Scheduler, traffic: Iterator[Event], steps: int) -> list[float]:
    """Microseconds of each step; those that only fill the queue are not counted."""
    for _ in range(QUEUED + SLOTS):
        scheduler.step(next(traffic), 1)
    seen_us = []
    for _ in range(steps):
        event = next(traffic)
        began_ns = time.thread_time_ns()
        scheduler.step(event, 1)
        scheduler.next_wake_ms()
        seen_us.append((time.thread_time_ns() - began_ns) / 1_000)
    return seen_us


def timed_swaps(scheduler: Scheduler, occasions: Sequence[Event]) -> list[float]:
    """Microseconds of each step that decides who makes way; what follows is done, not timed."""
    seen_us = []
    for occasion in occasions:
        began_ns = time.thread_time_ns()
        effects = scheduler.step(occasion, 1)
        seen_us.append((time.thread_time_ns() - began_ns) / 1_000)
        for stop in effects:
            if isinstance(stop, Stop):
                for start in scheduler.step(ReplicaStopped(stop.replica, StopCause.ASKED), 1):
                    if isinstance(start, Start):
                        scheduler.step(ReplicaReady(start.replica), 1)
    return seen_us


def row(name: str, replicas: int, seen_us: list[float]) -> str:
    """n, median, p95, and how many such steps go into a second."""
    median = statistics.median(seen_us)
    p95 = statistics.quantiles(seen_us, n=20)[-1]
    figures = f"{median:>10.1f} {p95:>9.1f} {1e6 / median:>9.0f}"
    return f"{name:<28} {replicas:>8} {len(seen_us):>6} {figures}"


def growth(medians: Sequence[float]) -> str:
    """By what the cost is multiplied from each size to the next."""
    return ", ".join(f"×{after / before:.1f}" for before, after in pairwise(medians))


def _model(name: str) -> Model:
    return Model(name=name, scaling=Scaling(0, 1, 600_000), memory_mib=10, slots=SLOTS)


if __name__ == "__main__":
    main()
