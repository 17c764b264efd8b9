"""The verbs that ask a running rota: `ps`, `load`, `unload`.

On a terminal a load shows a line that moves; elsewhere each change is a line of its own. What
is a result goes to stdout, what happens on the way to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import click

from rota.cli.admin import Admin, Json, Pending
from rota.config.units import show_mib
from rota.errors import RotaError

LOOK_EVERY_S = 0.2


def ps(url: str, *, as_json: bool) -> None:
    """Print the status of every model and device."""
    status = Admin(url).status()
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    # Into a file or pipe, lines are as long as they are; a terminal wraps its cells.
    console = Console(width=None if sys.stdout.isatty() else 1_000)
    head = ("MODEL", "STATE", "SCALING", "REPLICA", "PID", "DEVICES", "MEMORY", "BUSY", "WAITING")
    table = Table(*head, "WHY", box=None, pad_edge=False, header_style="bold")
    for row in _rows(status):
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)
    for device in status["devices"]:
        console.print(_say_device(device), markup=False, highlight=False)


def _rows(status: Json) -> Iterator[tuple[str, ...]]:
    for model in status["models"]:
        name = (model["name"], model["state"], model["scaling"]["kind"])
        waiting, why = str(model["waiting"] or ""), model.get("reason") or ""
        if not model["replicas"]:
            yield (*name, "", "", "", "", "", waiting, why or model.get("last_failure") or "")
        for replica in model["replicas"]:
            yield (*name, *_replica_cells(replica), waiting, why or replica.get("why") or "")
            name, waiting, why = ("", "", ""), "", ""


def _replica_cells(replica: Json) -> tuple[str, ...]:
    idle_s = replica["idle_s"]
    busy = f"idle {_say_seconds(idle_s)}" if idle_s is not None else str(replica["in_flight"])
    return (
        f"{replica['id']} {replica['phase']}",
        str(replica["pid"] or ""),
        ", ".join(replica["devices"]),
        " + ".join(show_mib(mib) for mib in replica["memory_mib"]),
        busy,
    )


def _say_device(device: Json) -> str:
    used = show_mib(device["used_mib"])
    promised = f", {show_mib(device['promised_mib'])} promised" if device["promised_mib"] else ""
    total = show_mib(device["memory_mib"])
    return f"{device['node']}/{device['id']}: {used} of {total} used{promised}"


def load(url: str, model: str, *, as_json: bool) -> None:
    """Load a model and wait for it. Raises RotaError: it could not be, or not now."""
    admin = Admin(url)
    began_s = time.monotonic()
    pending = admin.load(model)
    if not as_json:
        if sys.stderr.isatty():
            _watch_on_terminal(admin, model, pending, began_s)
        else:
            _watch_in_lines(admin, model, pending, began_s)
    answer = pending.result()
    if as_json:
        click.echo(json.dumps(answer))
        return
    name, took = answer.get("model", model), _say_seconds(time.monotonic() - began_s)
    click.echo(f"{name} is ready ({answer.get('replica', '')}) after {took}")


def _watch_on_terminal(admin: Admin, model: str, pending: Pending, began_s: float) -> None:
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(f"{model}: asked for")) as line:
        while not pending.is_answered(LOOK_EVERY_S):
            line.update(Text(_say_progress(admin, model, time.monotonic() - began_s)))


def _watch_in_lines(admin: Admin, model: str, pending: Pending, began_s: float) -> None:
    said = None
    while not pending.is_answered(LOOK_EVERY_S):
        state, reason, _ = _look(admin, model)
        if (state, reason) != said:
            said = (state, reason)
            click.echo(_say_progress(admin, model, time.monotonic() - began_s), err=True)


def _say_progress(admin: Admin, model: str, elapsed_s: float) -> str:
    """`model: loading 3.2 s, about 1.5 s to go: evicting smol`."""
    state, reason, eta_s = _look(admin, model)
    to_go = f", about {_say_seconds(eta_s)} to go" if eta_s is not None else ""
    return f"{model}: {state} {_say_seconds(elapsed_s)}{to_go}" + (f": {reason}" if reason else "")


def _look(admin: Admin, model: str) -> tuple[str, str, float | None]:
    """A model's state, what it waits for, and for how long; vague when rota does not say."""
    with suppress(RotaError, KeyError, TypeError):
        for entry in admin.status()["models"]:
            if model == entry["name"] or model in entry.get("aliases", ()):
                return entry["state"], entry.get("reason") or "", entry.get("eta_s")
    return "asked for", "", None


def unload(url: str, model: str | None, *, grace_s: float | None, as_json: bool) -> None:
    """Take a model down, None = all, and wait until it is gone."""
    answer = Admin(url).unload(model, grace_s=grace_s)
    if as_json:
        click.echo(json.dumps(answer))
    else:
        click.echo(f"{answer.get('model') or 'every model'} is down")


def _say_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
