"""What a step of the scheduler costs, at 10, 100 and 1,000 replicas.

Each step is timed by itself: requests to ready models (arrive, end); a queue of 1,000 behind one
full model (one ends, the next is granted, one arrives); a demand for room where everybody is
busy, asked for again and again; fifty such demands at once; and swaps while fifty wait (one falls
idle and is stopped, is gone, another is started, is ready), where the whole queue is walked. A
step is decided on the loop that also moves bytes, so what counts is that all but the swaps stay
far below a millisecond, whatever the fleet.

    python bench/step_rate.py [--steps 2000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

from _machine import header
from rota.core.effects import Effect, Start, Stop
from rota.core.events import (
    Event,
    GrantEnded,
    NodeJoined,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    StopCause,
)
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Model, Scaling

PER_DEVICE = 4
SLOTS = 4
QUEUED = 1_000


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    steps: int = parser.parse_args().steps
    print(header())
    print(f"{'':<42} {'n':>6} {'median µs':>10} {'p95 µs':>10} {'steps/s':>10}")
    for replicas in (10, 100, 1_000):
        for name, traffic, busy, wanting in (
            ("ready models", ready_traffic(replicas), False, 0),
            ("1,000 queued behind one", queue_traffic(), False, 0),
            ("one wants room, all busy", room_traffic(1), True, 1),
            ("fifty want room, all busy", room_traffic(50), True, 50),
        ):
            scheduler = fleet(replicas, busy=busy, wanting=wanting)
            few = steps if replicas * max(wanting, 1) < 5_000 else steps // 20
            print(row(f"{replicas} replicas, {name}", timed(scheduler, traffic, few)))
        seen_us = timed_swaps(fleet(replicas, busy=True, wanting=50), min(replicas, 20))
        print(row(f"{replicas} replicas, swaps while fifty wait", seen_us))


def fleet(replicas: int, *, busy: bool, wanting: int) -> Scheduler:
    """A scheduler with this many ready replicas, four to a device, and models that wait."""
    ready = [_model(f"m{n}") for n in range(replicas)]
    scheduler = Scheduler([*ready, *(_model(f"w{n}") for n in range(wanting))])
    count = -(-replicas // PER_DEVICE)
    devices = tuple(Device(f"d{n}", 10 * PER_DEVICE) for n in range(count))
    scheduler.step(NodeJoined("n0", devices), 0)
    for n in range(replicas):
        scheduler.step(RequestArrived(f"first{n}", f"m{n}", "c"), 0)
        scheduler.step(ReplicaReady(f"r{n + 1}"), 0)
        if not busy:
            scheduler.step(GrantEnded(f"first{n}", Outcome.OK), 0)
    for n in range(wanting):
        scheduler.step(RequestArrived(f"wants{n}", f"w{n}", "c"), 0)
    return scheduler


def ready_traffic(replicas: int) -> Iterator[Event]:
    """Requests to ready models, one after the other."""
    n = 0
    while True:
        yield RequestArrived(f"q{n}", f"m{n % replicas}", f"c{n % 50}")
        yield GrantEnded(f"q{n}", Outcome.OK)
        n += 1


def queue_traffic() -> Iterator[Event]:
    """A full model with a thousand behind it: one ends, another arrives."""
    n = 0
    for n in range(QUEUED - 1 + SLOTS):
        yield RequestArrived(f"q{n}", "m0", f"c{n}")
    ended = 0
    while True:
        yield GrantEnded(f"q{ended}", Outcome.OK)
        n, ended = n + 1, ended + 1
        yield RequestArrived(f"q{n}", "m0", f"c{n}")


def room_traffic(wanting: int) -> Iterator[Event]:
    """More and more requests for models that wait for room."""
    n = 0
    while True:
        yield RequestArrived(f"q{n}", f"w{n % wanting}", f"c{n}")
        n += 1


def timed(scheduler: Scheduler, traffic: Iterator[Event], steps: int) -> list[float]:
    """Microseconds of each step; those that only fill the queue are not counted."""
    for _ in range(QUEUED + SLOTS):
        scheduler.step(next(traffic), 1)
    seen_us = []
    for _ in range(steps):
        event = next(traffic)
        began_ns = time.perf_counter_ns()
        scheduler.step(event, 1)
        scheduler.next_wake_ms()
        seen_us.append((time.perf_counter_ns() - began_ns) / 1_000)
    return seen_us


def timed_swaps(scheduler: Scheduler, swaps: int) -> list[float]:
    """Microseconds of each step by which one replica after the other makes way."""
    seen_us = []

    def step(event: Event) -> list[Effect]:
        began_ns = time.perf_counter_ns()
        effects = scheduler.step(event, 1)
        seen_us.append((time.perf_counter_ns() - began_ns) / 1_000)
        return effects

    for n in range(swaps):
        for stop in step(GrantEnded(f"first{n}", Outcome.OK)):
            if isinstance(stop, Stop):
                for start in step(ReplicaStopped(stop.replica, StopCause.ASKED)):
                    if isinstance(start, Start):
                        step(ReplicaReady(start.replica))
    return seen_us


def row(name: str, seen_us: list[float]) -> str:
    """n, median, p95, and how many such steps go into a second."""
    median = statistics.median(seen_us)
    p95 = statistics.quantiles(seen_us, n=20)[-1]
    return f"{name:<42} {len(seen_us):>6} {median:>10.1f} {p95:>10.1f} {1e6 / median:>10.0f}"


def _model(name: str) -> Model:
    return Model(name=name, scaling=Scaling(0, 1, 600_000), memory_mib=10, slots=SLOTS)


if __name__ == "__main__":
    main()
