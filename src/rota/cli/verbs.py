"""What can be typed: verbs, options and exit codes. What a verb does is in its own module.

Each verb imports its module when it runs: `rota --help` and shell completion should not pay
for a parser, a table printer or a server. Foreign exceptions do not get here; what does and is
a `RotaError` is said in one or more lines on stderr, and the exit code says which kind it was.
"""

from __future__ import annotations

from pathlib import Path

import click

from rota import __version__
from rota.cli.text import printable
from rota.errors import CapacityError, RotaError

# 2 is click's own: wrong usage.
EXIT_FAILED = 1  # a mistake in the file, a model that cannot run
EXIT_NOT_NOW = 3  # no room, or not yet: the same command may work later
EXIT_NO_ANSWER = 4  # no rota answers there


class _Verbs(click.Group):
    """Says our errors in our words."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RotaError as error:
            for line in error.message.splitlines() or [error.code]:
                click.echo(f"error: {printable(line)}", err=True)
            ctx.exit(_exit_code(error))


def _exit_code(error: RotaError) -> int:
    if error.code == "no_answer":
        return EXIT_NO_ANSWER
    # A model that failed is tried again for requests; whoever asked for it by hand has an answer.
    is_later = isinstance(error, CapacityError) and error.code != "model_cooling"
    return EXIT_NOT_NOW if is_later else EXIT_FAILED


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rota")
def main() -> None:
    """More models than GPUs behind one endpoint.

    A request for a model that is not running loads it, making room if it must; idle models
    step down; every wait has a bound, a reason and an estimate.

    \b
    rota demo                       see it at work, with two small models
    rota check rota.yaml            what a configuration says, and what is wrong with it
    rota serve --config rota.yaml   serve it
    rota import llama-swap FILE     make one of llama-swap's
    rota reload                     load the file again; what runs goes on
    rota ps                         who is loaded, who waits, and for what
    rota queue                      each caller who waits, and how long still
    rota explain ID                 what became of one request, and why
    rota explain plan MODEL         what would happen if it were asked for now
    rota lease MODEL                keep a model where it is for some time

    Exit codes: 0 done; 1 failed; 2 wrong usage; 3 not now, try again; 4 nothing answers.
    """


_FILE = click.Path(path_type=Path)
_url = click.option(
    "--url",
    metavar="URL",
    envvar="ROTA_URL",
    default="http://127.0.0.1:8080",
    show_default=True,
    show_envvar=True,
    help="Where rota answers.",
)
_json = click.option("--json", "as_json", is_flag=True, help="For programs.")


class _Duration(click.ParamType[int]):
    """As in the file: `90s`, `10m`, `1h30m`; milliseconds inside."""

    name = "duration"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        from rota.config.units import duration_ms

        if isinstance(value, int):
            return value
        try:
            ms = duration_ms(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if ms == 0:
            self.fail("is 0; nothing can happen in no time", param, ctx)
        return ms


@main.command()
@click.option(
    "-c", "--config", "path", type=_FILE, required=True, metavar="FILE", help="The configuration."
)
@click.option("--listen", metavar="HOST:PORT", help="Instead of the file's; port 0 = a free one.")
@click.option("--open", "allow_open", is_flag=True, help="Let other machines in, without keys.")
@click.option("--state", type=_FILE, metavar="DIR", help="Instead of the file's.")
@click.option("--no-watch", "is_unwatched", is_flag=True, help="Load FILE again when told only.")
def serve(
    path: Path, listen: str | None, allow_open: bool, state: Path | None, is_unwatched: bool
) -> None:
    """Serve the models of FILE until a signal.

    Runs in the foreground and logs to stderr. On SIGTERM or Ctrl-C, or when its terminal is gone,
    it takes no new request, answers the waiting, gives the running 10 s, ends every engine and
    leaves with 0; a second signal ends it at once.

    FILE is loaded again when it changes, on SIGHUP, and by `rota reload`: what runs goes on.
    """
    from rota.cli.reloader import Source
    from rota.cli.serve import serve as run

    run(Source(path, listen, state, allow_open), is_watched=not is_unwatched)


@main.command()
@click.argument("path", type=_FILE, metavar="FILE")
@click.option("--diff", is_flag=True, help="Say what it would change in the rota that runs.")
@_url
@_json
def check(path: Path, diff: bool, url: str, as_json: bool) -> None:
    """Say what FILE means, or everything that is wrong with it.

    With --diff, say what would change if the rota that runs loaded FILE in place of its own:
    models that come and go, and keys that count now, from a model's next start, or not before
    rota is restarted.
    """
    from rota.cli.check import check as run
    from rota.cli.reload import preview

    if not run(path, as_json=as_json, is_quiet=diff):
        raise click.exceptions.Exit(EXIT_FAILED)
    if diff:
        preview(url, path, as_json=as_json)


@main.command()
@_url
@_json
def reload(url: str, as_json: bool) -> None:
    """Have rota load its file again, and say what that changed.

    Streams go on, and models whose entries stay keep running. A file with a mistake changes
    nothing.
    """
    from rota.cli.reload import reload as run

    run(url, as_json=as_json)


@main.group("import")
def import_() -> None:
    """Make a configuration of another tool's."""


