"""llama-swap's files as one tree of values, each with its place.

In the order of its own loader: (1) `${env.NAME}` is replaced in the text, before it is YAML;
(2) the text becomes values, scalars as yaml.v3 reads them, anchors and merge keys resolved;
(3) several files become one. A name that stands in comments alone is not asked for.

Names of models stay text however they look: `123:` makes the peer lose its whole catalog.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from rota.config import document as documents
from rota.config.complaints import Complaints, InvalidConfig, Place, Problem
from rota.config.llama_swap import scalars
from rota.config.llama_swap.scalars import Scalar

ENV = re.compile(r"\$\{env\.([a-zA-Z_][a-zA-Z0-9_]*)\}")

# Where each child is a thing of its own: one that is in two files is a mistake.
_DISTINCT = frozenset(
    {
        *("models", "groups", "profiles", "selectors", "peers", "matrix"),
        *("routing.router.settings.groups", "routing.router.settings.matrix"),
    }
)

_UNTAGGED = "tag:rota,untagged"  # plain, and stating no tag
_TEXT = scalars.YAML_TAG + "str"


@dataclass(slots=True)
class Value:
    """One value of the file.

    Args:
        key_place: where its key stands, if it has one.
    """

    data: Scalar | list[Value] | dict[str, Value]
    place: Place
    key_place: Place | None = None

    @property
    def at(self) -> Place:
        """Where to point a reader: at its key, if it has one."""
        return self.key_place or self.place


@dataclass(slots=True)
class Source:
    """What was read.

    Args:
        environment: the names of the variables whose values were filled in.
    """

    tree: dict[str, Value] = field(default_factory=dict)
    environment: set[str] = field(default_factory=set)


def read(files: Mapping[Path, bytes], environ: Mapping[str, str], complaints: Complaints) -> Source:
    """Read files into one tree; `complaints` are about the first of them unless they say else.

    Raises:
        InvalidConfig: a file is unreadable or not YAML.
    """
    source = Source()
    for path, data in files.items():
        text = documents.decode(path, data)
        tree = _Reading(path, environ, complaints, source.environment).tree(text)
        _Merging(complaints).mappings(source.tree, tree, "")
    complaints.raise_if_any()
    return source


def nodes_of(path: Path, data: bytes, environ: Mapping[str, str]) -> Node | None:
    """A file's nodes as they are, for a look at its keys.

    Raises:
        InvalidConfig: it is not YAML.
    """
    text = documents.decode(path, data)
    try:
        return documents.compose(path, text, _Untagged)
    except InvalidConfig:
        # `[${env.KEY}]` becomes YAML when it is filled in.
        filled = ENV.sub(lambda match: environ.get(match[1], "x"), text)
        if filled == text:
            raise
        return documents.compose(path, filled, _Untagged)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One file. `filled_in` gathers the variables that were asked for."""

    path: Path
    environ: Mapping[str, str]
    complaints: Complaints
    filled_in: set[str]

    def tree(self, text: str) -> dict[str, Value]:
        for name in sorted(self._names(text)):
            text = self._fill_in(text, name)
        self.complaints.raise_if_any()
        root = documents.compose(self.path, text, _Untagged)
        if root is None:
            return {}
        value = _Reader(self.complaints, self._file()).value(root)
        if value.data is None:
            return {}
        if not isinstance(value.data, dict):
            self.complaints.problem(value.place, "is not a mapping; it needs `models:`")
            return {}
        return value.data

    def _file(self) -> str:
        return "" if self.path == self.complaints.path else str(self.path)

    def _names(self, text: str) -> set[str]:
        """The variables that values ask for; those of comments too where it is no YAML yet."""
        try:
            root = documents.compose(self.path, text, _Untagged)
        except InvalidConfig:
            return set(ENV.findall(text))
        return {name for scalar in _texts(root) for name in ENV.findall(scalar)}

    def _fill_in(self, text: str, name: str) -> str:
        asked = f"${{env.{name}}}"
        value = self.environ.get(name)
        if value is None:
            self._problem(text, asked, f"the environment variable `{name}` is not set")
            return text
        if set(value) & set("\n\r\0"):
            self._problem(text, asked, f"the environment variable `{name}` is of several lines")
            return text
        self.filled_in.add(name)
        # So that it stands within double quotes; elsewhere the peer has these backslashes too.
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return text.replace(asked, escaped)

    def _problem(self, text: str, asked: str, said: str) -> None:
        start = text.find(asked)
        line = text.count("\n", 0, start) + 1
        column = start - text.rfind("\n", 0, start)
        self.complaints.problem(Place(line, column, self._file()), said)


def _texts(root: Node | None) -> Iterator[str]:
    """Every scalar's text, keys included; what aliases repeat only once."""
    left, seen = [root], set[int]()
    while left:
        node = left.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        match node:
            case MappingNode():
                left += [part for pair in node.value for part in pair]
            case SequenceNode():
                left += node.value
            case _:
                yield str(node.value)


