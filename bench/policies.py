"""What choosing a victim is worth: rota's rule beside others, on recorded traffic.

First equal slots and no waiting: the share of requests that need a swap, by policy, on all days,
on those that rota's half-lives were tuned on, and on those after. Then waits, with the recorded
service times, and load times drawn from the recorded ones: anew for each load (`--by-load`), or
once for each model, which then is cheap or dear to have back (`--by-model`). Compared are plain
loading on demand (whoever waits longest has an idle replica make room, at once: the least recently
used, or the one that a clairvoyant would name), and rota's whole scheduler, bare (nobody sent
away, nothing held, stops that take no time) and with what a file has that says nothing.

    python bench/policies.py [TRAFFIC.csv [LOADS.csv]] [--seeds 1] [--slots-only]

A line of TRAFFIC is `seconds, model, seconds of service`, one of LOADS a number of seconds; both
have a line of names first. Without them a month made up from a seed is played.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from _machine import header
from rota.core.types import Eviction, ModelName
from rota.sim.replay import BARE, IN_SERVICE, Replayed, replay
from rota.sim.slots import Clairvoyant, GreedyDual, OneRate, Ours, Policy, Recency, swaps
from rota.sim.timeline import Timeline
from rota.sim.traffic import (
    DAY_MS,
    Ask,
    make_up_loads,
    make_up_traffic,
    read_loads,
    read_traffic,
)

SLOT_COUNTS = (2, 4, 8, 16)
TUNED_DAYS = 12
CARDS = (2, 4)
GRANTS = 4
"""Requests that a replica takes at once."""
LoadMs = Callable[[ModelName], int]
Draw = Callable[[], LoadMs]
"""Begins again: each way to schedule meets the same draws."""
Chooser = Callable[[Sequence[ModelName], int], ModelName]


def main() -> None:
    """Print a table for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traffic", type=Path, nargs="?")
    parser.add_argument("loads", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=1, help="draws of load times")
    which = parser.add_mutually_exclusive_group()
    for option in ("--slots-only", "--by-load", "--by-model"):
        which.add_argument(option, action="store_true")
    arguments = parser.parse_args()
    traffic = read_traffic(arguments.traffic) if arguments.traffic else make_up_traffic(seed=1)
    loads_ms = read_loads(arguments.loads) if arguments.loads else make_up_loads(seed=1)
    print(header())
    print(f"{len(traffic)} requests for {len({ask.model for ask in traffic})} models\n")
    print_swaps(traffic)
    seeds = range(1, arguments.seeds + 1)
    if not (arguments.slots_only or arguments.by_model):
        print_waits("a length for each load", traffic, [by_load(loads_ms, seed) for seed in seeds])
    if not (arguments.slots_only or arguments.by_load):
        draws = [by_model(loads_ms, traffic, seed) for seed in seeds]
        print_waits("a length for each model", traffic, draws)


# ── swaps ────────────────────────────────────────────────────────────────────────────────────


def print_swaps(traffic: Sequence[Ask]) -> None:
    """Of each policy the share of swaps, on all days and on some."""
    policies: Mapping[str, Callable[[], Policy]] = {
        "least recently used": Recency,
        "GreedyDual, frequency": GreedyDual,
        "one rate, 5 min": OneRate,
        "ours": Ours,
        "clairvoyant": lambda: Clairvoyant(traffic),
    }
    tuned = sum(1 for ask in traffic if ask.at_ms < TUNED_DAYS * DAY_MS)
    print(f"{'swaps, % of requests':<24}" + "".join(f"{f'{k} slots':<23}" for k in SLOT_COUNTS))
    print(f"{'':<24}" + f"{f'all (1-{TUNED_DAYS} / later)':<23}" * len(SLOT_COUNTS))
    for name, policy in policies.items():
        cells = []
        for slot_count in SLOT_COUNTS:
            seen = list(swaps(traffic, slot_count, policy()))
            parts = f"({share(seen[:tuned]):.2f} / {share(seen[tuned:]):.2f})"
            cells.append(f"{f'{share(seen):.2f} {parts}':<23}")
        print(f"{name:<24}" + "".join(cells))


def share(seen: Sequence[bool]) -> float:
    """Of these so many in a hundred."""
    return 100 * sum(seen) / len(seen) if seen else 0.0


# ── waits ────────────────────────────────────────────────────────────────────────────────────


def print_waits(title: str, traffic: Sequence[Ask], draws: Sequence[Draw]) -> None:
    """Of each way to schedule the swaps and the waits, as means over the draws of loads."""
    ways: Mapping[str, Callable[[int, LoadMs], Replayed]] = {
        "on demand, LRU": lambda cards, load_ms: OnDemand(traffic, cards, load_ms).run(),
        "on demand, clairvoyant": lambda cards, load_ms: OnDemand(
            traffic, cards, load_ms, Future(traffic)
        ).run(),
        "rota, bare, lru": lambda cards, ms: replay(traffic, cards, ms, Eviction.LRU, BARE),
        "rota, bare, value": lambda cards, ms: replay(traffic, cards, ms, Eviction.VALUE, BARE),
        "rota, lru": lambda cards, ms: replay(traffic, cards, ms, Eviction.LRU, IN_SERVICE),
        "rota, value": lambda cards, ms: replay(traffic, cards, ms, Eviction.VALUE, IN_SERVICE),
    }
    print(f"\n{title:<24}{'cards':>6}{'swaps %':>9}{'mean s':>9}{'p95 s':>8}{'p99 s':>8}")
    for cards in CARDS:
        for name, way in ways.items():
            found = [figures(way(cards, draw())) for draw in draws]
            swapped, mean_s, p95_s, p99_s = map(statistics.mean, zip(*found, strict=True))
            print(f"{name:<24}{cards:>6}{swapped:>9.1f}{mean_s:>9.1f}{p95_s:>8.0f}{p99_s:>8.0f}")