@import_.command("llama-swap")
@click.argument("paths", type=_FILE, metavar="FILE...", nargs=-1, required=True)
@click.option("-o", "out", type=_FILE, metavar="OUT", help="A new file to write; else stdout.")
def import_llama_swap(paths: tuple[Path, ...], out: Path | None) -> None:
    """Write rota's configuration for what llama-swap's FILEs say.

    Several are merged as llama-swap merges them; of a folder each .yaml and .yml is taken. What
    has no counterpart is told in comments where it stood. `rota serve` and `rota check` read one
    such file as it is, too.
    """
    from rota.cli.importing import llama_swap as run

    run(paths, out)


@main.command()
@_url
@_json
def ps(url: str, as_json: bool) -> None:
    """Show each model's state, replicas and waiting requests."""
    from rota.cli.client import ps as run

    run(url, as_json=as_json)


@main.command()
@click.argument("model")
@_url
@_json
def load(model: str, url: str, as_json: bool) -> None:
    """Load MODEL, making room if need be, and wait until it is ready.

    Interrupting the wait does not call the load off: `rota unload` does.
    """
    from rota.cli.client import load as run

    run(url, model, as_json=as_json)


@main.command()
@click.argument("model", required=False)
@click.option("--all", "every", is_flag=True, help="Every model.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0, 86_400),
    metavar="SECONDS",
    help="What running requests get before they are cut.  [default: 10]",
)
@_url
@_json
def unload(model: str | None, every: bool, grace_s: float | None, url: str, as_json: bool) -> None:
    """Take MODEL down, or --all, and wait until its processes are gone.

    It stays down until somebody asks for it, also if it is one that always runs.
    """
    from rota.cli.client import unload as run

    if (model is None) != every:
        raise click.UsageError("name a model, or say --all; not both")
    run(url, model, grace_s=grace_s, as_json=as_json)


@main.command()
@click.argument("model", required=False)
@click.option(
    "--ttl",
    "ttl_ms",
    type=_Duration(),
    default="10m",
    show_default=True,
    metavar="TIME",
    help="How long it lasts if it is not renewed.",
)
@click.option("--reason", default="", metavar="TEXT", help="What for, told to those who wait.")
@click.option("--load", "loads", is_flag=True, help="Load MODEL first, making room if need be.")
@click.option("--renew", metavar="ID", help="Let a lease last for --ttl from now.")
@_url
@_json
def lease(
    model: str | None,
    ttl_ms: int,
    reason: str,
    loads: bool,
    renew: str | None,
    url: str,
    as_json: bool,
) -> None:
    """Keep MODEL where it is for some time; print the lease's ID.

    Its replica does not leave, though no request runs on it, until the lease is released or runs
    out. The file's `lease_ttl_max` bounds it, renewals included.
    """
    from rota.cli import leases as run

    if (model is None) == (renew is None) or (renew is not None and (reason or loads)):
        raise click.UsageError("name a model, or a lease with --renew ID")
    if renew is not None:
        run.renew(url, renew, ttl_ms=ttl_ms, as_json=as_json)
    elif model is not None:
        run.take(url, model, ttl_ms=ttl_ms, reason=reason, load=loads, as_json=as_json)


@main.command()
@click.argument("lease_id", metavar="ID")
@_url
@_json
def release(lease_id: str, url: str, as_json: bool) -> None:
    """Release a lease; of one that is over already, say how it ended."""
    from rota.cli.leases import release as run

    run(url, lease_id, as_json=as_json)


@main.command()
@_url
@_json
def leases(url: str, as_json: bool) -> None:
    """Show who keeps which model, and which leases ended lately."""
    from rota.cli.leases import leases as run

    run(url, as_json=as_json)


