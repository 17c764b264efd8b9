"""What changes from one configuration to another, key by key, and when each change counts.

Values are compared, not text: a comment, an order or a default written out is no change, and a
new size of a model's file is one. Keys are named and values are not: a command or a variable may
hold a secret. Refused: a list of pairs kept by hand. Each field of the values is compared, under
the key that it comes from, so a key that is added later cannot be forgotten here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from rota.config.values import CommandEngine, Config, EngineConfig, ModelConfig, UrlEngine
from rota.core.coexistence import Groups, Matrix


class When(Enum):
    """From when on a change counts."""

    NOW = "now"
    NEXT_START = "next_start"  # a replica that runs stays as it was started
    RESTART = "restart"  # rota itself has to be started again


@dataclass(frozen=True, slots=True)
class Changed:
    """Keys that say something else than before, by when that counts.

    Args:
        now, next_start, restart: see `When`.
    """

    now: tuple[str, ...] = ()
    next_start: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.now or self.next_start or self.restart)


@dataclass(frozen=True, slots=True)
class Diff:
    """One configuration seen from another.

    Args:
        added, removed, unchanged: names of models.
        changed: by the name of a model, its keys.
        top: the same of the keys at the top of the file.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: Mapping[str, Changed] = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()
    top: Changed = Changed()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.top)


def compare(old: Config, new: Config) -> Diff:
    """What is different in `new`."""
    changed = {
        name: _of_model(old.models[name], entry)
        for name, entry in new.models.items()
        if name in old.models
    }
    return Diff(
        added=tuple(name for name in new.models if name not in old.models),
        removed=tuple(name for name in old.models if name not in new.models),
        changed={name: keys for name, keys in changed.items() if keys},
        unchanged=tuple(name for name, keys in changed.items() if not keys),
        top=_gathered(
            [*_differences(old, new, _TOP, _when_of_top), *_of_rules(old, new)],
        ),
    )


# ── the fields of the values ─────────────────────────────────────────────────────────────────

_TOP = {
    "host": "listen",
    "port": "listen",
    "state_dir": "state",
    "lease_ttl_ms_max": "lease_ttl_max",
    "hold_ms_max": "hold_max",
    "models": None,
    "coexistence": None,
    "allow_open": None,
    "path": None,
    "dialect": None,
    "warnings": None,
}
_OF_ENTRY = {
    "model": None,
    "engine": None,
    "line": None,
    "start_timeout_ms_max": "start_timeout_max",
}
_OF_MODEL = {
    "name": None,
    "load_ms": None,
    "slots": "concurrency",
    "rejects_when_full": "when_full",
    "is_pinned": "pinned",
    "is_exclusive_while_busy": "exclusive_while_busy",
    "scale_up_after_ms": "scaling",
}
_OF_ENGINE = {"argv": "cmd", "stop_argv": "cmd_stop"}
"""The key that each field comes from where its name does not say so; None = from none."""

_RESTART = frozenset({"host", "port", "state_dir", "devices"})
_NEXT_START = frozenset(
    {
        *{"memory_mib", "device_count", "devices", "slots", "stop_grace_ms"},
        "is_exclusive_while_busy",
        *{"start_timeout_ms", "start_timeout_ms_max", "silent_after_ms"},
    }
)
_RULES = {Groups: "groups", Matrix: "matrix"}
_KINDS = {CommandEngine: "cmd", UrlEngine: "url"}

_Found = tuple[str, When]


def key_of(name: str, table: Mapping[str, str | None]) -> str | None:
    """The key that a field comes from; None = from none."""
    if name in table:
        return table[name]
    return name.removesuffix("_ms").removesuffix("_mib")


def _when_of_top(name: str) -> When:
    return When.RESTART if name in _RESTART else When.NOW


def _when_of_model(name: str) -> When:
    return When.NEXT_START if name in _NEXT_START else When.NOW


def _of_model(old: ModelConfig, new: ModelConfig) -> Changed:
    return _gathered(
        [
            *_of_engine(old.engine, new.engine),
            *_differences(old.model, new.model, _OF_MODEL, _when_of_model),
            *_differences(old, new, _OF_ENTRY, _when_of_model),
        ]
    )


def _of_engine(old: EngineConfig, new: EngineConfig) -> Iterator[_Found]:
    """A server that someone else runs is only pointed at, so another URL counts at once."""
    if type(old) is not type(new):
        for engine in (old, new):
            yield _KINDS.get(type(engine), "model"), When.NEXT_START
    elif isinstance(new, UrlEngine):
        yield from _differences(old, new, {}, lambda _: When.NOW)
    else:
        yield from _differences(old, new, _OF_ENGINE, lambda _: When.NEXT_START)


def _of_rules(old: Config, new: Config) -> Iterator[_Found]:
    if old.coexistence != new.coexistence:
        for rules in (old.coexistence, new.coexistence):
            if type(rules) in _RULES:
                yield _RULES[type(rules)], When.NOW


def _differences(
    old: Any, new: Any, table: Mapping[str, str | None], when: Callable[[str], When]
) -> Iterator[_Found]:
    for name in (part.name for part in fields(new)):
        key = key_of(name, table)
        if key is not None and getattr(old, name) != getattr(new, name):
            yield key, when(name)


def _gathered(found: Iterator[_Found] | list[_Found]) -> Changed:
    keys: dict[When, dict[str, None]] = {when: {} for when in When}
    for key, when in found:
        keys[when][key] = None
    return Changed(**{when.value: tuple(names) for when, names in keys.items()})
