"""`${name}` filled in as llama-swap fills it in: order, types and ports.

Its order: the macros declared last first, a model's own after the global ones (one of the same
name takes the global's place in line), then `${MODEL_ID}`, then `${PORT}`. So a macro may hold
those declared before it, and no others. A text that is one placeholder and nothing else becomes
the macro's value with its type; within more text the value is printed. Keys are left alone, but
for those of `filters.setParamsByID`.

`${PORT}` stays in commands and variables, for rota chooses a port at each start. Elsewhere, and
where the model is asked at a fixed port, it becomes the number that llama-swap would have given:
`startPort` and on, for models whose command has `${PORT}`, by the bytes of their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rota.config.complaints import Complaints, Place
from rota.config.llama_swap import scalars
from rota.config.llama_swap.command import drop_comments
from rota.config.llama_swap.scalars import Moment, Scalar
from rota.config.llama_swap.source import Value

DEFAULT_PROXY = "http://localhost:${PORT}"
START_PORT = 5800
TEXT_BYTES_MAX = 1024 * 1024

PLACEHOLDER = re.compile(r"\$\{([a-zA-Z0-9_-]+)\}")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_RESERVED = frozenset({"PID", "PORT", "MODEL_ID"})

Macros = dict[str, Scalar]  # in the order of their declaration


def expand(tree: dict[str, Value], known: frozenset[str], complaints: Complaints) -> None:
    """Fill in every macro of the tree, in place; `macros` and every port are gone after it.

    Args:
        known: the keys at the top within which a placeholder that is left is a mistake.
    """
    models = _mappings_of(tree.get("models"))
    shared = _declared(tree.pop("macros", None), complaints)
    own = {name: _declared(fields.pop("macros", None), complaints) for name, fields in models}
    complaints.raise_if_any()
    expanding = _Expanding(complaints)
    for key, value in tree.items():
        if key != "models":
            expanding.fill_in(value, shared)
    next_port = _start_port(tree)
    for name, fields in sorted(models, key=lambda pair: pair[0].encode()):
        expanding.model(name, fields, {"MODEL_ID": name} | shared | own[name])
        next_port += _settle_port(name, fields, next_port, expanding)
    for key, value in tree.items():
        if key in known:
            _complain_of_leftovers(value, key == "models", complaints)
    complaints.raise_if_any()


def _mappings_of(value: Value | None) -> list[tuple[str, dict[str, Value]]]:
    """The entries of a mapping that are mappings themselves."""
    entries = _entries_of(value).items()
    return [(name, entry.data) for name, entry in entries if isinstance(entry.data, dict)]


def _declared(value: Value | None, complaints: Complaints) -> Macros:
    if value is None or value.data is None:
        return {}
    if not isinstance(value.data, dict):
        complaints.problem(value.at, "`macros` must be a mapping")
        return {}
    macros: Macros = {}
    for name, entry in value.data.items():
        problem = _problem_of(name, entry)
        if problem is not None:
            complaints.problem(entry.at, f"the macro `{name[:80]}` {problem}")
        elif not isinstance(entry.data, dict | list):
            macros[name] = entry.data
    return macros


def _problem_of(name: str, entry: Value) -> str | None:
    if len(name.encode()) >= 64:
        return "has a name of more than 63 characters"
    if not _NAME.fullmatch(name):
        return "has a name of other signs than letters, digits, `_` and `-`"
    if name in _RESERVED:
        return "has a name that is taken: it is filled in by itself"
    match entry.data:
        case Moment() | None | dict() | list():
            return "is neither text, a number nor a truth"
        case str() as text if f"${{{name}}}" in text:
            return "contains itself"
        case _:
            return None


@dataclass(frozen=True, slots=True)
class _Expanding:
    complaints: Complaints

    def model(self, name: str, fields: dict[str, Value], macros: Macros) -> None:
        for key in ("cmd", "cmdStop"):
            value = fields.get(key)
            if value is not None and isinstance(value.data, str):
                value.data = drop_comments(value.data)
        proxy = fields.get("proxy")
        if proxy is None or proxy.data is None:
            fields["proxy"] = Value(DEFAULT_PROXY, proxy.place if proxy else Place())
        for value in fields.values():
            self.fill_in(value, macros)
        self.keys(fields, macros)

    def fill_in(self, value: Value, macros: Macros) -> None:
        match value.data:
            case dict() as entries:
                for entry in entries.values():
                    self.fill_in(entry, macros)
            case list() as items:
                for item in items:
                    self.fill_in(item, macros)
            case str():
                self._text(value, macros)

    def _text(self, value: Value, macros: Macros) -> None:
        for name in reversed(macros):
            if not isinstance(value.data, str):
                return
            slug = f"${{{name}}}"
            if value.data == slug:
                value.data = macros[name]
            elif slug in value.data:
                value.data = value.data.replace(slug, scalars.show(macros[name]))
                if len(value.data) > TEXT_BYTES_MAX:
                    self.complaints.problem(value.at, "its macros make more than 1 MiB of it")
                    value.data = "${PORT}"  # nothing more to complain of

    def keys(self, fields: dict[str, Value], macros: Macros) -> None:
        """The keys of `filters.setParamsByID`, which are names of models."""
        filters = fields.get("filters")
        by_id = _entries_of(filters).get("setParamsByID")
        if by_id is None or not isinstance(by_id.data, dict):
            return
        filled: dict[str, Value] = {}
        for key, entry in by_id.data.items():
            name = key
            for macro in reversed(macros):
                name = name.replace(f"${{{macro}}}", scalars.show(macros[macro]))
            if name in filled:
                self.complaints.problem(entry.at, f"two keys of `setParamsByID` become `{name}`")
            filled[name] = entry
        by_id.data = filled


def _entries_of(value: Value | None) -> dict[str, Value]:
    return value.data if value is not None and isinstance(value.data, dict) else {}


def _start_port(tree: dict[str, Value]) -> int:
    """`startPort`; what it may be is checked with the other settings."""
    value = tree.get("startPort")
    return value.data if value is not None and isinstance(value.data, int) else START_PORT


def _settle_port(name: str, fields: dict[str, Value], port: int, expanding: _Expanding) -> int:
    """Fill in the port where rota does not; 1 if the model took one, else 0."""
    cmd, proxy = (_text_of(fields.get(key)) for key in ("cmd", "proxy"))
    is_told = "${PORT}" in cmd
    if not is_told:
        if "${PORT}" in proxy:
            place = fields["proxy"].at if fields["proxy"].place.line else _first(fields)
            said = f"`{name}` is asked at `${{PORT}}`, which its command is not told; "
            said += "write `${PORT}` in `cmd`, or a fixed port in `proxy`"
            if not cmd.strip():
                said = f"`{name}` has no `cmd`: nothing to run"
            expanding.complaints.problem(place, said)
            fields["proxy"].data = ""
        return 0
    kept = {"cmd", "cmdStop", "env", "proxy"} if "${PORT}" in proxy else set[str]()
    number: Macros = {"PORT": port}
    for key, value in fields.items():
        if key not in kept:
            expanding.fill_in(value, number)
    expanding.keys(fields, number)
    return 1


def _first(fields: dict[str, Value]) -> Place:
    return min((value.at for value in fields.values() if value.at.line), default=Place())


def _text_of(value: Value | None) -> str:
    return value.data if value is not None and isinstance(value.data, str) else ""


def _complain_of_leftovers(value: Value, is_models: bool, complaints: Complaints) -> None:
    if not is_models:
        for text in _strings(value):
            _complain(text, frozenset(), complaints)
        return
    for _, fields in _mappings_of(value):
        is_told = "${PORT}" in _text_of(fields.get("cmd"))
        for key, entry in fields.items():
            allowed = {"PORT"} if is_told and key in {"cmd", "cmdStop", "env", "proxy"} else set()
            allowed |= {"PID"} if key == "cmdStop" else set()
            for text in _strings(entry):
                _complain(text, frozenset(allowed), complaints)


def _complain(text: Value, allowed: frozenset[str], complaints: Complaints) -> None:
    for name in dict.fromkeys(PLACEHOLDER.findall(str(text.data))):
        if name not in allowed:
            complaints.problem(text.at, f"nothing is called `${{{name}}}`")


def _strings(value: Value) -> Iterator[Value]:
    match value.data:
        case dict() as entries:
            for key, entry in entries.items():
                if key == "setParamsByID" and isinstance(entry.data, dict):
                    yield from (Value(name, by_id.at) for name, by_id in entry.data.items())
                yield from _strings(entry)
        case list() as items:
            for item in items:
                yield from _strings(item)
        case str():
            yield value
