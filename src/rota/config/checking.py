"""The file against the schema: every complaint of pydantic's, in our words, at its place.

Entries under `models:`, `devices:`, `keys:` and `groups:` are checked one by one, so that a
mistake in one leaves the others to be looked at further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from rota.config import schema
from rota.config.complaints import Complaints, Place, did_you_mean
from rota.config.document import Document, Route, Tree

K = TypeVar("K", bound=schema.Keys)

# Keys that others are judged by: with one of them wrong, complaints about the rest would mislead.
_DECISIVE = frozenset({"cmd", "model", "url", "engine", "port", "server"})

_SECTIONS: tuple[tuple[str, type[schema.Keys]], ...] = (
    ("models", schema.ModelKeys),
    ("devices", schema.DeviceKeys),
    ("keys", schema.ClientKeys),
    ("groups", schema.GroupKeys),
)


def check_file(document: Document, complaints: Complaints) -> schema.FileKeys:
    """The file's keys; what is wrong is complained about and left out."""
    tree = document.tree
    assert isinstance(tree, dict), tree
    if "models" not in tree:
        complaints.problem(Place(), "`models` is missing; nothing is served")
    elif tree["models"] == {}:
        complaints.problem(document.key_place("models"), "`models` is empty; nothing is served")
    if tree.get("keys") == {}:
        complaints.problem(document.key_place("keys"), "`keys` is empty; add one, or remove it")
    sound: dict[str, object] = dict(tree)
    for section, kind in _SECTIONS:
        entries = tree.get(section)
        if isinstance(entries, dict):
            sound[section] = dict(_check_entries(document, complaints, section, entries, kind))
    keys = _check(document, complaints, schema.FileKeys, sound, ())
    assert keys is not None, "a file needs no key for its other keys to be looked at"
    return keys


def _check_entries(
    document: Document,
    complaints: Complaints,
    section: str,
    entries: Mapping[str, Tree],
    kind: type[K],
) -> Iterator[tuple[str, K]]:
    for name, entry in entries.items():
        # A name without anything below it is an entry that states nothing.
        tree = {} if entry is None else entry
        checked = _check(document, complaints, kind, tree, (section, name))
        if checked is not None:
            yield name, checked


def _check(
    document: Document, complaints: Complaints, kind: type[K], tree: object, route: Route
) -> K | None:
    """The keys, without those that are wrong, which are complained about; None when the rest
    says too little for a second look."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    for detail in details:
        _complain(document, complaints, kind, (*route, *detail["loc"]), detail)
    wrong = {detail["loc"][0] for detail in details if detail["loc"]}
    if not isinstance(tree, dict) or not wrong or wrong & _DECISIVE:
        return None
    try:
        return kind.model_validate({name: tree[name] for name in tree if name not in wrong})
    except ValidationError:
        return None


def _complain(
    document: Document,
    complaints: Complaints,
    kind: type[schema.Keys],
    route: Route,
    detail: Mapping[str, Any],
) -> None:
    """One complaint of pydantic's in our words, at its place in the file."""
    name = str(route[-1]) if route else ""
    match detail["type"]:
        case "extra_forbidden":
            place, text = document.key_place(*route), _say_unknown(kind, route, name)
        case "missing":
            place, text = document.key_place(*route[:-1]), f"`{name}` is missing"
        case "model_type" | "model_attributes_type":
            place, text = document.value_place(*route), f"{_label(route)} must be a mapping"
        case _:
            place, text = document.value_place(*route), f"{_label(route)} {detail['msg']}"
    complaints.problem(place, text)


def _label(route: Route) -> str:
    last = route[-1]
    return f"item {last + 1} of `{route[-2]}`" if isinstance(last, int) else f"`{last}`"


def _say_unknown(kind: type[schema.Keys], route: Route, name: str) -> str:
    if name in schema.NOT_BUILT:
        return f"`{name}` is not built yet; remove it"
    if name in schema.SYNONYMS:
        return f"unknown key `{name}`; here it is `{schema.SYNONYMS[name]}`"
    known = _keys_at(kind, route[:-1])
    home = _home_of(name, known)
    if home is not None:
        return f"unknown key `{name}`; it belongs {home}"
    return f"unknown key `{name}`{did_you_mean(name, known.model_fields)}"


def _keys_at(kind: type[schema.Keys], route: Route) -> type[schema.Keys]:
    """The mapping of the schema that stands at a route below an entry of `kind`."""
    match route:
        case ("defaults", "scaling") | (_, _, "scaling"):
            return schema.ScalingKeys
        case (_, _, "jobs"):
            return schema.JobsKeys
        case ("matrix",):
            return schema.MatrixKeys
        case ("defaults",):
            return schema.SharedKeys
        case _:
            return kind


def _home_of(name: str, wrong: type[schema.Keys]) -> str | None:
    homes: tuple[tuple[str, type[schema.Keys]], ...] = (
        ("under `scaling`", schema.ScalingKeys),
        ("under `jobs`", schema.JobsKeys),
        ("under `models: NAME`", schema.ModelKeys),
        ("under `devices: NAME`", schema.DeviceKeys),
        ("under `keys: NAME`", schema.ClientKeys),
        ("under `groups: NAME`", schema.GroupKeys),
        ("under `matrix`", schema.MatrixKeys),
    )
    for home, kind in homes:
        if name in kind.model_fields and kind is not wrong:
            return home
    return "at the top of the file" if name in schema.FileKeys.model_fields else None