def by_load(loads_ms: Sequence[int], seed: int) -> Draw:
    """A length for each load that is begun, whatever the model."""

    def draw() -> LoadMs:
        random = Random(seed)
        return lambda _: random.choice(loads_ms)

    return draw


def by_model(loads_ms: Sequence[int], traffic: Sequence[Ask], seed: int) -> Draw:
    """A length for all loads of a model."""
    random = Random(seed)
    known = {name: random.choice(loads_ms) for name in sorted({ask.model for ask in traffic})}
    return lambda: known.__getitem__


def figures(replayed: Replayed) -> tuple[float, float, float, float]:
    """Swaps in a hundred requests, and waits in seconds: mean, p95, p99."""
    cuts_ms = statistics.quantiles(replayed.waits_ms, n=100)
    mean_s = statistics.mean(replayed.waits_ms) / 1_000
    swapped = 100 * replayed.starts / replayed.requests
    return swapped, mean_s, cuts_ms[94] / 1_000, cuts_ms[98] / 1_000


class Future:
    """Names the idle model whose next request is furthest away."""

    def __init__(self, traffic: Sequence[Ask]) -> None:
        self._ahead: defaultdict[ModelName, deque[int]] = defaultdict(deque)
        for ask in traffic:
            self._ahead[ask.model].append(ask.at_ms)

    def __call__(self, idle: Sequence[ModelName], now_ms: int) -> ModelName:
        return max(idle, key=lambda model: self._next_ms(model, now_ms))

    def _next_ms(self, model: ModelName, now_ms: int) -> int:
        ahead = self._ahead[model]
        while ahead and ahead[0] <= now_ms:
            ahead.popleft()
        return ahead[0] if ahead else 2**62


@dataclass(slots=True)
class Loaded:
    """A model on a card."""

    is_ready: bool = False
    grants: int = 0
    used_ms: int = 0


@dataclass(slots=True)
class OnDemand:
    """The plainest scheduler there is: whoever waits longest has an idle model leave at once.

    Args:
        chooser: names the idle model that leaves; None = the least recently used.
    """

    traffic: Sequence[Ask]
    cards: int
    load_ms: LoadMs
    chooser: Chooser | None = None
    timeline: Timeline = field(default_factory=Timeline)
    loaded: dict[ModelName, Loaded] = field(default_factory=dict)
    queues: dict[ModelName, deque[Ask]] = field(default_factory=dict)
    waits_ms: list[int] = field(default_factory=list)
    starts: int = 0

    def run(self) -> Replayed:
        """Serve it all."""
        for ask in self.traffic:
            self.timeline.post(ask.at_ms, lambda ask=ask: self._arrive(ask))  # type: ignore[misc]
        while self.timeline.next_ms() is not None:
            self.timeline.jump()
        return Replayed(len(self.traffic), self.starts, self.waits_ms)

    def _arrive(self, ask: Ask) -> None:
        self.queues.setdefault(ask.model, deque()).append(ask)
        self._go_on(ask.model)

    def _ready(self, model: ModelName) -> None:
        self.loaded[model].is_ready = True
        self.loaded[model].used_ms = self.timeline.now_ms
        self._go_on(model)

    def _end(self, model: ModelName) -> None:
        self.loaded[model].grants -= 1
        self.loaded[model].used_ms = self.timeline.now_ms
        self._go_on(model)

    def _go_on(self, model: ModelName) -> None:
        place = self.loaded.get(model)
        queue = self.queues.get(model)
        while place and queue and place.is_ready and place.grants < GRANTS:
            ask = queue.popleft()
            place.grants += 1
            self.waits_ms.append(self.timeline.now_ms - ask.at_ms)
            self.timeline.post(ask.serve_ms, lambda: self._end(model))
        if queue is not None and not queue:
            del self.queues[model]
        self._make_room()

    def _make_room(self) -> None:
        cold = [model for model in self.queues if model not in self.loaded]
        for model in sorted(cold, key=lambda model: self.queues[model][0].at_ms):
            if len(self.loaded) == self.cards:
                idle = [
                    other
                    for other, place in self.loaded.items()
                    if place.is_ready and not place.grants and other not in self.queues
                ]
                if not idle:
                    return
                del self.loaded[self._victim(idle)]
            self.loaded[model] = Loaded()
            self.starts += 1
            self.timeline.post(self.load_ms(model), lambda model=model: self._ready(model))  # type: ignore[misc]

    def _victim(self, idle: Sequence[ModelName]) -> ModelName:
        if self.chooser is not None:
            return self.chooser(idle, self.timeline.now_ms)
        return min(idle, key=lambda model: self.loaded[model].used_ms)


if __name__ == "__main__":
    main()
