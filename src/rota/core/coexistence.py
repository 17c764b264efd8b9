"""Which models may stand on a node together, by rule rather than by memory.

Two ways of saying it, both llama-swap's and meaning what they mean there: groups, whose members
swap with each other or with everyone, and a matrix of allowed sets. Both are asked one question,
by the coming model: with these present, who must leave? A rule is therefore directional: a group
that is not exclusive lets its members come in beside models that could not come in beside them.

Rules narrow what may stand together; whether it fits is asked afterwards, of memory. What may
leave at all (nothing busy, held or pinned) is the scheduler's to say. A relation "may coexist"
between two models was refused: it can say neither the direction nor sets of three.

Everything here is a plain value: two files that say the same compare equal, so that a reload can
tell, and a journal can write it down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

from rota.core import matrix
from rota.core.types import ModelName

EVICTION_COST = 1
"""What it costs to evict a model of which nothing is said: all alike, so the fewest leave."""
_MEMO_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Option:
    """One way in which a model may stand on a node.

    Args:
        leaving: of those present, the models that must not be there.
        cost: what their leaving costs, as the matrix states it; 0 for groups.
        rule: which rule says so, for people.
    """

    leaving: frozenset[ModelName]
    cost: int
    rule: str


@runtime_checkable
class Coexistence(Protocol):
    """What the scheduler asks. Implementations compare by value."""

    @property
    def is_free(self) -> bool:
        """Whether there is no rule at all, so that nothing need be asked."""
        ...

    def options(self, target: ModelName, present: frozenset[ModelName]) -> tuple[Option, ...]:
        """The ways in which `target` may come to a node, the best first; there is always one.

        Args:
            present: the other models with a replica on that node, in any phase.

        Returns:
            Options of which none makes leave what another does and more.
        """
        ...

    def may_displace(self, target: ModelName, victim: ModelName) -> bool:
        """Whether `victim` may leave for `target`, be it by rule or to free memory."""
        ...


@dataclass(frozen=True, slots=True)
class Free:
    """No rule: memory alone decides."""

    @property
    def is_free(self) -> bool:
        return True

    def options(self, target: ModelName, present: frozenset[ModelName]) -> tuple[Option, ...]:
        return (Option(frozenset(), 0, "memory alone decides"),)

    def may_displace(self, target: ModelName, victim: ModelName) -> bool:
        return True


FREE: Coexistence = Free()


@dataclass(frozen=True, slots=True)
class Group:
    """Models that share a rule. The defaults are llama-swap's.

    Args:
        swap: one member at a time; else all of them may stand together.
        exclusive: a member that comes in makes everyone outside the group leave.
        persistent: what comes in from outside makes no member leave.
    """

    name: str
    members: frozenset[ModelName]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


@dataclass(frozen=True)
class Groups:
    """Rules by group. A model is in one at most; one in none makes nobody leave by rule, and
    leaves for an exclusive group as a member of a group that is not persistent would."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        assert len(self._group_of) == sum(len(group.members) for group in self.groups), self

    @cached_property
    def is_free(self) -> bool:
        return not any(
            (group.swap and len(group.members) > 1) or group.exclusive or group.persistent
            for group in self.groups
        )

    @cached_property
    def _group_of(self) -> dict[ModelName, Group]:
        return {member: group for group in self.groups for member in group.members}

    def options(self, target: ModelName, present: frozenset[ModelName]) -> tuple[Option, ...]:
        group = self._group_of.get(target)
        if group is None:
            return (Option(frozenset(), 0, f"{target} is in no group"),)
        swapped = present & group.members - {target} if group.swap else frozenset()
        outside = present - group.members if group.exclusive else frozenset()
        outside = frozenset(m for m in outside if self.may_displace(target, m))
        said = [word for word, out in (("swaps", swapped), ("is exclusive", outside)) if out]
        does = " and ".join(said) or "makes nobody leave"
        return (Option(swapped | outside, 0, f"group `{group.name}` {does}"),)

    def may_displace(self, target: ModelName, victim: ModelName) -> bool:
        group = self._group_of.get(victim)
        return group is None or not group.persistent or target in group.members


@dataclass(frozen=True)
class Matrix:
    """Allowed sets with eviction costs. Part of an allowed set is allowed; a model that is in
    no set runs alone, and costs what it costs when another comes.

    Args:
        sets: expressions by the sets' names, in the file's order; see `rota.core.matrix`.
        vars: short names for models, within expressions.
        costs: of evicting a model, more than 0; `EVICTION_COST` where nothing is said.

    Raises:
        ExpressionError: a set cannot be read, or refers to none or to itself.
    """

    sets: tuple[tuple[str, str], ...]
    vars: Mapping[str, ModelName] = field(default_factory=dict)
    costs: Mapping[ModelName, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(cost > 0 for cost in self.costs.values()), self
        for expression in self._expressions.values():
            for mention in matrix.mentions(expression):
                if isinstance(mention, matrix.Ref) and mention.name not in self._expressions:
                    raise matrix.ExpressionError(f"no set `{mention.name}`", mention.column)
        assert len(self._order) == len(self.sets), self

    @cached_property
    def _expressions(self) -> dict[str, matrix.Expression]:
        return {name: matrix.parse(text) for name, text in self.sets}

    @cached_property
    def models(self) -> frozenset[ModelName]:
        """Those that its sets name; any other runs alone."""
        return frozenset(
            self.vars.get(mention.name, mention.name)
            for expression in self._expressions.values()
            for mention in matrix.mentions(expression)
            if isinstance(mention, matrix.Name)
        )

    @cached_property
    def _order(self) -> tuple[str, ...]:
        return matrix.in_order(self._expressions)

    @cached_property
    def _memo(self) -> dict[tuple[ModelName, frozenset[ModelName]], tuple[Option, ...]]:
        return {}

    @property
    def is_free(self) -> bool:
        return False

    def options(self, target: ModelName, present: frozenset[ModelName]) -> tuple[Option, ...]:
        """See `Coexistence`. By cost, then by the file's order of sets, then by that within
        one; llama-swap takes the first."""
        asked = (target, present)
        options = self._memo.get(asked)  # and not looked up twice: another thread may clear it
        if options is None:
            if len(self._memo) >= _MEMO_MAX:
                self._memo.clear()
            options = self._memo[asked] = self._options(target, present - {target})
        return options

    def _options(self, target: ModelName, present: frozenset[ModelName]) -> tuple[Option, ...]:
        costs = {model: self.costs.get(model, EVICTION_COST) for model in present}
        # The target outweighs all others: a set without it is of no use however much it keeps.
        weights = {**costs, target: sum(costs.values()) + 1}
        families = matrix.families(self._expressions, self._order, self.vars, weights)
        found = [
            self._option(costs, present - kept, f"set `{name}` of the matrix")
            for name in self._expressions
            for kept in families[name]
            if target in kept
        ]
        if not found:
            rule = f"{target} is in no set of the matrix and runs alone"
            return (self._option(costs, present, rule),)
        options: list[Option] = []
        for option in sorted(found, key=lambda option: option.cost):
            if not any(better.leaving <= option.leaving for better in options):
                options.append(option)
        return tuple(options)

    def _option(
        self, costs: Mapping[ModelName, int], leaving: frozenset[ModelName], rule: str
    ) -> Option:
        return Option(leaving, sum(costs[model] for model in leaving), rule)

    def may_displace(self, target: ModelName, victim: ModelName) -> bool:
        return True
