"""`rota check`: what a file says, or everything that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, assert_never

import click

from rota.cli.text import printable
from rota.config import load
from rota.config.complaints import InvalidConfig
from rota.config.fit import needs_of
from rota.config.units import show_duration, show_mib
from rota.config.values import CommandEngine, Config, LlamaCppEngine, ModelConfig, UrlEngine
from rota.core.coexistence import Coexistence, Group, Groups, Matrix

KINDS = ("always", "on demand", "elsewhere", "off")


def check(path: Path, *, as_json: bool, is_quiet: bool = False) -> bool:
    """Print the verdict on a file; whether it can be used.

    Args:
        is_quiet: say nothing of a file that can be.
    """
    try:
        config = load(path, allow_open=True)
    except InvalidConfig as invalid:
        _refuse(invalid, as_json=as_json)
        return False
    if is_quiet:
        return True
    if as_json:
        click.echo(json.dumps(_as_json(config), indent=2))
    else:
        _say(config)
    return True


def _refuse(invalid: InvalidConfig, *, as_json: bool) -> None:
    if as_json:
        problems = [
            {"line": p.place.line, "column": p.place.column, "text": p.text}
            for p in invalid.problems
        ]
        answer = {"ok": False, "path": str(invalid.path), "problems": problems}
        click.echo(json.dumps(answer, indent=2))
        return
    for line in invalid.message.splitlines():
        click.echo(f"error: {printable(line)}", err=True)
    click.echo(_count(len(invalid.problems), "problem"), err=True)


def _say(config: Config) -> None:
    dialect = "" if config.dialect == "rota" else f", read as {config.dialect}'s"
    click.echo(f"ok         {config.path}{dialect}")
    click.echo(f"listen     {config.host}:{config.port}")
    click.echo(f"state      {config.state_dir}")
    click.echo(f"devices    {say_devices(config)}")
    if config.keys:
        click.echo(f"keys       {', '.join(config.keys)}")
    for kind in KINDS:
        models = [model for model in config.models.values() if kind_of(model) == kind]
        for n, model in enumerate(models):
            click.echo(f"{kind if n == 0 else '':<11}{model.name}: {_say_model(model)}")
    title, rules = _rules(config.coexistence)
    for n, rule in enumerate(rules):
        click.echo(f"{title if n == 0 else '':<11}{printable(rule)}")
    for warning in config.warnings:
        click.echo(f"warning: {printable(warning)}", err=True)


def say_devices(config: Config) -> str:
    """The stated devices in words."""
    stated = ", ".join(f"{device.id} {show_mib(device.memory_mib)}" for device in config.devices)
    return stated or "found when rota starts"


def kind_of(model: ModelConfig) -> str:
    """The word users see for a model's scaling; one that someone else runs has none."""
    return "elsewhere" if model.model.is_external else model.model.scaling.kind


def _say_model(entry: ModelConfig) -> str:
    if isinstance(entry.engine, UrlEngine):
        return entry.engine.url
    scaling = entry.model.scaling
    idle = show_duration(scaling.idle_timeout_ms) if scaling.idle_timeout_ms else "never"
    # Only llama.cpp's are measured by their file, and this one could not be read.
    is_unknown = isinstance(entry.engine, LlamaCppEngine) and entry.model.memory_mib is None
    takes = "takes what its file will say" if is_unknown else f"takes {needs_of(entry.model)}"
    parts = [takes, _count(entry.model.slots, "slot")]
    if scaling.kind == "on demand":
        parts.append(f"steps down after {idle}" if scaling.idle_timeout_ms else "stays once loaded")
    if entry.aliases:
        parts.append(f"also called {', '.join(entry.aliases)}")
    return ", ".join(parts)


def _rules(coexistence: Coexistence) -> tuple[str, list[str]]:
    """What may be loaded together, where the file says more than memory does."""
    match coexistence:
        case Groups(groups):
            return "groups", [_say_group(group) for group in groups]
        case Matrix(sets):
            return "matrix", [f"{name}: {expression}" for name, expression in sets]
        case _:
            return "", []


def _say_group(group: Group) -> str:
    parts = [
        ", ".join(sorted(group.members)),
        "one at a time" if group.swap else "all together",
        "alone" if group.exclusive else "beside others",
        *(["persistent"] if group.persistent else []),
    ]
    return f"{group.name}: {'; '.join(parts)}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _as_json(config: Config) -> dict[str, Any]:
    return {
        "ok": True,
        "path": str(config.path),
        "dialect": config.dialect,
        "listen": f"{config.host}:{config.port}",
        "state": str(config.state_dir),
        "devices": [{"id": d.id, "memory_mib": d.memory_mib} for d in config.devices],
        "keys": list(config.keys),
        "models": [_model_as_json(model) for model in config.models.values()],
        "warnings": list(config.warnings),
    }


def _model_as_json(entry: ModelConfig) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": kind_of(entry),
        "engine": _engine_name(entry),
        "memory_mib": entry.model.memory_mib,
        "device_count": entry.model.device_count,
        "slots": entry.model.slots,
        "aliases": list(entry.aliases),
        "line": entry.line,
    }


def _engine_name(entry: ModelConfig) -> str:
    match entry.engine:
        case CommandEngine():
            return "command"
        case LlamaCppEngine():
            return "llama.cpp"
        case UrlEngine():
            return "url"
        case _:
            assert_never(entry.engine)
