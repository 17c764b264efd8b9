"""One mapping of the file, read key by key as the type that llama-swap gives each.

Its decoder is lenient where it can be: a number is text where text is wanted, 1.5 is 1 where a
whole number is wanted, `yes` is true where a truth is wanted, and a key without a value says
nothing. The rest is complained about. Unknown keys it does not even see; here they are told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rota.config.complaints import Complaints, Place
from rota.config.llama_swap import scalars
from rota.config.llama_swap.source import Value


@dataclass(frozen=True, slots=True)
class Item:
    """A text of a list, with its place."""

    text: str
    place: Place


@dataclass(slots=True)
class Fields:
    """A mapping; `seen` are the keys that somebody asked for."""

    entries: dict[str, Value]
    place: Place
    complaints: Complaints
    seen: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """Whether the key is there with a value."""
        return self._value(key) is not None

    def at(self, key: str) -> Place:
        """Where a key stands; the mapping's place if it is not there."""
        value = self.entries.get(key)
        return self.place if value is None or not value.at.line else value.at

    def unknown(self) -> Iterator[tuple[str, Value]]:
        """The keys that nobody asked for."""
        return ((key, value) for key, value in self.entries.items() if key not in self.seen)

    def text(self, key: str, default: str = "") -> str:
        value = self._value(key)
        if value is None:
            return default
        if isinstance(value.data, dict | list):
            self.problem(key, f"{_say(value)}; text is wanted")
            return default
        return scalars.show(value.data)

    def whole(self, key: str, default: int = 0) -> int:
        value = self._value(key)
        return default if value is None else self._whole(value, key, default)

    def number(self, key: str) -> float:
        """A number with or without a fraction; 0 where it is not stated."""
        value = self._value(key)
        if value is None:
            return 0.0
        if isinstance(value.data, int | float) and not isinstance(value.data, bool):
            return float(value.data)
        self.problem(key, f"{_say(value)}; a number is wanted")
        return 0.0

    def truth(self, key: str, *, default: bool = False) -> bool:
        value = self._value(key)
        if value is None:
            return default
        truth = None if isinstance(value.data, dict | list) else scalars.truth(value.data)
        if truth is None:
            self.problem(key, f"{_say(value)}; true or false is wanted")
        return bool(truth)

    def texts(self, key: str) -> list[Item]:
        value = self._value(key)
        if value is None:
            return []
        if not isinstance(value.data, list):
            self.problem(key, "is no list")  # and is not repeated: it may be a key
            return []
        items = []
        for index, item in enumerate(value.data):
            if isinstance(item.data, dict | list):
                said = f"item {index + 1} of `{key}` {_say(item)}; text is wanted"
                self.complaints.problem(item.place, said)
            else:
                items.append(Item("" if item.data is None else scalars.show(item.data), item.place))
        return items

    def wholes(self, key: str) -> dict[str, int]:
        """A mapping of names to whole numbers."""
        return {
            name: self._whole(value, name, 0)
            for name, value in self.entries_of(key).items()
            if value.data is not None
        }

    def texts_by_name(self, key: str) -> dict[str, Item]:
        """A mapping of names to texts."""
        found = self.under(key)
        return {name: Item(found.text(name), found.at(name)) for name in found.entries}

    def entries_of(self, key: str) -> dict[str, Value]:
        """The entries of a mapping; none where it is not there, or is none."""
        value = self._value(key)
        if value is None:
            return {}
        if not isinstance(value.data, dict):
            self.problem(key, f"{_say(value)}; a mapping is wanted")
            return {}
        return value.data

    def under(self, key: str) -> Fields:
        """The mapping under a key; an empty one where it is not there."""
        return Fields(self.entries_of(key), self.at(key), self.complaints)

    def each_of(self, key: str) -> Iterator[tuple[str, Fields]]:
        """The named entries under a key that are mappings; one without a value is empty."""
        named = self.under(key)
        for name, value in named.entries.items():
            fields = named.under(name)
            if value.data is None or isinstance(value.data, dict):
                yield name, fields

    def problem(self, key: str, text: str) -> None:
        self.complaints.problem(self.at(key), f"`{key}` {text}")

    def _whole(self, value: Value, key: str, default: int) -> int:
        match value.data:
            case bool() | str() | None | dict() | list():
                said = f"`{key}` {_say(value)}; a whole number is wanted"
                self.complaints.problem(value.at, said)
                return default
            case float() as number if not abs(number) < 2**63:
                self.complaints.problem(value.at, f"`{key}` {_say(value)}; that is no number here")
                return default
            case number:
                return int(number)

    def _value(self, key: str) -> Value | None:
        self.seen.add(key)
        value = self.entries.get(key)
        return None if value is None or value.data is None else value


def _say(value: Value) -> str:
    match value.data:
        case dict():
            return "is a mapping"
        case list():
            return "is a list"
        case str() as text:
            return f"is the text `{text[:40]}`"
        case data:
            return f"is `{scalars.show(data)}`"
