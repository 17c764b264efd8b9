"""The verbs that ask a running rota: `ps`, `load`, `unload`.

On a terminal a load shows a line that moves; elsewhere each change is a line of its own. What
is a result goes to stdout, what happens on the way to stderr.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import click

from rota.cli.admin import Admin, Json, Pending
from rota.cli.text import is_terminal, printable
from rota.config.units import show_mib
from rota.errors import RotaError

LOOK_EVERY_S = 0.2

TITLES = ("MODEL", "STATE", "REPLICA", "PID", "DEVICES", "MEMORY", "BUSY", "WAITING")

Row = tuple[str, ...]
Look = tuple[str, str, float | None]  # a model's state, what it waits for, seconds to go


def ps(url: str, *, as_json: bool) -> None:
    """Print the status of every model and device."""
    status = Admin(url).status()
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    rows = [(tuple(map(printable, cells)), printable(why)) for cells, why in _rows(status)]
    widths = [
        max(map(len, column)) for column in zip(TITLES, *(cells for cells, _ in rows), strict=True)
    ]
    click.secho(_line(TITLES, widths), bold=True)
    for cells, why in rows:
        click.echo(_line(cells, widths))
        for line in _fold(why):
            click.echo(line)
    for device in status["devices"]:
        click.echo(printable(_say_device(device)))
    for line in _say_configuration(status.get("configuration") or {}):
        click.echo(printable(line))


def _line(cells: Row, widths: Sequence[int]) -> str:
    return "  ".join(map(str.ljust, cells, widths)).rstrip()


def _fold(why: str) -> list[str]:
    """A reason below its row, since it may be an engine's last words; whole if nobody looks."""
    columns = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else len(why) + 2
    return textwrap.wrap(why, columns, initial_indent="  ", subsequent_indent="  ")


def _rows(status: Json) -> Iterator[tuple[Row, str]]:
    """A row and its reason per replica, or one for a model without any."""
    for model in status["models"]:
        waiting, reason = str(model["waiting"] or ""), model.get("reason") or ""
        pinned = ", pinned" if model.get("pinned") else ""
        if not model["replicas"]:
            why = reason or model.get("last_failure") or ""
            yield (model["name"], model["state"] + pinned, "", "", "", "", "", waiting), why
        for n, replica in enumerate(model["replicas"]):
            name = model["name"] if n == 0 else ""
            is_settled = replica["phase"] == "ready"
            why = reason or ("" if is_settled else replica.get("why") or "")
            yield (
                (
                    name,
                    replica["phase"] + pinned + (", outdated" if replica.get("outdated") else ""),
                    *_replica_cells(replica),
                    waiting,
                ),
                why,
            )
            waiting, reason = "", ""


def _replica_cells(replica: Json) -> tuple[str, ...]:
    return (
        replica["id"],
        str(replica["pid"] or ""),
        ", ".join(replica["devices"]),
        " + ".join(show_mib(mib) for mib in replica["memory_mib"]),
        ", ".join(_say_use(replica)),
    )


def _say_use(replica: Json) -> Iterator[str]:
    """What a replica does, and what keeps it although it does nothing."""
    idle_s, leases = replica["idle_s"], replica.get("leases")
    if idle_s is not None:
        yield f"idle {say_seconds(idle_s)}"
    elif replica["in_flight"] or not leases:
        yield str(replica["in_flight"])
    if leases:
        yield "leased"
    if replica.get("held_s"):
        yield f"held {say_seconds(replica['held_s'])}"


def _say_device(device: Json) -> str:
    used = show_mib(device["used_mib"])
    promised = f", {show_mib(device['promised_mib'])} promised" if device["promised_mib"] else ""
    total = show_mib(device["memory_mib"])
    return f"{device['node']}/{device['id']}: {used} of {total} used{promised}"


def _say_configuration(about: Json) -> Iterator[str]:
    """What is amiss with the file; nothing, if nothing is."""
    if keys := about.get("needs_restart"):
        yield f"{about.get('path')}: {', '.join(keys)} will count when rota is restarted"
    if complaint := about.get("complaint"):
        yield f"{about.get('path')} is wrong; what was loaded at {about.get('loaded_at')} counts:"
        yield from (f"  {line}" for line in str(complaint.get("text")).splitlines())


def load(url: str, model: str, *, as_json: bool) -> None:
    """Load a model and wait for it. Raises RotaError: it could not be, or not now."""
    admin = Admin(url)
    began_s = time.monotonic()
    pending = admin.load(model)
    if not as_json:
        watch(admin, model, pending, began_s)
    answer = pending.result()
    if as_json:
        click.echo(json.dumps(answer))
        return
    name, took = answer.get("model", model), say_seconds(time.monotonic() - began_s)
    click.echo(f"{name} is ready ({answer.get('replica', '')}) after {took}")


def watch(admin: Admin, model: str, pending: Pending, began_s: float) -> None:
    """Say on stderr what a model waits for, until the answer is there."""
    look = _watch_on_terminal if is_terminal(sys.stderr) else _watch_in_lines
    look(admin, model, pending, began_s)


def _watch_on_terminal(admin: Admin, model: str, pending: Pending, began_s: float) -> None:
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(f"{model}: asked for")) as line:
        while not pending.is_answered(LOOK_EVERY_S):
            look = _look(admin, model)
            line.update(Text(_say_progress(model, look, time.monotonic() - began_s)))


def _watch_in_lines(admin: Admin, model: str, pending: Pending, began_s: float) -> None:
    said: tuple[str, str] | None = None
    while not pending.is_answered(LOOK_EVERY_S):
        look = _look(admin, model)
        if look[:2] != said:
            said = look[:2]
            click.echo(_say_progress(model, look, time.monotonic() - began_s), err=True)


def _say_progress(model: str, look: Look, elapsed_s: float) -> str:
    """`model: waiting 3.2 s, about 1.5 s to go: waiting for smol to leave`."""
    state, reason, eta_s = look
    to_go = f", about {say_seconds(eta_s)} to go" if eta_s is not None else ""
    why = f": {reason}" if reason and state != "loading" else ""  # it would say that again
    return printable(f"{model}: {state} {say_seconds(elapsed_s)}{to_go}{why}")


def _look(admin: Admin, model: str) -> Look:
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


def say_seconds(seconds: float) -> str:
    """A time for people: `3.2 s`, `4 min 10 s`, `1 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
