"""What a file may say beyond its models, drawn by lot: who may stand together, several replicas,
preloads; and other files that take its place while everything goes on.

Drawn after a world is, so that the worlds of old seeds stay as they were where nothing of it is
wanted (`simulate(…, is_plain=True)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from rota.core.coexistence import FREE, Coexistence, Group, Groups, Matrix
from rota.core.events import ModelsChanged
from rota.core.types import Eviction, Model, Preload, Scaling
from rota.sim.world import World

_FEATURES = ("rules", "replicas", "preload", "changes", "lru")


def enrich(random: Random, world: World, *, is_endless: bool) -> World:
    """A world in which the file says more.

    Args:
        is_endless: every model can be loaded at any time, and nothing is taken away.
    """
    has = {feature: random.random() < 0.4 for feature in _FEATURES}
    models = world.models
    if has["replicas"]:
        models = tuple(_several(random, model) for model in models)
    if has["preload"]:
        models = tuple(
            replace(model, preload=random.choice(tuple(Preload)))
            if random.random() < 0.3 and not model.is_external
            else model
            for model in models
        )
    rules = draw_rules(random, models, is_endless=is_endless) if has["rules"] else FREE
    return replace(
        world,
        models=models,
        coexistence=rules,
        eviction=Eviction.LRU if has["lru"] else Eviction.VALUE,
        changes_ms=random.randint(10_000, 300_000) if has["changes"] else 0,
    )


def draw_rules(random: Random, models: Sequence[Model], *, is_endless: bool) -> Coexistence:
    """Groups, or a matrix, of some of the models that somebody has to place."""
    names = [model.name for model in models if not model.is_external]
    random.shuffle(names)
    if len(names) < 2:
        return FREE
    if random.random() < 0.5:
        cut = random.randint(1, len(names))
        parts = [
            part for part in (names[:cut], names[cut : random.randint(cut, len(names))]) if part
        ]
        truth = (True, False)
        return Groups(
            tuple(
                Group(
                    f"g{number}",
                    frozenset(members),
                    swap=random.choice(truth),
                    exclusive=random.choice(truth),
                    persistent=not is_endless and random.random() < 0.2,
                )
                for number, members in enumerate(parts)
            )
        )
    sets = []
    for number in range(random.randint(1, 4)):
        members = random.sample(names, random.randint(1, len(names)))
        text = members[0]
        for name in members[1:]:
            text += random.choice((" & ", " | ")) + name
        sets.append((f"s{number}", text))
    return Matrix(tuple(sets), {}, {name: random.randint(1, 9) for name in names[:2]})


def another(random: Random, world: World, models: Sequence[Model]) -> ModelsChanged:
    """What may take the place of the catalog that counts: the same, or something like it.

    Args:
        models: those of the present catalog.
    """
    known = {model.name: model for model in models}
    coming = []
    for model in world.models:
        present = known.get(model.name)
        chance = random.random()
        if present is None:
            if chance < 0.6:
                coming.append(model)
        elif chance < 0.7:
            coming.append(present)
        elif chance < 0.9:
            coming.append(_altered(random, present))
    coming = coming or list(models)
    rules = world.coexistence
    if random.random() < 0.3:
        rules = random.choice((FREE, draw_rules(random, world.models, is_endless=False)))
    launched = frozenset(model.name for model in coming if random.random() < 0.1)
    return ModelsChanged(tuple(coming), rules, relaunched=launched)


def _several(random: Random, model: Model) -> Model:
    if model.is_external or model.scaling.is_off:
        return model
    low = model.scaling.min
    scaling = replace(model.scaling, max=max(model.scaling.max, low, random.randint(1, 3)))
    return replace(model, scaling=scaling, scale_up_after_ms=random.choice((0, 1_000, 5_000)))


def _altered(random: Random, model: Model) -> Model:
    """The same model, told otherwise. Its queue keeps its length: a shorter one turns nobody
    out, and the check of its length would object."""
    if model.is_external:
        return replace(model, patience_ms=random.choice((0, 10_000, 300_000)))
    low, high = random.choice(((0, 1), (0, 1), (0, 2), (0, 3), (1, 1), (0, 0)))
    return replace(
        model,
        scaling=Scaling(low, high, random.choice((0, 1_000, 60_000, 600_000))),
        memory_mib=random.choice((model.memory_mib, model.memory_mib, None, 1_024, 12 * 1_024)),
        slots=random.choice((model.slots, 1, 4)),
        patience_ms=random.choice((0, 10_000, 300_000)),
        hold_ms=random.choice((0, 10_000)),
        priority=random.choice((model.priority, 0, 5)),
        is_pinned=random.random() < 0.1,
        preload=random.choice((model.preload, Preload.NEVER)),
    )
