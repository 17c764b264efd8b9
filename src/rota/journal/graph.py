"""The scheduler's whole state at one instant, as rows: quick to take, safe to write down.

Frozen values (models, placements, words) are shared, since nobody can change them; each thing
that changes becomes a row of its parts, in which other rows are named by number. So two names
of one entry stay two names of one entry. Taking the rows costs an eighth of `copy.deepcopy` and
as much as a pickle (bench/journal_cost.py).

A pickle in the file was refused: loading one runs what its author wrote. Here a file names only
classes of `rota.core`, and each is given exactly the parts it has. A hand-written form of the
state was refused too: it would have to be kept in step with every field the core gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import ModuleType, NoneType
from typing import Any, cast

import msgspec

from rota.core import (
    clearing,
    coexistence,
    effects,
    events,
    ledger,
    orders,
    scheduler,
    state,
    types,
    worth,
)
from rota.core.ledger import Ledger
from rota.core.scheduler import Scheduler

Plain = Any
"""What JSON can say."""


class DamagedError(ValueError):
    """What was read is no state, or no value, that this rota could have written."""


class Ref(int):
    """The number of a row, where a row is named."""

    __slots__ = ()


Row = tuple[type, tuple[object, ...]]
"""A thing that changes: its class and its parts (a dict's are its keys, then its values)."""
Rows = tuple[Row, ...]
"""A state; the first row is the scheduler."""

_CONTAINERS = (list, set, dict)
_shared: set[type] = {str, int, float, bool, NoneType, frozenset}
"""Classes whose values never change; those of the core join as they are met."""


# ── in memory ────────────────────────────────────────────────────────────────────────────────


def freeze(root: Scheduler) -> Rows:
    """The state of a scheduler, which may step on."""
    freezer = _Freezer()
    freezer.keep(root)
    return tuple(cast("list[Row]", freezer.rows))


def thaw(rows: Rows) -> Scheduler:
    """A scheduler in that state, sharing nothing that changes with any other.

    Raises:
        DamagedError: the rows do not make one.
    """
    things = [cast("Any", kind).__new__(kind) for kind, _ in rows]
    if not things or not isinstance(things[0], Scheduler):
        raise DamagedError("the first row is not a scheduler")
    try:
        for thing, (kind, parts) in zip(things, rows, strict=True):
            _fill(thing, kind, [_resolve(part, things) for part in parts])
    except TypeError as error:  # something that changes, where a key should be
        raise DamagedError(str(error)) from error
    return things[0]


class _Freezer:
    """One walk over everything that a scheduler holds."""

    def __init__(self) -> None:
        self.rows: list[Row | None] = []
        self.refs: dict[int, Ref] = {}

    def keep(self, value: object) -> object:
        """The value if it never changes; else its row's number."""
        kind: type = type(value)
        if kind in _shared:
            return value
        if isinstance(value, tuple):
            return _tuple_of(kind, self.parts(value))
        ref = self.refs.get(id(value))
        if ref is None:
            take = _taker(kind)
            if take is None:
                return value
            ref = self.refs[id(value)] = Ref(len(self.rows))
            self.rows.append(None)  # numbered before its parts are: they may name it
            self.rows[ref] = (kind, self.parts(take(value)))
        return ref

    def parts(self, values: tuple[object, ...]) -> tuple[object, ...]:
        return values if _shared.issuperset(map(type, values)) else tuple(map(self.keep, values))


@cache
def _taker(kind: type) -> Callable[[Any], tuple[object, ...]] | None:
    """How to take a thing of this class apart; None = it never changes, and joins `_shared`."""
    if kind is dict:
        return lambda value: (*value, *value.values())
    if kind is set:
        return lambda value: tuple(sorted(value))  # one state, one form
    if kind is list:
        return tuple
    if not kind.__module__.startswith("rota.core."):
        raise TypeError(f"the state of the scheduler holds a {kind.__name__}")
    if _is_value(kind):
        _shared.add(kind)
        return None
    names = _names(kind)
    if len(names) == 1:  # of one name an attrgetter makes no tuple
        return lambda value: (getattr(value, names[0]),)
    return cast("Callable[[Any], tuple[object, ...]]", attrgetter(*names))


def _fill(thing: Any, kind: type, parts: list[object]) -> None:
    if kind is dict:
        half = len(parts) // 2
        thing.update(zip(parts[:half], parts[half:], strict=True))
    elif kind is list:
        thing.extend(parts)
    elif kind is set:
        thing.update(parts)
    else:
        for name, part in zip(_names(kind), parts, strict=True):
            setattr(thing, name, part)


def _resolve(part: object, things: list[Any]) -> object:
    if type(part) is Ref:
        return things[part]
    if isinstance(part, tuple):
        return _tuple_of(type(part), tuple(_resolve(inner, things) for inner in part))
    return part


def _tuple_of(kind: type[tuple[object, ...]], parts: tuple[object, ...]) -> tuple[object, ...]:
    """A tuple, or a named one of the core's, of these parts."""
    return parts if type(parts) is kind else tuple.__new__(kind, parts)


@cache
def _names(kind: type) -> tuple[str, ...]:
    """The parts that a thing of this class has, by name."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return tuple(vars(Ledger() if kind is Ledger else Scheduler(())))


# ── as JSON ──────────────────────────────────────────────────────────────────────────────────


def rows_to_plain(rows: Rows) -> Plain:
    """The rows as JSON can say them."""
    return [_row_to_plain(kind, parts) for kind, parts in rows]


def rows_from_plain(plain: Plain) -> Rows:
    """The rows that were written down.

    Raises:
        DamagedError: they are not such rows; says where.
    """
    if not isinstance(plain, list):
        raise DamagedError("the state is not a list of rows")
    rows = []
    for number, row in enumerate(plain):
        try:
            rows.append(_row_from_plain(row, len(plain)))
        except DamagedError as error:
            raise DamagedError(f"row {number} of the state: {error}") from error
    return tuple(rows)


def value_to_plain(value: object) -> Plain:
    """A value that never changes: `{class: …}` for one of the core's, else as it is."""
    kind = type(value)
    if kind is Ref:
        return {"row": int(cast("Ref", value))}
    if issubclass(kind, tuple):
        parts = cast("tuple[object, ...]", value)
        return {kind.__name__: [value_to_plain(part) for part in parts]}
    if kind is frozenset:
        return {"frozenset": sorted(cast("frozenset[str]", value))}
    if kind in _values().values():
        return {kind.__name__: msgspec.to_builtins(value)}
    return value


def value_from_plain(plain: Plain, row_count: int = 0) -> object:
    """The value that was written down.

    Raises:
        DamagedError: it is none of ours.
    """
    if not isinstance(plain, dict):
        if isinstance(plain, list):
            raise DamagedError("a bare list")
        return plain
    name, body = _only_item(plain)
    if name == "row":
        if type(body) is not int or not 0 <= body < row_count:
            raise DamagedError(f"there is no row {body!r}")
        return Ref(body)
    if name in _tuples():
        parts = tuple(value_from_plain(part, row_count) for part in _list(body))
        if len(parts) != len(getattr(_tuples()[name], "_fields", parts)):
            raise DamagedError(f"a {name} of another version of rota")
        return _tuple_of(_tuples()[name], parts)
    if name == "frozenset":
        return frozenset(str(part) for part in _list(body))
    kind = _values().get(name)
    if kind is None:
        raise DamagedError(f"there is no {name!r} in this rota")
    try:
        return msgspec.convert(body, kind, dec_hook=_coexistence)
    except (msgspec.ValidationError, AssertionError) as error:
        raise DamagedError(f"no such {name}: {error}") from error


def _coexistence(kind: type, plain: Any) -> object:
    """The one value that is of several classes: told apart by what it has. What was worked out
    of it lies beside that, and is worked out anew."""
    if kind is coexistence.Coexistence and isinstance(plain, dict):
        for known in (coexistence.Groups, coexistence.Matrix, coexistence.Free):
            names = {field.name for field in fields(known)}
            if names <= plain.keys():
                return msgspec.convert({name: plain[name] for name in names}, known)
    raise NotImplementedError(kind)


def _row_to_plain(kind: type, parts: tuple[object, ...]) -> Plain:
    plain = [value_to_plain(part) for part in parts]
    if kind in _CONTAINERS:
        return {kind.__name__: plain}
    return {kind.__name__: dict(zip(_names(kind), plain, strict=True))}


def _row_from_plain(plain: Plain, row_count: int) -> Row:
    name, body = _only_item(plain)
    kind = _things().get(name)
    if kind is None:
        raise DamagedError(f"there is no {name!r} in this rota")
    if kind in _CONTAINERS:
        parts = _list(body)
        if kind is dict and len(parts) % 2:
            raise DamagedError("a key without a value")
    else:
        names = _names(kind)
        if not isinstance(body, dict) or set(body) != set(names):
            raise DamagedError(f"a {name} of another version of rota")
        parts = [body[name] for name in names]
    return kind, tuple(value_from_plain(part, row_count) for part in parts)


def _only_item(plain: Plain) -> tuple[str, Plain]:
    if not isinstance(plain, dict) or len(plain) != 1:
        raise DamagedError("not one name and what it names")
    return next(iter(plain.items()))


def _list(plain: Plain) -> list[Plain]:
    if not isinstance(plain, list):
        raise DamagedError("not a list")
    return plain


@cache
def _values() -> dict[str, type]:
    """The core's classes whose values never change, by name."""
    rooms = (types, events, effects, state, coexistence)
    return {kind.__name__: kind for room in rooms for kind in _classes(room) if _is_value(kind)}


@cache
def _tuples() -> dict[str, type[tuple[object, ...]]]:
    """Plain tuples and the core's named ones, by name; their parts may be rows."""
    kinds: list[type[tuple[object, ...]]] = [tuple]
    kinds += [kind for kind in _classes(state) if issubclass(kind, tuple)]
    return {kind.__name__: kind for kind in kinds}


@cache
def _things() -> dict[str, type]:
    """The classes of things that change, by name."""
    kinds: list[type] = [ledger.Ledger, scheduler.Scheduler, *_CONTAINERS]
    rooms = (state, orders, clearing, worth)
    kinds += [k for r in rooms for k in _classes(r) if is_dataclass(k) and not _is_value(k)]
    return {kind.__name__: kind for kind in kinds}


def _classes(room: ModuleType) -> Iterator[type]:
    for kind in vars(room).values():
        if isinstance(kind, type) and kind.__module__ == room.__name__:
            yield kind


def _is_value(kind: type) -> bool:
    """Whether things of this class never change."""
    is_frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return issubclass(kind, Enum) or is_frozen
