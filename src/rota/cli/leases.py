"""The verbs that keep a model where it is: `lease`, `release`, `leases`, `pin`, `unpin`.

A lease's id goes to stdout alone, so that a script can keep it in a variable.
"""

from __future__ import annotations

import json
import time

import click

from rota.cli.admin import Admin, Json
from rota.cli.client import say_seconds, watch
from rota.cli.text import print_table, printable
from rota.errors import CapacityError, RequestError

PAUSE_S = 2.0
"""Between two tries for a model whose load takes longer than rota keeps a caller waiting."""
_ON_THE_WAY = {"model_loading", "model_waiting"}


def take(url: str, model: str, *, ttl_ms: int, reason: str, load: bool, as_json: bool) -> None:
    """Take a lease; with `load`, wait for its model however long that takes."""
    admin = Admin(url)
    began_s = time.monotonic()
    while True:
        pending = admin.lease(model, ttl_s=ttl_ms / 1_000, reason=reason, load=load)
        if load and not as_json:
            watch(admin, model, pending, began_s)
        try:
            answer = pending.result()
        except RequestError as error:
            if load or error.code != "not_loaded":
                raise
            hint = f"{model} is not loaded; --load brings it up first"
            raise RequestError(hint, code=error.code, status=error.status) from error
        except CapacityError as error:
            if not load or error.code not in _ON_THE_WAY:
                raise
            time.sleep(PAUSE_S)
        else:
            break
    _say_lease(answer, "is leased", as_json=as_json)


def renew(url: str, lease: str, *, ttl_ms: int, as_json: bool) -> None:
    """Let a lease last longer."""
    _say_lease(Admin(url).renew(lease, ttl_s=ttl_ms / 1_000), "stays leased", as_json=as_json)


def _say_lease(answer: Json, what: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer))
        return
    left = say_seconds(float(answer.get("expires_in_s", 0)))
    line = f"{answer.get('model')} {what} ({answer.get('replica')}) for {left}"
    click.echo(printable(line), err=True)
    click.echo(printable(str(answer["lease"])))


def release(url: str, lease: str, *, as_json: bool) -> None:
    """End a lease, or say how it ended."""
    answer = Admin(url).release(lease)
    if as_json:
        click.echo(json.dumps(answer))
    else:
        since = f" at {answer['ended_at']}" if "ended_at" in answer else ""
        click.echo(printable(f"{answer['lease']} is over{since}: {answer['why']}"))


def pin(url: str, model: str, *, is_pinned: bool, as_json: bool) -> None:
    """Pin a model, or let it go."""
    answer = Admin(url).pin(model, is_pinned=is_pinned)
    if as_json:
        click.echo(json.dumps(answer))
    else:
        what = "is pinned: it does not leave to make room" if is_pinned else "may leave again"
        click.echo(printable(f"{answer['model']} {what}"))


def leases(url: str, *, as_json: bool) -> None:
    """Print the leases there are, and below them those that ended lately."""
    answer = Admin(url).leases()
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    if not answer["leases"]:
        click.echo("nothing is leased")
    else:
        titles = ("LEASE", "MODEL", "REPLICA", "CALLER", "AGE", "TO GO", "REASON")
        print_table(titles, map(_active_cells, answer["leases"]))
    if answer["ended"]:
        click.echo()
        titles = ("ENDED", "MODEL", "REPLICA", "CALLER", "LASTED", "AT", "WHY")
        print_table(titles, map(_ended_cells, answer["ended"]))


def _active_cells(lease: Json) -> tuple[str, ...]:
    age, left = say_seconds(lease["age_s"]), say_seconds(lease["expires_in_s"])
    return (*_who(lease), age, left, lease["reason"])


def _ended_cells(lease: Json) -> tuple[str, ...]:
    return (*_who(lease), say_seconds(lease["lasted_s"]), lease["ended_at"], lease["why"])


def _who(lease: Json) -> tuple[str, ...]:
    return (lease["lease"], lease["model"], lease["replica"], lease["caller"])
