"""Whose file it is: ours, or llama-swap's.

By the keys that only one of the two has. A file that has neither's, in which every entry is a
command and nobody says anything of scaling, is llama-swap's too: as ours, everything in it would
be off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from rota.config import schema
from rota.config.complaints import InvalidConfig
from rota.config.llama_swap.notes import LOST_OF_A_MODEL
from rota.config.llama_swap.settings import TOP_KEYS
from rota.config.llama_swap.source import nodes_of

_OF_A_MODEL = frozenset(
    {
        *LOST_OF_A_MODEL,
        *("cmdStop", "proxy", "checkEndpoint", "ttl", "unloadTimeout", "useModelName"),
        *("concurrencyLimit", "filters", "macros", "compat", "estVramGB", "healthCheckTimeout"),
    }
)
_SHARED_TOP = frozenset({"models", "macros", "groups", "matrix"})
_SHARED_OF_A_MODEL = frozenset({"cmd", "aliases", "env"})


def is_llama_swap(path: Path, data: bytes, environ: Mapping[str, str]) -> bool:
    """Whether a file is to be read as llama-swap's. One that is no YAML is ours to complain of."""
    try:
        root = nodes_of(path, data, environ)
    except InvalidConfig:
        return False
    if not isinstance(root, MappingNode):
        return False
    top = dict(_entries(root))
    models = [dict(_entries(entry)) for _, entry in _entries(top.get("models"))]
    if not models and not top.keys() & (TOP_KEYS - _SHARED_TOP):
        return False
    is_ours = bool(top.keys() & (schema.FileKeys.model_fields.keys() - _SHARED_TOP)) or any(
        keys.keys() & (schema.ModelKeys.model_fields.keys() - _SHARED_OF_A_MODEL)
        or isinstance(keys.get("env"), MappingNode)
        for keys in models
    )
    is_theirs = bool(top.keys() & (TOP_KEYS - _SHARED_TOP)) or any(
        keys.keys() & _OF_A_MODEL or isinstance(keys.get("env"), SequenceNode) for keys in models
    )
    # A key that neither knows is a mistake in one of ours: llama-swap would not have said so.
    may_be_theirs = all("cmd" in keys and keys.keys() <= _SHARED_OF_A_MODEL for keys in models)
    return not is_ours and (is_theirs or may_be_theirs)


def _entries(node: Node | None) -> Iterator[tuple[str, Node]]:
    """The entries of a mapping, and of those that merge keys bring in."""
    left, seen = [node], set[int]()
    while left:
        mapping = left.pop()
        if not isinstance(mapping, MappingNode) or id(mapping) in seen:
            continue
        seen.add(id(mapping))
        for key, value in mapping.value:
            if not isinstance(key, ScalarNode):
                continue
            if key.value == "<<":
                left += value.value if isinstance(value, SequenceNode) else [value]
            else:
                yield str(key.value), value
