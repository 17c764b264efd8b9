"""A llama-swap file as text, and what becomes of it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from rota.config.complaints import InvalidConfig, as_lines
from rota.config.llama_swap import Converted, convert

PATH = Path("config.yaml")


def converted(text: str, environ: Mapping[str, str] | None = None) -> Converted:
    return convert({PATH: textwrap.dedent(text).encode()}, environ or {})


def refused(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Each complaint as `line:column: text`."""
    with pytest.raises(InvalidConfig) as caught:
        converted(text, environ)
    return [line.removeprefix(f"{PATH}:").strip() for line in str(caught.value).splitlines()]


def told(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Each warning as `line:column: text`."""
    lines = as_lines(converted(text, environ).warnings(()), PATH)
    return [line.removeprefix(f"{PATH}:").strip() for line in lines]
