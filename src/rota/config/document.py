"""YAML text to plain data in which every scalar is still text, and everything has a place.

YAML has opinions on what `on`, `012`, `1e3` or `123:` are, and they changed between versions.
Here none of them counts: the library gives the tree of nodes, scalars stay as they were
written, and the schema says what each of them is. So a model may be called `123` or `off`, and
an `env` value `1.10` stays `1.10`. The alternative, the library's own constructor, loses the
places of duplicate keys as well.

What is refused here: duplicate keys, keys that are not text, tags, merge keys, aliases that
contain themselves, and files so large or so nested that they cannot be meant.
"""

from __future__ import annotations

import stat
import warnings
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver

from rota.config.complaints import Complaints, InvalidConfig, Place, Problem

Tree = str | None | list["Tree"] | dict[str, "Tree"]
Route = tuple[str | int, ...]  # keys and indices from the top: ("models", "a", "aliases", 0)

# Far above any real catalog; far below what would hang a checker.
FILE_BYTES_MAX = 4 * 1024 * 1024
NODES_MAX = 200_000

_YAML = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_YAML + kind for kind in ("str", "int", "float", "bool", "null", "timestamp")}


@dataclass(slots=True)
class Document:
    """A file as plain data.

    Args:
        tree: mappings, lists, text, and None for a key without a value.
    """

    path: Path
    tree: Tree = None
    keys: dict[Route, Place] = field(default_factory=dict)
    values: dict[Route, Place] = field(default_factory=dict)

    def key_place(self, *route: str | int) -> Place:
        """Where a key stands; that of the nearest thing above it, if it is not there."""
        return self._nearest(self.keys, route)

    def value_place(self, *route: str | int) -> Place:
        """Where a value stands; that of the nearest thing above it, if it is not there."""
        return self._nearest(self.values, route)

    def _nearest(self, places: dict[Route, Place], route: Route) -> Place:
        if route in places:
            return places[route]
        if not route:
            return Place()
        return self._nearest(self.keys, route[:-1])


def read(path: Path, complaints: Complaints, data: bytes) -> Document:
    """Read what a file holds.

    Raises:
        InvalidConfig: there is no tree to look at: unreadable, not text, not YAML, not a
            mapping. Lesser problems go to `complaints`.
    """
    root = compose(path, decode(path, data))
    document = Document(path)
    if root is None:
        raise InvalidConfig(path, [Problem(Place(), "is empty; it needs `models:` at least")])
    if not isinstance(root, MappingNode):
        raise InvalidConfig(path, [Problem(place_of(root), "is not a mapping; it needs `models:`")])
    _Converter(document, complaints).convert(root, ())
    return document


def read_bytes(path: Path) -> bytes:
    """What a file holds.

    Raises:
        InvalidConfig: it cannot be read, or is none.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise InvalidConfig(path, [Problem(Place(), f"is {kind}; a YAML file is wanted")])
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = f"cannot be read: {reason.lower()}"
        raise InvalidConfig(path, [Problem(Place(), text)]) from error


def decode(path: Path, data: bytes) -> str:
    """A file's text. Raises InvalidConfig: it is too large, or not UTF-8."""
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfig(path, [Problem(Place(), "is over 4 MiB: not a configuration")])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        problem = Problem(Place(line, column), "is not UTF-8 text")
        raise InvalidConfig(path, [problem]) from error


def compose(path: Path, text: str, resolver: type[VersionedResolver] | None = None) -> Node | None:
    """The tree of a text's nodes; None where it holds nothing.

    Args:
        path: for complaints.
        resolver: what says which tag a scalar has that states none.

    Raises:
        InvalidConfig: it is not YAML.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = resolver or yaml.Resolver
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor defined twice is legal
            root: Node | None = yaml.compose(StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else Place()
        raise InvalidConfig(path, [Problem(place, _say_yaml(error, text, place))]) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        problem = Problem(Place(line, column), "a control character; YAML is text")
        raise InvalidConfig(path, [problem]) from error
    except RecursionError as error:
        raise InvalidConfig(path, [Problem(Place(), "is nested too deeply")]) from error
    except Exception as error:  # odd text makes the parser raise what it likes
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(path, [Problem(Place(), f"is not YAML: {reason}")]) from error
    return root


def _say_yaml(error: MarkedYAMLError, text: str, place: Place) -> str:
    """The parser's complaint, and for the usual slips what to do about it."""
    said = " ".join((error.problem or error.context or "it cannot be parsed").split())
    lines = text.splitlines()
    here = lines[place.line - 1][place.column - 1 :] if 0 < place.line <= len(lines) else ""
    if here.startswith("\t"):
        return "a tab; YAML is indented with spaces"
    if said.startswith("mapping values"):
        return "not YAML: a second `:` in one line; quote the text if it has one"
    if here.startswith("{") and lines[place.line - 1][: place.column - 1].endswith("$"):
        return "not YAML: within `{…}` a text with `${…}` needs quotes"
    if here[:1] in {"@", "`", "%"}:
        return f"not YAML: text cannot start with `{here[0]}`; quote it"
    return f"not YAML: {said}"


class _Converter:
    """Nodes to plain data. Its own state is what bounds the walk."""

    def __init__(self, document: Document, complaints: Complaints) -> None:
        self.document = document
        self.complaints = complaints
        self.nodes_seen = 0
        self.open: list[Node] = []  # the nodes around the present one

    def convert(self, root: Node, route: Route) -> None:
        self.document.tree = self._any(root, route)

    def _any(self, node: Node, route: Route) -> Tree:
        self.nodes_seen += 1
        place = place_of(node)
        self.document.values[route] = place
        if self.nodes_seen > NODES_MAX:
            raise InvalidConfig(
                self.complaints.path, [Problem(place, "repeats its aliases into too many values")]
            )
        if any(node is outer for outer in self.open):
            self.complaints.problem(place, "an alias that contains itself")
            return None
        self.open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, route)
            if isinstance(node, SequenceNode):
                return [self._any(item, (*route, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, ScalarNode), node
            return self._scalar(node)
        finally:
            self.open.pop()

    def _mapping(self, node: MappingNode, route: Route) -> dict[str, Tree]:
        tree: dict[str, Tree] = {}
        for key_node, value_node in node.value:
            place = place_of(key_node)
            key = self._key(key_node)
            if key is None:
                continue
            if key in tree:
                first = self.document.keys[*route, key]
                self.complaints.problem(
                    place, f"`{key}` is there twice; the first is in line {first.line}"
                )
                continue
            self.document.keys[*route, key] = place
            tree[key] = self._any(value_node, (*route, key))
        return tree

    def _key(self, node: Node) -> str | None:
        place = place_of(node)
        if not isinstance(node, ScalarNode):
            self.complaints.problem(place, "a key must be text")
            return None
        if node.tag == _YAML + "merge":
            self.complaints.problem(
                place, "merge keys (`<<`) are not read; put what models share under `defaults:`"
            )
            return None
        return self._text(node)

    def _scalar(self, node: ScalarNode) -> str | None:
        text = self._text(node)
        is_plain = node.style is None
        return None if is_plain and text in {"", "~", "null", "Null", "NULL"} else text

    def _text(self, node: Node) -> str:
        place = place_of(node)
        text = str(node.value)
        if node.tag not in _PLAIN_TAGS:
            self.complaints.problem(place, f"tags are not read; remove `{node.tag}`")
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            self.complaints.problem(place, "text with a character that no command can be given")
            return ""
        return text


def place_of(node: Node) -> Place:
    """Where a node starts."""
    mark = node.start_mark
    return Place(mark.line + 1, mark.column + 1)
