"""What: what would make any start fail is seen before anyone is evicted for it.
How: entries with and without their files; nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.config.values import CommandEngine, EngineConfig, LlamaCppEngine, ModelConfig, UrlEngine
from rota.core.types import Model, Scaling
from rota.node.replica import obstacle

HERE = Path(__file__)
NOWHERE = Path("/nowhere/at/all")


def entry(engine: EngineConfig) -> ModelConfig:
    return ModelConfig(Model("m", Scaling(0, 1, 0), 1), engine)


@pytest.mark.parametrize(
    ("engine", "seen"),
    [
        (LlamaCppEngine(NOWHERE), f"m could not be started: no such file: {NOWHERE}"),
        (CommandEngine((str(NOWHERE), "x")), f"m could not be started: no such file: {NOWHERE}"),
        (LlamaCppEngine(HERE), ""),
        (CommandEngine(("/bin/sh", "-c", "true")), ""),
        (CommandEngine(("looked-up-when-it-starts",)), ""),
        (CommandEngine(("/opt/${MODEL}/run",)), ""),
        (UrlEngine("http://127.0.0.1:1"), ""),
    ],
)
def test_what_is_seen_of_a_start_to_come(engine: EngineConfig, seen: str) -> None:
    assert obstacle(entry(engine)) == seen