@main.command()
@click.argument("model")
@_url
@_json
def pin(model: str, url: str, as_json: bool) -> None:
    """Keep MODEL, once it is loaded, until `rota unpin`.

    It does not leave to make room and never steps down, for as long as this rota runs;
    `pinned: true` in the file is for good.
    """
    from rota.cli.leases import pin as run

    run(url, model, is_pinned=True, as_json=as_json)


@main.command()
@click.argument("model")
@_url
@_json
def unpin(model: str, url: str, as_json: bool) -> None:
    """Let MODEL leave again when others need its room."""
    from rota.cli.leases import pin as run

    run(url, model, is_pinned=False, as_json=as_json)


@main.command()
@_url
@_json
def queue(url: str, as_json: bool) -> None:
    """Show each caller who waits, for what, and how long still."""
    from rota.cli.queue import queue as run

    run(url, as_json=as_json)


@main.command()
@click.argument("request_id", metavar="[ID]", required=False)
@click.argument("model", metavar="[plan MODEL]", required=False)
@click.option("--journal", "path", type=_FILE, metavar="FILE", help="A saved journal to replay.")
@click.option("--request", "wanted", metavar="ID", help="Of a saved journal, this request only.")
@_url
@_json
def explain(
    request_id: str | None,
    model: str | None,
    path: Path | None,
    wanted: str | None,
    url: str,
    as_json: bool,
) -> None:
    """Tell what became of a request, or would now, and why.

    ID is its X-Request-Id: what it waited for, who had to leave for it, what that cost.

    `rota explain plan MODEL` tells what a request for the model would meet now: whether it would
    be loaded, who would have to leave, and which rule says so. Nothing changes by asking.

    With --journal, tell all that a saved journal holds, and replay it: fails when the same events
    do not lead to the same decisions.
    """
    from rota.cli.explain import explain as run
    from rota.cli.explain import explain_file, plan

    if model is not None:
        if request_id != "plan" or path is not None or wanted is not None:
            raise click.UsageError("one request at a time; of a model: rota explain plan MODEL")
        plan(url, model, as_json=as_json)
    elif path is not None:
        if not explain_file(path, wanted or request_id, as_json=as_json):
            raise click.exceptions.Exit(EXIT_FAILED)
    elif request_id is None or wanted is not None:
        raise click.UsageError("name a request, or a journal with --journal FILE [--request ID]")
    else:
        run(url, request_id, as_json=as_json)


@main.group()
def keys() -> None:
    """Make entries for `keys:` in the file: who may ask for models."""


@keys.command("hash")
def hash_key() -> None:
    """Read a key from stdin and print its hash, for `sha256:` in the file.

    Nothing else is kept of it. A good key: openssl rand -base64 32.
    """
    from rota.cli.keys import hash_key as run

    run()


@main.command()
@_url
@_json
def journal(url: str, as_json: bool) -> None:
    """Save what rota decided lately; print the file's path.

    The file goes with a report of a problem; `rota explain --journal FILE` tells what it holds.
    """
    from rota.cli.explain import journal as run

    run(url, as_json=as_json)


@main.command()
@click.argument("n", type=click.IntRange(1), default=100)
@click.option("--seed", type=int, help="The first; the others follow it.  [default: random]")
@click.option("--endless", is_flag=True, help="Callers without end; the longest wait beside W.")
@click.option("--mixes", is_flag=True, help="Traffic that one rule decides, with and without it.")
def sim(n: int, seed: int | None, endless: bool, mixes: bool) -> None:
    """Play N random worlds against the scheduler, in virtual time.

    Fleets, models, callers and faults follow from the seed. After every step everything is checked
    that always holds, and in the end everyone must have been served. docs/scheduler.md says what
    is shown.
    """
    from rota.cli.sim import mixes as play_mixes
    from rota.cli.sim import worlds

    if mixes:
        play_mixes()
    elif not worlds(n, seed, endless=endless):
        raise click.exceptions.Exit(EXIT_FAILED)


@main.command()
@click.option("--exit", "leave", is_flag=True, help="End when the story is told.")
@click.option("--port", type=click.IntRange(0, 65_535), help="[default: 8080, or a free one]")
@click.option("--state", type=_FILE, metavar="DIR", help="Where the demo keeps its files.")
def demo(leave: bool, port: int | None, state: Path | None) -> None:
    """Show two real models that do not fit together take turns."""
    from rota.cli.demo import run_demo as run

    run(leave=leave, port=port, state_dir=state)
