"""No text, however odd, makes the loader raise anything but ConfigError, or hang.

How: Hypothesis writes arbitrary bytes, arbitrary trees under real keys, and damaged copies of
a valid file.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.config import load, schema
from rota.errors import ConfigError

EXAMPLE = (Path(__file__).parents[2] / "examples" / "rota.yaml").read_bytes()
KEYS = sorted(
    {
        key
        for kind in (
            *(schema.FileKeys, schema.ModelKeys, schema.DeviceKeys, schema.ScalingKeys),
            *(schema.GroupKeys, schema.MatrixKeys),
        )
        for key in kind.model_fields
    }
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["1GiB", "10m", "0", "none", "cpu", "http://localhost:8080", "a", "${PORT}"]),
    st.sampled_from(["a & (b | +c)", "a &", "+a", "+a | x"]),
    st.sampled_from(["x ${PORT}", "${x}", "llama.cpp", "/", "~", "~nobody/x", "[::1]:1", "1:1"]),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=12,
)
ENTRIES = st.dictionaries(st.sampled_from(sorted(schema.ModelKeys.model_fields)), TREES, max_size=8)
FILES = st.fixed_dictionaries(
    {"models": st.dictionaries(st.text(max_size=4), ENTRIES, max_size=3)},
    optional={key: TREES for key in schema.FileKeys.model_fields if key != "models"},
)
FUZZ = settings(max_examples=250, deadline=None)


def try_to_load(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rota.yaml"
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            load(path)


@FUZZ
@given(st.binary(max_size=200))
def test_bytes(data: bytes) -> None:
    try_to_load(data)


@FUZZ
@given(st.text(max_size=200))
def test_text(text: str) -> None:
    try_to_load(text.encode("utf-8", "surrogatepass"))


@FUZZ
@given(FILES)
def test_trees_under_real_keys(tree: object) -> None:
    try_to_load(json.dumps(tree).encode())


@FUZZ
@given(
    st.integers(0, len(EXAMPLE)),
    st.integers(0, 40),
    st.binary(max_size=8)
    | st.sampled_from([b"\t", b"\n", b": ", b"- ", b"*a", b"&a ", b"{", b"'"]),
)
def test_a_damaged_file(at: int, cut: int, put: bytes) -> None:
    try_to_load(EXAMPLE[:at] + put + EXAMPLE[at + cut :])