# --- YAML ---


class _Untagged(VersionedResolver):
    """Tells scalars that state no tag from those that do; what the former are is ours to say."""

    def resolve(self, kind: object, value: object, implicit: tuple[bool, bool]) -> Tag:
        if kind is ScalarNode and implicit[0]:
            return Tag(suffix=_UNTAGGED)
        tag: Tag = super().resolve(kind, value, implicit)
        return tag


class _Reader:
    """Nodes to values; an anchor's content is read anew wherever it is used."""

    def __init__(self, complaints: Complaints, file: str) -> None:
        self.complaints = complaints
        self.file = file
        self.nodes_seen = 0
        self.open: list[Node] = []

    def value(self, node: Node) -> Value:
        place = replace(documents.place_of(node), file=self.file)
        self.nodes_seen += 1
        if self.nodes_seen > documents.NODES_MAX:
            raise InvalidConfig(
                self.complaints.path, [Problem(place, "repeats its aliases into too many values")]
            )
        if any(node is outer for outer in self.open):
            self.complaints.problem(place, "an alias that contains itself")
            return Value(None, place)
        self.open.append(node)
        try:
            match node:
                case MappingNode():
                    return Value(self._mapping(node), place)
                case SequenceNode():
                    return Value([self.value(item) for item in node.value], place)
                case _:
                    assert isinstance(node, ScalarNode), node
                    return Value(self._scalar(node, place), place)
        finally:
            self.open.pop()

    def _mapping(self, node: MappingNode) -> dict[str, Value]:
        """What stands there, and behind it what merge keys bring."""
        own: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        for key_node, value_node in node.value:
            place = replace(documents.place_of(key_node), file=self.file)
            if not isinstance(key_node, ScalarNode):
                self.complaints.problem(place, "a key must be text")
                continue
            if key_node.value == "<<" and key_node.tag in {_UNTAGGED, f"{scalars.YAML_TAG}merge"}:
                self._merge(value_node, merged, place)
                continue
            key = str(key_node.value)
            if key in own:
                line = own[key].at.line
                self.complaints.problem(
                    place, f"`{key}` is there twice; the first is in line {line}"
                )
                continue
            own[key] = replace(self.value(value_node), key_place=place)
        return own | {key: value for key, value in merged.items() if key not in own}

    def _merge(self, node: Node, merged: dict[str, Value], place: Place) -> None:
        """Bring in a mapping, or several, of which an earlier one counts before a later."""
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        for one in nodes:
            if not isinstance(one, MappingNode):
                self.complaints.problem(place, "`<<` takes a mapping, or a list of mappings")
                continue
            brought = self.value(one).data
            if isinstance(brought, dict):
                for key, value in brought.items():
                    merged.setdefault(key, value)

    def _scalar(self, node: ScalarNode, place: Place) -> Scalar:
        text = str(node.value)
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            self.complaints.problem(place, "text with a character that no command can be given")
            return ""
        if node.tag == _UNTAGGED:
            return scalars.resolve(text)
        kind = str(node.tag).removeprefix(scalars.YAML_TAG)
        if kind == str(node.tag):  # a tag that somebody made up says nothing
            return scalars.resolve(text) if node.style is None else text
        try:
            return scalars.resolve_tagged(text, kind)
        except ValueError as error:
            self.complaints.problem(place, str(error))
            return text


# --- several files ---


@dataclass(frozen=True, slots=True)
class _Merging:
    complaints: Complaints

    def mappings(self, into: dict[str, Value], new: dict[str, Value], path: str) -> None:
        for key, value in new.items():
            if key not in into:
                into[key] = value
            elif f"{path}{key}" in _DISTINCT:
                self._distinct(into, value, key)
            else:
                self._values(into, value, key, f"{path}{key}")

    def _distinct(self, into: dict[str, Value], new: Value, key: str) -> None:
        old = into[key]
        if isinstance(old.data, dict) and isinstance(new.data, dict):
            for name, value in new.data.items():
                first = old.data.setdefault(name, value)
                if first is not value:
                    said = f"`{name}` of `{key}` is already in {self._of(first)}"
                    self.complaints.problem(value.at, said)
        else:
            self._values(into, new, key, key)

    def _values(self, into: dict[str, Value], new: Value, key: str, path: str) -> None:
        old = into[key]
        match old.data, new.data:
            case None, _:
                into[key] = new
            case _, None:
                pass
            case dict(), dict():
                self.mappings(old.data, new.data, f"{path}.")
            case list(), list():
                old.data.extend(new.data)
            case (dict() | list(), _) | (_, dict() | list()):
                said = f"`{path}` is of another kind than in {self._of(old)}"
                self.complaints.problem(new.at, said)
            case _ if old.data != new.data or type(old.data) is not type(new.data):
                self.complaints.problem(new.at, f"`{path}` is something else in {self._of(old)}")

    def _of(self, value: Value) -> str:
        return value.at.of(self.complaints.path)
