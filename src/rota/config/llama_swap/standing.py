"""Which models may stand together, and what each of them takes.

llama-swap's rules know groups and no sizes; Quartermaster's know sizes as well, and go by them
for every model that has one (`estVramGB`, within `vramBudgetGB`). In rota's terms:

1. No budget: the groups as they are. Each model takes 1 MiB of one device that stands for the
   whole machine, so that nothing but the groups decides.
2. A budget: models with a size are in one group whose members stay together as memory allows,
   and for which those without a size leave; persistent groups stay. A model without a size goes
   by its own group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rota.config.complaints import Place
from rota.config.llama_swap.fields import Item
from rota.config.llama_swap.notes import Note
from rota.config.llama_swap.rules import DEFAULT_GROUP, Catalog
from rota.config.llama_swap.settings import GroupSettings, ModelSettings

NO_SIZE = "1MiB"
_SIZED = "sized"


@dataclass(frozen=True, slots=True)
class Standing:
    """Who may stand together.

    Args:
        groups: those that have members; empty = memory alone.
        device: the one device, and what it holds.
        memory: each model's footprint.
        has_sizes: memory decides.
        notes: what could not be kept.
    """

    groups: tuple[GroupSettings, ...]
    device: tuple[str, str]
    memory: dict[str, str]
    has_sizes: bool
    notes: tuple[Note, ...] = ()


def standing_of(catalog: Catalog, models: Iterable[ModelSettings]) -> Standing:
    """The rules for those models that can be run."""
    running = {model.name: model for model in models}
    groups = [_of(group, running) for group in catalog.groups]
    budget = catalog.settings.budget_gib
    if not budget:
        memory = dict.fromkeys(running, NO_SIZE)
        return Standing(_written(groups, running), ("machine", "1TiB"), memory, has_sizes=False)
    notes = []
    memory = {}
    for model in running.values():
        size = model.memory_gib
        if size > budget:
            said = f"it is over `vramBudgetGB`, {gib(budget)}, which is taken"
            notes.append(Note(model.fields.at("estVramGB"), "estVramGB", said))
        memory[model.name] = gib(min(size, budget)) if size else NO_SIZE
    sized = [group for group in _by_size(groups, running) if group.members]
    if all(model.memory_gib for model in running.values()):
        sized = [group for group in sized if group.persistent]
    groups = sized if catalog.matrix is None else []
    return Standing(
        tuple(_named(groups)), ("gpu", gib(budget)), memory, has_sizes=True, notes=tuple(notes)
    )


def gib(amount: float) -> str:
    """An amount in GiB as the file says it; at least 1 MiB."""
    return f"{max(amount, 0.001):.3f}".rstrip("0").rstrip(".") + "GiB"


def _of(group: GroupSettings, running: dict[str, ModelSettings]) -> GroupSettings:
    members = [item for item in group.members if item.text in running]
    return replace(group, members=members)


def _written(
    groups: list[GroupSettings], running: dict[str, ModelSettings]
) -> tuple[GroupSettings, ...]:
    """None where there is nobody to leave for anyone."""
    return tuple(_named(groups)) if len(running) > 1 else ()


def _by_size(
    groups: list[GroupSettings], running: dict[str, ModelSettings]
) -> Iterator[GroupSettings]:
    """Groups in which memory decides between those whose sizes are known."""
    sized: list[Item] = []
    for group in groups:
        known = [item for item in group.members if running[item.text].memory_gib]
        if group.persistent and known:
            yield replace(group, swap=False, exclusive=False)
            continue
        sized += known
        yield replace(group, members=[item for item in group.members if item not in known])
    yield GroupSettings(_SIZED, Place(), sized, swap=False, exclusive=True)


def _named(groups: Iterable[GroupSettings]) -> Iterator[GroupSettings]:
    """Those with members; llama-swap's `(default)` is `default`, unless somebody's is."""
    groups = [group for group in groups if group.members]
    names = {group.name for group in groups}
    for group in groups:
        is_default = group.name == DEFAULT_GROUP and "default" not in names
        yield replace(group, name="default") if is_default else group
