"""The verbs that tell what happened and why: `explain` and `journal`.

A journal in a file is replayed before it is told: what a scheduler decides follows from what it
hears, so a report that replays differently is either damaged or the finding itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from rota import __version__
from rota.cli.admin import Admin, Json
from rota.cli.text import printable
from rota.core.describe import describe
from rota.errors import RequestError
from rota.journal import Recording, Step, first_difference, stories
from rota.journal.file import Saved, load

_STATES = {"waiting": ", who still waits", "running": ", who is being served", "over": ""}


def explain(url: str, request: str, *, as_json: bool) -> None:
    """Tell a request's story, from the journal of a running rota.

    Raises:
        RotaError: there is no such request, or no rota.
    """
    answer = Admin(url).explain(request)
    _print(answer, _tell_stories(answer["requests"]), as_json=as_json)


def plan(url: str, model: str, *, as_json: bool) -> None:
    """Tell what a request for a model would meet now.

    Raises:
        RotaError: there is no such model, or no rota.
    """
    answer = Admin(url).plan(model)
    _print(answer, _tell_plan(answer), as_json=as_json)


def explain_file(path: Path, request: str | None, *, as_json: bool) -> bool:
    """Tell what a saved journal holds, of one request or of all, and replay it.

    Returns: whether it gives the same effects again.
    Raises:
        RequestError: it cannot be read, or has no such request.
    """
    saved = load(path)
    if request is None:
        told: Json = {"steps": [_plain(step, saved.recording) for step in saved.recording.steps]}
        lines = _tell_steps(told["steps"])
    else:
        told = {"requests": _find(saved.recording, request, path)}
        lines = _tell_stories(told["requests"])
    difference = first_difference(saved.recording)
    about = {"rota": saved.version, "why": saved.why, "difference": difference}
    _print(about | told, lines, as_json=as_json)
    click.echo(printable(_say_replay(saved, difference)), err=True)
    return difference is None


def journal(url: str, *, as_json: bool) -> None:
    """Have a running rota save its journal, and say where. Raises RotaError."""
    answer = Admin(url).save_journal()
    _print(answer, [str(answer["path"])], as_json=as_json)


def _print(answer: Json, lines: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    for line in lines:
        click.echo(printable(line))


def _find(recording: Recording, request: str, path: Path) -> list[Json]:
    found = stories(recording.steps, request)
    if not found:
        raise RequestError(
            f"there is no request {request!r} in {path}; without --request it tells all",
            code="request_not_found",
            status=404,
        )
    return [story.as_plain() for story in found]


def _tell_stories(found: list[Json]) -> Iterator[str]:
    for story in found:
        yield f"{story['request']}, for {story['model']}{_STATES.get(story['state'], '')}:"
        for line in story["lines"]:
            yield f"{line['at_s']:+11.3f} s  {line['text']}"


def _tell_plan(answer: Json) -> Iterator[str]:
    where = "" if not answer["devices"] else f" on {' + '.join(answer['devices'])}"
    soon = "" if not answer["eta_s"] else f", in about {answer['eta_s']:.1f} s"
    yield f"{answer['outcome']}{where}{soon}: {answer['text']}"
    for leaver in answer["leaves"]:
        again = leaver["load_s"]
        cost = "" if again is None else f"; loading it again takes about {again:.1f} s"
        yield f"  {leaver['replica']} of {leaver['model']} would leave: {leaver['why']}{cost}"
    if answer["rule"] is not None and not answer["leaves"]:  # else it is said of those
        yield f"  by rule: {answer['rule']}"


def _plain(step: Step, recording: Recording) -> Json:
    at_s = (step.now_ms - recording.steps[0].now_ms) / 1_000
    effects = [describe(effect) for effect in step.effects]
    return {"at_s": at_s, "event": describe(step.event), "effects": effects, "broke": step.raised}


def _tell_steps(steps: list[Json]) -> Iterator[str]:
    for step in steps:
        yield f"{step['at_s']:+11.3f} s  {step['event']}"
        for effect in step["effects"]:
            yield f"{'':13}  → {effect}"
        if step["broke"]:
            yield f"{'':13}  the scheduler broke on it: {step['broke']}"


def _say_replay(saved: Saved, difference: str | None) -> str:
    if difference is None:
        return f"{len(saved.recording.steps)} steps, replayed to the same effects"
    if saved.version == __version__:
        return difference
    return f"{difference} It was written by rota {saved.version}; this is {__version__}."
