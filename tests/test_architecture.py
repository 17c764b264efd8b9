"""The rooms keep to themselves: imports go one way, every module is used, nothing grows unseen.

Read from the source, as text and syntax tree; nothing is imported but the core.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from rota.core import describe, effects, events

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "rota").rglob("*.py"))
}

SEES = {
    "errors": set(),
    "core": set(),
    "config": {"core"},
    "store": {"core"},
    "engines": {"core"},
    "sizing": {"core"},
    "node": {"engines", "sizing", "core"},
    "cluster": {"node", "engines", "sizing", "core"},
    "journal": {"core"},
    "waiting": {"core"},
    "controller": {"store", "journal", "waiting", "cluster", "node", "engines", "sizing", "core"},
    "sim": {"controller", "cluster", "node", "engines", "sizing", "core"},
    "gateway": {"controller", "store", "cluster", "node", "engines", "sizing", "core"},
    "cli": {
        *{"gateway", "sim", "config", "controller", "cluster", "node", "engines", "sizing"},
        *{"journal", "store", "core"},
    },
    "testing": {"core", "engines", "node", "cluster", "controller", "gateway"},
    "__main__": {"cli"},
}
"""Each room and what it may import besides itself. Everyone may see `rota.errors` (the core has
no use for it) and, above the core, the frozen values of `rota.config.values`."""

IMPURE = {
    *{"asyncio", "datetime", "http", "logging", "multiprocessing", "os", "pathlib", "random"},
    *{"secrets", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile"},
    *{"threading", "time", "urllib", "uuid"},
}
"""The standard library that the core has no business with: I/O, clocks, randomness, logs."""

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 850
"""A ratchet: lower these when you can, raise them only with a reason in the commit."""


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "rota"


def imports(module: str) -> Iterator[str]:
    """The modules that one imports, wherever in it; `from rota import core` counts as rota.core."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    room = room_of(module)
    for name in imports(module):
        if not name.startswith("rota.") or name in {"rota.errors", f"rota.{room}"}:
            continue
        other = room_of(name)
        if other in {room, "errors", "__version__"} and room != "core":
            continue
        is_value = name.startswith("rota.config.values") and room not in {"core", "errors"}
        is_container = name == "rota.config" and f"{module}".startswith("rota.")
        if is_value or (is_container and _takes_values_only(module)):
            continue
        assert other == room or other in SEES.get(room, set()), f"{module} imports {name}"


def _takes_values_only(module: str) -> bool:
    """Whether a module names `rota.config` for its `values` alone."""
    taken = [name for name in imports(module) if name.startswith("rota.config.")]
    return bool(taken) and all(name.startswith("rota.config.values") for name in taken)


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("rota.core")])
def test_the_core_is_pure(module: str) -> None:
    for name in imports(module):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top == "rota", f"{module} imports {name}"
        assert top not in IMPURE, f"{module} imports {name}"


def test_every_module_is_used() -> None:
    """By another one, by a test, by a bench or by its name on a command line."""
    used = {name for module in MODULES for name in imports(module)}
    elsewhere = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("tests", "bench", "scripts", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in {".py", ".sh", ".md", ""}
    )
    elsewhere += (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = "\n".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    for module in MODULES:
        is_known = (
            module in used
            or module in elsewhere
            or f'"{module}"' in names
            or module.rsplit(".", 1)[-1] in {"__main__"}
            or module in {"rota"}
            or any(other.startswith(f"{module}.") for other in used)
        )
        assert is_known, f"{module} is imported by nothing"


@pytest.mark.parametrize(
    "kind", [*get_args(events.Event), *get_args(effects.Effect)], ids=lambda kind: kind.__name__
)
def test_every_event_and_effect_can_be_described(kind: type) -> None:
    tree = ast.parse(Path(describe.__file__).read_text(encoding="utf-8"))
    cases = {
        node.cls.id
        for node in ast.walk(tree)
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name)
    }
    assert kind.__name__ in cases


@pytest.mark.parametrize("module", MODULES)
def test_nothing_grows_unseen(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES_MAX, module
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{module}.{node.name} has {lines} lines"


@pytest.mark.parametrize("module", [n for n, p in MODULES.items() if p.name != "__init__.py"])
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8")))


def test_the_tables_of_the_scheduler_page_are_the_generated_ones() -> None:
    script = ROOT / "scripts" / "scheduler_tables.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr or result.stdout
