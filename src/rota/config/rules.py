"""`groups:` and `matrix:`: which models may be loaded together, checked against the catalog.

A name that is none, or only an alias, is a mistake here: a rule about nothing would be silently
without effect, and what the author wanted kept apart would stand together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rota.config import schema
from rota.config.complaints import Complaints, did_you_mean
from rota.config.document import Document, Route
from rota.config.entry import NAME_RULE, is_name, show_name
from rota.core import matrix
from rota.core.coexistence import FREE, Coexistence, Group, Groups, Matrix
from rota.core.types import Model, ModelName


@dataclass(frozen=True, slots=True)
class RuleReader:
    """Makes the rules; complains about names and about what can never be met."""

    document: Document
    complaints: Complaints
    keys: schema.FileKeys

    def read(self) -> Coexistence:
        """The file's rules; where there is a problem with them, those that are sound."""
        if self.keys.groups and self.keys.matrix is not None:
            place = max(self.document.key_place("groups"), self.document.key_place("matrix"))
            self.complaints.problem(
                place, "`groups` and `matrix` are both there; one of them says who may stay"
            )
        if self.keys.matrix is not None:
            return self._matrix(self.keys.matrix)
        return self._groups() if self.keys.groups else FREE

    # --- groups ---

    def _groups(self) -> Groups:
        homes: dict[ModelName, str] = {}
        groups = []
        for name, entry in self.keys.groups.items():
            if not is_name(name):
                self._key_problem(
                    f"{show_name(name)} cannot be a group's name; {NAME_RULE}", "groups", name
                )
            if not entry.members:
                self._problem("`members` is empty; a group is of models", "groups", name, "members")
            members = [
                member
                for index, member in enumerate(entry.members)
                if self._is_member(member, name, homes, ("groups", name, "members", index))
            ]
            groups.append(
                Group(name, frozenset(members), entry.swap, entry.exclusive, entry.persistent)
            )
        return Groups(tuple(groups))

    def _is_member(self, member: str, group: str, homes: dict[str, str], route: Route) -> bool:
        """Whether it is a model that is in no group so far."""
        problem = self._no_model(member)
        home = homes.get(member)
        if problem is None and home == group:
            problem = f"`{member}` is in this group twice"
        elif problem is None and home is not None:
            line = self.document.key_place("groups", home).line
            problem = f"`{member}` is in group `{home}` in line {line}; a model is in one at most"
        if problem is not None:
            self._problem(problem, *route)
            return False
        homes[member] = group
        return True

    # --- matrix ---

    def _matrix(self, entry: schema.MatrixKeys) -> Coexistence:
        before = len(self.complaints.problems)
        if not entry.sets:
            self._problem("`sets` is empty; it says what may stand together", "matrix", "sets")
        for name, model in entry.vars.items():
            if not matrix.is_word(name):
                text = f"{show_name(name)} cannot be a short name: no blanks, and no `& | ( ) +`"
                self._key_problem(text, "matrix", "vars", name)
            problem = self._no_model(model)
            if problem is not None:
                self._problem(problem, "matrix", "vars", name)
        costs = self._costs(entry)
        self._check_sets(entry)
        if len(self.complaints.problems) > before:
            return FREE
        return Matrix(tuple(entry.sets.items()), entry.vars, costs)

    def _costs(self, entry: schema.MatrixKeys) -> dict[ModelName, int]:
        costs: dict[ModelName, int] = {}
        for name, cost in entry.evict_costs.items():
            model = entry.vars.get(name, name)
            problem = None if name in entry.vars else self._no_model(name, entry.vars)
            if problem is None and model in costs:
                problem = f"the cost of `{model}` is there twice, by its name and by a short one"
            if problem is not None:
                self._key_problem(problem, "matrix", "evict_costs", name)
            costs[model] = cost
        return costs

    def _check_sets(self, entry: schema.MatrixKeys) -> None:
        """Complains about what is no expression, and about names in them that are of nothing."""
        expressions: dict[str, matrix.Expression] = {}
        are_known = True
        for name, text in entry.sets.items():
            try:
                expressions[name] = matrix.parse(text)
            except matrix.ExpressionError as error:
                self._expression_problem(name, str(error), error.column)
                continue
            for mention in matrix.mentions(expressions[name]):
                problem = self._no_mention(mention, entry)
                if problem is not None:
                    self._expression_problem(name, problem, mention.column)
                    are_known = False
        if are_known and len(expressions) == len(entry.sets):
            try:
                matrix.in_order(expressions)
            except matrix.CircleError as error:
                self._problem(f"the set {error}", "matrix", "sets", error.sets[0])

    def _no_mention(
        self, mention: matrix.Name | matrix.Ref, entry: schema.MatrixKeys
    ) -> str | None:
        """Why a name in a set is that of nothing."""
        if isinstance(mention, matrix.Ref):
            if mention.name in entry.sets:
                return None
            return f"there is no set `{mention.name}`{did_you_mean(mention.name, entry.sets)}"
        if mention.name in entry.vars:
            return None
        return self._no_model(mention.name, entry.vars)

    # --- names ---

    def _no_model(self, name: str, others: Iterable[str] = ()) -> str | None:
        """Why a name is that of no model here that rules can be about."""
        tree = self.document.tree
        assert isinstance(tree, dict), tree
        models = tree.get("models")
        names = list(models) if isinstance(models, dict) else []
        if name in names:
            entry = self.keys.models.get(name)
            if entry is None or entry.url is None:
                return None
            return f"`{name}` is run by someone else (`url`); no rule here makes it leave"
        for owner, entry in self.keys.models.items():
            if name in entry.aliases:
                return f"`{name}` is an alias; the model is `{owner}`"
        return f"there is no model `{name}`{did_you_mean(name, [*names, *others])}"

    def _expression_problem(self, name: str, text: str, column: int) -> None:
        self._problem(f"at character {column} of the set: {text}", "matrix", "sets", name)

    def _problem(self, text: str, *route: str | int) -> None:
        self.complaints.problem(self.document.value_place(*route), text)

    def _key_problem(self, text: str, *route: str | int) -> None:
        self.complaints.problem(self.document.key_place(*route), text)

    # --- rules and scaling ---

    def check_company(self, models: Iterable[Model], rules: Coexistence) -> None:
        """Complains about models that always run and may never stand together; warns of those
        that can never be loaded beside them, and of those that a matrix forgot."""
        loadable = [m for m in models if not m.is_external and not m.scaling.is_off]
        always = frozenset(model.name for model in loadable if model.scaling.is_always)
        rivals = _rivals(rules, always)
        if rivals:
            names = ", ".join(f"`{name}`" for name in sorted(rivals))
            place = max(self.document.key_place("models", name) for name in rivals)
            why = rules.options(min(rivals), rivals - {min(rivals)})[0].rule
            text = f"models with `min` of 1 or more may never run together on one node: {names}"
            self.complaints.problem(place, f"{text} ({why})")
            return
        for model in loadable:
            place = self.document.key_place("models", model.name)
            best = rules.options(model.name, always - {model.name})[0]
            if best.leaving:
                names = ", ".join(f"`{name}`" for name in sorted(best.leaving))
                text = f"can never be loaded beside {names}, which always runs ({best.rule})"
                self.complaints.warn(place, f"`{model.name}` {text}")
            elif isinstance(rules, Matrix) and model.name not in rules.models:
                self.complaints.warn(
                    place, f"`{model.name}` is in no set of the matrix, so it runs alone"
                )


def are_never_together(rules: Coexistence, one: ModelName, other: ModelName) -> bool:
    """Whether each of two makes the other leave."""
    pair = frozenset({one, other})
    return not any(_may_come_last(rules, name, pair) for name in pair)


def _rivals(rules: Coexistence, always: frozenset[ModelName]) -> frozenset[ModelName]:
    """Those of the models that can come in no order without one making another leave: a pair if
    there is one, else as many as are left when no more can come last."""
    for one in sorted(always):
        for other in sorted(always - {one}):
            if are_never_together(rules, one, other):
                return frozenset({one, other})
    left = always
    while left:
        last = next((name for name in sorted(left) if _may_come_last(rules, name, left)), None)
        if last is None:
            return left
        left -= {last}
    return left


def _may_come_last(rules: Coexistence, name: ModelName, company: frozenset[ModelName]) -> bool:
    return not rules.options(name, company - {name})[0].leaving
