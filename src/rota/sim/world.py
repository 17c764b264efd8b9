"""A random world for a simulation: devices, a catalog, callers, and what goes wrong.

Each seed draws which features it has at all before it draws how much of them (swarm testing:
runs with few features meet corners that a run with everything never reaches).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rota.core.coexistence import FREE, Coexistence
from rota.core.events import NodeJoined
from rota.core.types import Device, Eviction, Model, ModelName, Scaling
from rota.sim.callers import Temper
from rota.sim.cluster import Faults

GIB = 1_024
FAULTS = ("crash", "hang", "refuse", "permanent", "slow", "stubborn", "die", "mute")
FEATURES = (
    *FAULTS,
    *("min", "off", "whole", "several", "external", "max"),
    *("small_queue", "small_bytes", "late", "hands", "leavers"),
    *("priorities", "leases", "jobs", "exclusive", "pinned", "rejects", "lost", "abandon"),
)


@dataclass(frozen=True, slots=True)
class World:
    """What one simulation plays in.

    Args:
        load_ms: how long each model really takes to load.
        tempers: for each caller the model it asks for and how it behaves.
        hands_ms: how long on average between two things done by hand; 0 = nobody does any.
        lost_ms: how long on average between two losses of a machine; 0 = none is lost.
        lease_ms_max: how long a lease may last, renewals included.
        coexistence: which models may stand together.
        eviction: what decides who makes room.
        changes_ms: how long on average between two changes of the catalog; 0 = it never changes.
    """

    nodes: tuple[NodeJoined, ...]
    late_ms: tuple[int, ...]
    models: tuple[Model, ...]
    load_ms: dict[ModelName, int]
    tempers: tuple[tuple[ModelName, Temper], ...]
    faults: Faults
    hands_ms: int
    queue_bytes_max: int
    phase_ms: int
    lost_ms: int = 0
    lease_ms_max: int = 600_000
    coexistence: Coexistence = FREE
    eviction: Eviction = Eviction.VALUE
    changes_ms: int = 0

    @property
    def use_ms_max(self) -> int:
        """How long one use of a replica lasts at most: a request and the job it goes on as, or a
        lease. This is G in docs/scheduler.md."""
        tempers = [temper for _, temper in self.tempers]
        serve_ms = max(temper.serve_ms_max for temper in tempers)
        job_ms = self.lease_ms_max if any(temper.jobs for temper in tempers) else 0
        lease_ms = self.lease_ms_max if any(temper.leases for temper in tempers) else 0
        return max(serve_ms + job_ms, lease_ms)


def draw_world(random: Random) -> World:
    """A world in which anything may go wrong."""
    has = {feature: random.random() < 0.5 for feature in FEATURES}
    nodes = _draw_nodes(random, random.randint(1, 3))
    models = tuple(_draw_model(random, f"m{n}", has) for n in range(random.randint(2, 9)))
    shares = {name: random.uniform(0.05, 0.4) if has[name] else 0.0 for name in FAULTS}
    phase_ms = random.choice((5, 15, 30)) * 60_000
    return World(
        nodes=nodes,
        late_ms=tuple(random.randint(0, 60_000) if has["late"] else 0 for _ in nodes),
        models=models,
        load_ms={model.name: random.randint(300, 60_000) for model in models},
        tempers=tuple(_draw_caller(random, models, has) for _ in range(random.randint(2, 30))),
        faults=Faults(**shares),
        hands_ms=random.randint(10_000, 300_000) if has["hands"] else 0,
        queue_bytes_max=20_000 if has["small_bytes"] else 512 << 20,
        phase_ms=phase_ms,
        lost_ms=random.randint(60_000, 600_000) if has["lost"] else 0,
        lease_ms_max=random.choice((60_000, 600_000)),
    )


def draw_endless_world(random: Random) -> World:
    """A world that works, whose callers never stop asking and always return.

    Every model can be loaded, nothing is kept for good, and no model has more callers than a
    replica of it has slots. In a third of the worlds it has just as many and none of them
    pauses: all that the slots can carry.
    """
    nodes = _draw_nodes(random, random.choice((1, 1, 2)))
    has = {name: random.random() < 0.5 for name in ("priorities", "leases", "jobs", "exclusive")}
    is_full = random.random() < 1 / 3
    models = [_draw_endless_model(random, f"m{n}", nodes, has) for n in range(random.randint(2, 7))]
    serve_ms_max = random.choice((10_000, 60_000, 60_000, 300_000))
    tempers: list[tuple[ModelName, Temper]] = []
    for model in models:
        for _ in range(model.slots if is_full else random.randint(1, model.slots)):
            temper = Temper(
                returns=1.0,
                leaves=0.0,
                serve_ms_max=serve_ms_max if is_full else random.randint(1_000, serve_ms_max),
                think_ms_max=1 if is_full else random.choice((500, 5_000, 60_000)),
                wishes=10**9,
                hold_ms=random.choice((None, None, 0, 300_000)),
                patience_ms=random.choice((None, None, 0, 60_000)),
                priority=_draw_priority(random, has),
                leases=random.choice((0.0, 0.1, 0.5)) if has["leases"] else 0.0,
                jobs=random.choice((0.0, 0.3)) if has["jobs"] else 0.0,
                lease_ms_max=random.choice((20_000, 120_000)),
            )
            tempers.append((model.name, temper))
    return World(
        nodes=nodes,
        late_ms=tuple(0 for _ in nodes),
        models=tuple(models),
        load_ms={model.name: random.randint(300, 30_000) for model in models},
        tempers=tuple(tempers),
        faults=Faults(slow=random.choice((0.0, 0.2)), stubborn=random.choice((0.0, 0.5))),
        hands_ms=0,
        queue_bytes_max=512 << 20,
        phase_ms=90 * 60_000,
        lease_ms_max=random.choice((60_000, 240_000)),
    )


def _draw_endless_model(
    random: Random, name: str, nodes: tuple[NodeJoined, ...], has: dict[str, bool]
) -> Model:
    """One that fits on every machine, with others or alone."""
    count = random.randint(1, min(2, *(len(node.devices) for node in nodes)))
    largest = min(sorted(d.memory_mib for d in node.devices)[-count] for node in nodes)
    return Model(
        name=name,
        scaling=Scaling(0, 1, random.choice((0, 5_000, 600_000))),
        memory_mib=random.choice((None, largest, random.randint(1, largest))),
        device_count=count,
        slots=random.choice((1, 1, 2, 4)),
        activation_wait_ms=random.choice((1_000, 10_000, 45_000)),
        patience_ms=random.choice((5_000, 30_000, 300_000)),
        hold_ms=random.choice((0, 1_000, 30_000)),
        hold_finished_ms=random.choice((0, 1_000)),
        load_ms=random.choice((None, 10_000)),
        priority=_draw_priority(random, has) or 0,
        is_exclusive_while_busy=has["exclusive"] and random.random() < 0.3,
    )


def _draw_priority(random: Random, has: dict[str, bool]) -> int | None:
    return random.choice((None, None, -5, 5, 10)) if has["priorities"] else None


def _draw_nodes(random: Random, count: int) -> tuple[NodeJoined, ...]:
    return tuple(
        NodeJoined(
            f"n{n}",
            tuple(
                Device(f"d{index}", random.choice((8, 16, 24, 80)) * GIB)
                for index in range(random.randint(1, 4))
            ),
        )
        for n in range(count)
    )


def _draw_model(random: Random, name: str, has: dict[str, bool]) -> Model:
    scaling = (0, 1)
    if has["min"] and random.random() < 0.2:
        scaling = random.choice(((1, 1), (1, 2)))
    elif has["off"] and random.random() < 0.2:
        scaling = (0, 0)
    elif has["max"] and random.random() < 0.3:
        scaling = (0, 2)
    count = 2 if has["several"] and random.random() < 0.3 else 1
    if has["external"] and random.random() < 0.2:
        count = 0
    is_whole = has["whole"] and random.random() < 0.3
    return Model(
        name=name,
        scaling=Scaling(*scaling, random.choice((0, 1_000, 60_000, 600_000))),
        memory_mib=None if is_whole else random.choice((1, 4, 7, 12, 20, 60, 100)) * GIB,
        device_count=count,
        devices=frozenset({"d0", "d1"}) if random.random() < 0.2 else None,
        slots=random.choice((1, 2, 4, 10)),
        queue_max=random.choice((1, 3)) if has["small_queue"] else 1_000,
        activation_wait_ms=random.choice((0, 2_000, 45_000)),
        queue_wait_ms=random.choice((5_000, 600_000)),
        patience_ms=random.choice((0, 10_000, 300_000)),
        hold_ms=random.choice((0, 10_000, 60_000)),
        hold_finished_ms=random.choice((0, 1_000)),
        load_ms=random.choice((None, 10_000)),
        priority=_draw_priority(random, has) or 0,
        rejects_when_full=has["rejects"] and random.random() < 0.3,
        is_pinned=has["pinned"] and random.random() < 0.15,
        is_exclusive_while_busy=has["exclusive"] and random.random() < 0.3,
    )


def _draw_caller(
    random: Random, models: tuple[Model, ...], has: dict[str, bool]
) -> tuple[ModelName, Temper]:
    temper = Temper(
        returns=random.choice((0.0, 0.5, 1.0)),
        leaves=random.choice((0.0, 0.3, 0.9)) if has["leavers"] else 0.0,
        serve_ms_max=random.choice((100, 5_000, 120_000)),
        think_ms_max=random.choice((1, 5_000, 120_000)),
        wishes=random.randint(1, 40),
        own_wait_ms=random.choice((None, None, 0, 3_000, 55_000)),
        hold_ms=random.choice((None, None, 0, 5_000, 10**9)),
        patience_ms=random.choice((None, None, 0, 5_000, 400_000)),
        priority=_draw_priority(random, has),
        leases=random.choice((0.0, 0.3, 1.0)) if has["leases"] else 0.0,
        loads=random.random() < 0.7,
        jobs=random.choice((0.0, 0.3, 1.0)) if has["jobs"] else 0.0,
        lease_ms_max=random.choice((1_000, 60_000, 1_000_000)),
        leaves_ms_max=5_000 if has["abandon"] else 60_000,
    )
    return random.choice(models).name, temper
