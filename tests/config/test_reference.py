"""The reference page and the example are what the code says.

How: the page is made anew and compared; the example is loaded.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.config import load, schema
from rota.config.reference import render

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == render(), (
        "run: python -m rota.config.reference > docs/configuration.md"
    )


def test_the_example_is_sound() -> None:
    config = load(ROOT / "examples" / "rota.yaml")
    assert {name: entry.model.scaling.kind for name, entry in config.models.items()} == {
        "smol": "on demand",
        "qwen-coder": "on demand",
        "chat": "always",
        "big": "off",
        "far": "on demand",
    }
    assert all("there is no" in warning for warning in config.warnings), config.warnings


@pytest.mark.parametrize(
    "kind",
    [
        *(schema.FileKeys, schema.ModelKeys, schema.DeviceKeys, schema.ScalingKeys),
        *(schema.GroupKeys, schema.MatrixKeys),
    ],
)
def test_no_key_is_both_built_and_not(kind: type[schema.Keys]) -> None:
    assert not schema.NOT_BUILT & kind.model_fields.keys()
    assert not schema.SYNONYMS.keys() & kind.model_fields.keys() - {"path"}
