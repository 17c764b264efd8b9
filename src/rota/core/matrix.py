"""The language of allowed sets: `chat & (small | coder)`, and what of those present one keeps.

An expression stands for a family of sets of models: a name is one set of one model, `|` joins
families, `&` unites one set of each, `+x` is the family of the set called x; `&` binds tighter.
A set allows its subsets too: it says what may stand together, not what must.

Families are never written out: ten groups of ten names are ten billion sets and thirty lines
here. A question is about the few models that matter to it, so each family is looked at through
those alone, and of two sets the one that keeps less of them is dropped as soon as it is met
(llama-swap solves it the same way). Writing all sets out and refusing files with more than so
many was refused: the bound would be met by files that mean something.

The keys of a file are checked in `rota.config`; it asks here for the places of mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from rota.core.types import ModelName

NESTING_MAX = 100
"""Parentheses within each other; a bound for the walk, far above what anyone reads."""
KEPT_MAX = 64
"""Sets looked at further, of those that each keep something which the others do not. Reached
only when dozens of models are there that no set allows together; the dearest are looked at."""

_WORD = r"[^\s&|()+]+"
"""What a name in an expression is made of: anything but blanks and the marks."""
_TOKEN = re.compile(rf"\s*(?:[&|()]|\+?{_WORD}|(?P<odd>\+))")


class ExpressionError(ValueError):
    """An expression that cannot be read: what is wrong, and at which column, counted from 1."""

    def __init__(self, text: str, column: int = 1) -> None:
        super().__init__(text)
        self.column = column


class CircleError(ExpressionError):
    """Sets that refer to each other in a circle; `sets` are their names, the first one twice."""

    def __init__(self, sets: tuple[str, ...]) -> None:
        super().__init__(f"refers to itself: {' → '.join(sets)}")
        self.sets = sets


@dataclass(frozen=True, slots=True)
class Name:
    """A model, by its name or a short one."""

    name: str
    column: int


@dataclass(frozen=True, slots=True)
class Ref:
    """The family of another set."""

    name: str
    column: int


@dataclass(frozen=True, slots=True)
class Both:
    """One set of each part, united."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """The sets of all parts, in their order."""

    parts: tuple[Expression, ...]


Expression = Name | Ref | Both | Either

Kept = frozenset[ModelName]
"""What one set of a family keeps, of the models that matter."""


# ── reading ──────────────────────────────────────────────────────────────────────────────────


def parse(text: str) -> Expression:
    """Read an expression.

    Raises:
        ExpressionError: it is empty or none; says where.
    """
    parser = _Parser(text)
    if parser.word == "":
        raise ExpressionError("is empty; `a & b` lets a and b stand together")
    expression = parser.either()
    if parser.word:
        raise ExpressionError(f"`&` or `|` is wanted before `{parser.word}`", parser.column)
    return expression


class _Parser:
    """One walk over the text; `word` is the next one, empty at the end."""

    def __init__(self, text: str) -> None:
        self.text = text.rstrip()
        self.position = 0
        self.depth = 0
        self.word = ""
        self.column = 1
        self._next()

    def either(self) -> Expression:
        parts = [self._both()]
        while self.word == "|":
            self._next()
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _both(self) -> Expression:
        parts = [self._one()]
        while self.word == "&":
            self._next()
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def _one(self) -> Expression:
        word, column = self.word, self.column
        if word == "(":
            return self._bracket(column)
        if word in {"", "&", "|", ")"}:
            found = f"`{word}`" if word else "the end"
            raise ExpressionError(f"a name or `(` is wanted, not {found}", column)
        self._next()
        return Ref(word[1:], column) if word.startswith("+") else Name(word, column)

    def _bracket(self, column: int) -> Expression:
        self.depth += 1
        if self.depth > NESTING_MAX:
            raise ExpressionError(f"has more than {NESTING_MAX} `(` within each other", column)
        self._next()
        inner = self.either()
        if self.word != ")":
            raise ExpressionError("`(` without its `)`", column)
        self._next()
        self.depth -= 1
        return inner

    def _next(self) -> None:
        if self.position == len(self.text):
            self.word, self.column = "", self.position + 1
            return
        match = _TOKEN.match(self.text, self.position)
        assert match is not None, (self.text, self.position)
        self.word = match[0].lstrip()
        self.column = match.end() - len(self.word) + 1
        self.position = match.end()
        if match["odd"]:
            raise ExpressionError("the name of a set is wanted after `+`", self.column)


def is_word(name: str) -> bool:
    """Whether an expression can name it."""
    return re.fullmatch(_WORD, name) is not None


def mentions(expression: Expression) -> Iterator[Name | Ref]:
    """The names in it, from left to right."""
    match expression:
        case Both(parts) | Either(parts):
            for part in parts:
                yield from mentions(part)
        case Name() | Ref():
            yield expression


def in_order(sets: Mapping[str, Expression]) -> tuple[str, ...]:
    """The names of the sets, each after those it refers to, all of which are among them.

    Raises:
        CircleError: sets refer to each other in a circle.
    """
    graph = {
        name: [ref.name for ref in mentions(expression) if isinstance(ref, Ref)]
        for name, expression in sets.items()
    }
    try:
        return tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise CircleError(tuple(reversed(error.args[1]))) from error


# ── asking ───────────────────────────────────────────────────────────────────────────────────


def families(
    sets: Mapping[str, Expression],
    order: Iterable[str],
    names: Mapping[str, ModelName],
    weights: Mapping[ModelName, int],
) -> dict[str, tuple[Kept, ...]]:
    """What the sets keep, by name: of each family the ways that no other way surpasses.

    Args:
        sets: the sets; `order` is their order of `in_order`.
        names: the models' short names.
        weights: the models that matter and how much each does, more than 0.
    """
    found: dict[str, tuple[Kept, ...]] = {}
    for name in order:
        found[name] = _family(sets[name], found, names, weights)
    return found


def _family(
    expression: Expression,
    found: Mapping[str, tuple[Kept, ...]],
    names: Mapping[str, ModelName],
    weights: Mapping[ModelName, int],
) -> tuple[Kept, ...]:
    match expression:
        case Name(name):
            return (frozenset({names.get(name, name)} & weights.keys()),)
        case Ref(name):
            return found[name]
        case Either(parts):
            ways = (way for part in parts for way in _family(part, found, names, weights))
            return _best(ways, weights)
        case Both(parts):
            family: tuple[Kept, ...] = (frozenset(),)
            for part in parts:
                further = _family(part, found, names, weights)
                family = _best((left | right for left in family for right in further), weights)
            return family


def _best(ways: Iterable[Kept], weights: Mapping[ModelName, int]) -> tuple[Kept, ...]:
    """The ways that keep something which no other keeps as well, in their order."""
    best: list[Kept] = []
    for way in dict.fromkeys(ways):
        if not any(way <= other for other in best):
            best = [other for other in best if not other <= way]
            best.append(way)
    if len(best) > KEPT_MAX:
        dearest = sorted(best, key=lambda way: -sum(weights[model] for model in way))
        looked_at = set(dearest[:KEPT_MAX])
        best = [way for way in best if way in looked_at]
    return tuple(best)
