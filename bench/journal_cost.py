"""What keeping the journal costs: per request, and at most at once.

Noted are the two steps of a request to a ready model, beside what deciding them costs. Each page
begins with a copy of the scheduler's state, taken in the event loop; its length is measured on a
fleet of 20 models on 10 replicas with nobody waiting, and with queues that few will ever see.
Beside it stand the two ways that were refused. All in processor time, with memory settled as in
`rota serve`.

    python bench/journal_cost.py [--requests 5000]
"""

from __future__ import annotations

import argparse
import copy
import gc
import pickle
import statistics
import time
from collections.abc import Callable

from _machine import header
from rota.core.effects import Start
from rota.core.events import (
    Event,
    GrantEnded,
    NodeJoined,
    Outcome,
    ReplicaReady,
    RequestArrived,
)
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Model, Scaling
from rota.journal import Recorder
from rota.journal.graph import freeze

MODELS = 20
REPLICAS = 10


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5_000)
    requests: int = parser.parse_args().requests
    print(header())
    print(f"{'a request, two steps':<34} {'n':>6} {'mean µs':>10}")
    decided_us, noted_us = costs_us(requests)
    print(f"{'decided':<34} {requests:>6} {decided_us:>10.2f}")
    print(f"{'noted, copies included':<34} {requests:>6} {noted_us:>10.2f}")
    print(f"\n{'a copy of the state':<34} {'n':>6} {'median ms':>10} {'max ms':>10}")
    for waiting in (0, 100, 1_000, 10_000):
        scheduler = fleet(waiting)
        ways: dict[str, Callable[[Scheduler], object]] = {"rows": freeze}
        if waiting <= 1_000:
            ways |= {"pickle": pickle.dumps, "deepcopy": copy.deepcopy}
        for name, take in ways.items():
            taken = timed_ms(lambda s=scheduler, t=take: t(s), 20)  # type: ignore[misc]
            what = f"{waiting} waiting, {name}"
            print(f"{what:<34} {20:>6} {statistics.median(taken):>10.3f} {max(taken):>10.3f}")


def fleet(waiting: int) -> Scheduler:
    """Ten of twenty models are up, each with a request; so many more wait for the others."""
    models = [Model(f"m{n}", Scaling(0, 1, 600_000), 8_000) for n in range(MODELS)]
    scheduler = Scheduler(models)
    devices = tuple(Device(f"d{n}", 8_000) for n in range(REPLICAS))
    scheduler.step(NodeJoined("n", devices), 0)
    for n in range(REPLICAS):
        for effect in scheduler.step(RequestArrived(f"b{n}", f"m{n}", f"peer:{n}"), 1):
            if isinstance(effect, Start):
                scheduler.step(ReplicaReady(effect.replica), 1)
    for n in range(waiting):
        name = f"m{REPLICAS + n % (MODELS - REPLICAS)}"
        scheduler.step(RequestArrived(f"w{n}", name, f"peer:{n}"), 1)
    return scheduler


def costs_us(requests: int) -> tuple[float, float]:
    """What deciding requests that are granted at once costs, and what noting them adds.

    Apart, since on a busy machine the one varies by more than the other is.
    """
    scheduler = fleet(0)
    gc.collect()
    gc.freeze()
    heard: list[tuple[int, Event]] = []
    for n in range(requests):
        heard.append((2 + n, RequestArrived(f"q{n}", "m0", "peer:x")))
        heard.append((2 + n, GrantEnded(f"q{n}", Outcome.OK)))
    began = time.process_time()
    decided = [scheduler.step(event, now_ms) for now_ms, event in heard]
    decided_us = (time.process_time() - began) / requests * 1e6
    gc.freeze()
    recorder = Recorder(scheduler)
    began = time.process_time()
    for (now_ms, event), effects in zip(heard, decided, strict=True):
        recorder.note(now_ms, event, effects)
    return decided_us, (time.process_time() - began) / requests * 1e6


def timed_ms(take: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.process_time()
        take()
        taken.append((time.process_time() - began) * 1e3)
    return taken


if __name__ == "__main__":
    main()
