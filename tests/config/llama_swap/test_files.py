"""Whole files, as users show theirs in public, and what becomes of each.

How: each file in files/ is read and its page compared with the `.out` beside it, warnings at the
end; `--rewrite` writes these anew. Each page is a file of ours that loads without complaint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.config import load
from rota.config.complaints import as_lines
from rota.config.llama_swap import convert, is_llama_swap

HERE = Path(__file__).parent / "files"
FILES = sorted(HERE.glob("*.yaml"))
ENVIRON = {
    "LLM_KEY": "sk-of-the-test",
    "OPENROUTER_KEY": "sk-or-of-the-test",
    "CLOUD_KEY": "sk-cloud-of-the-test",
    "MODELS": "/srv/models",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_becomes_of_it(path: Path, request: pytest.FixtureRequest) -> None:
    name = Path(path.name)
    made = convert({name: path.read_bytes()}, ENVIRON)
    assert made.text == convert({name: path.read_bytes()}, ENVIRON).text
    told = "".join(f"{line}\n" for line in as_lines(made.warnings(()), name))
    page = f"{made.text}\n# ---- told ----\n{told}"
    out = path.with_suffix(".out")
    if request.config.getoption("--rewrite", False):
        out.write_text(page, encoding="utf-8")
    assert out.read_text(encoding="utf-8") == page


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_loads_without_complaint(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = convert({path: path.read_bytes()}, ENVIRON)
    own = tmp_path / "rota.yaml"
    own.write_text(made.text, encoding="utf-8")
    assert not is_llama_swap(own, own.read_bytes(), {})
    config = load(own, allow_open=True)
    assert config.dialect == "rota"
    # Programs are the reader's own.
    assert [line for line in config.warnings if "there is no command" not in line] == []
    # And read as it is, it is the same.
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    as_it_is = load(path)
    assert as_it_is.dialect == "llama-swap"
    assert as_it_is.coexistence == config.coexistence
    assert {name: entry.model for name, entry in as_it_is.models.items()} == {
        name: entry.model for name, entry in config.models.items()
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_key_of_anybody_is_in_it(path: Path) -> None:
    made = convert({path: path.read_bytes()}, ENVIRON)
    told = "\n".join(problem.text for problem in made.warnings(()))
    for key in ("of-the-test", "sk-one-that-nobody-knows", "a-second-key"):
        assert key not in made.text + told
