"""The keys of the file: what each is, what it means, and its default.

The reference in docs/configuration.md is generated from here, so a key's words live beside it.
Only keys that do something are listed; those that are designed and not built are refused as
such (`NOT_BUILT`), since a setting that is silently without effect is worse than none.

Values arrive as text (see `document`), so each type is a reader of text. What depends on more
than one key is in `loading`. Defaults are written as the author would write them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from rota.config import units
from rota.config.values import DONE

T = TypeVar("T")


# What no job can be posted to or asked after under.
_OWN_PATHS = (
    *("/rota/", "/upstream/", "/v1/models", "/v1/realtime"),
    *("/health", "/running", "/unload", "/queue", "/logs", "/metrics"),
)


def _reader(read: Callable[[str], T], wanted: str) -> BeforeValidator:
    """A pydantic validator from a function of text that raises ValueError with a sentence."""

    def validate(value: object) -> T:
        if not isinstance(value, str):
            raise _complaint(f"{_describe(value)}; {wanted} is wanted")
        try:
            return read(value)
        except ValueError as error:
            raise _complaint(str(error)) from error

    return BeforeValidator(validate)


def _complaint(text: str) -> PydanticCustomError:
    return PydanticCustomError("rota", "{text}", {"text": text})


def _describe(value: object) -> str:
    match value:
        case None:
            return "has no value"
        case dict():
            return "is a mapping"
        case list():
            return "is a list"
        case _:
            return f"is `{value}`"


def _one_or_more(value: object) -> object:
    """A single text where a list of texts is wanted means a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _complaint(f"{_describe(value)}; a list is wanted")
    return value


def _mapping(value: object) -> object:
    if not isinstance(value, dict):
        raise _complaint(f"{_describe(value)}; a mapping is wanted")
    return value


def _bounded(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = units.whole(text)
        if not low <= number <= high:
            raise ValueError(f"is {number}; it goes from {low} to {high}")
        return number

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"is `{text[:40]}`; it is {' or '.join(f'`{w}`' for w in words)}")
        return text

    return read


def _positive_duration(text: str) -> int:
    ms = units.duration_ms(text)
    if ms == 0:
        raise ValueError("is 0; nothing can happen in no time")
    return ms


def _idle_timeout(text: str) -> int:
    if text in ("never", "-1"):  # as Ollama's and llama-swap's users have it
        raise ValueError(f"is `{text}`; never is written as 0")
    return units.duration_ms(text)


def _silence(text: str) -> int:
    """Zero, or long enough to ask several times and to wait for the answers."""
    ms = units.duration_ms(text)
    if 0 < ms < 1_000:
        raise ValueError(f"is {text}; what is silent for less than 1s may be busy")
    return ms


def _mib_up(text: str) -> int:
    """MiB, rounded up: a footprint that is a little too large is safe."""
    return _at_least_one(-(-units.memory_bytes(text) // units.MIB))


def _mib_down(text: str) -> int:
    """MiB, rounded down: a budget that is a little too small is safe."""
    return _at_least_one(units.memory_bytes(text) // units.MIB)


def _at_least_one(mib: int) -> int:
    if mib < 1:
        raise ValueError("is less than 1MiB")
    return mib


def _digest(text: str) -> bytes:
    """The value is not repeated: it may be the key itself."""
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", text, re.ASCII):
        raise ValueError("is no SHA-256 in hex; `rota keys hash` makes one of a key")
    return bytes.fromhex(text)


def _some_text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _some_path(text: str) -> str:
    if not re.fullmatch(r"/[!-~]+", text) or set(text) & set("?#{}"):
        raise ValueError(f"is `{text}`; a path like /v1/videos is wanted")
    return text


def _path(text: str) -> str:
    """A path for jobs, which lie below it: nothing of rota's own may be there."""
    if _some_path(text).startswith(_OWN_PATHS):
        raise ValueError(f"is `{text}`, which rota answers itself")
    for own in _OWN_PATHS:
        if own.startswith(f"{text.rstrip('/')}/"):
            raise ValueError(f"is `{text}`, below which rota has paths of its own, as {own}")
    return text


def _poll_path(text: str) -> str:
    before, _, after = text.partition("/{id}")
    if "/{id}" not in text or (after and not after.startswith("/")):
        raise ValueError(f"is `{text}`; a path like /v1/videos/{{id}} is wanted")
    if after:
        _some_path(after)
    return _path(before) + "/{id}" + after


def _field(text: str) -> str:
    if not all(text.split(".")):
        raise ValueError(f"is `{text}`; a name like `id` or `data.id` is wanted")
    return text


def _jobs(value: object) -> object:
    """A word in place of the mapping: the shape whose defaults are all right, or a path."""
    if not isinstance(value, str):
        return _mapping(value)
    if value == "openai-videos":
        return {}
    if value.startswith("/"):
        return {"submit": value}
    raise _complaint(f"is `{value}`; a mapping, `openai-videos` or a path is wanted")


# What a value can be. The `| None` is for "not stated"; a key that stands there without a value
# reaches the reader, which refuses it.
Text = Annotated[str | None, _reader(_some_text, "text")]
AnyText = Annotated[str, _reader(str, "text")]
Texts = Annotated[
    tuple[Annotated[str, _reader(_some_text, "text")], ...], BeforeValidator(_one_or_more)
]
TextMap = Annotated[dict[str, AnyText], BeforeValidator(_mapping)]
Truth = Annotated[bool, _reader(units.truth, "true or false")]
Duration = Annotated[int, _reader(units.duration_ms, "a duration")]
MaybeDuration = Annotated[int | None, _reader(units.duration_ms, "a duration")]
SomeDuration = Annotated[int, _reader(_positive_duration, "a duration")]
MaybeSomeDuration = Annotated[int | None, _reader(_positive_duration, "a duration")]
MaybeIdleTimeout = Annotated[int | None, _reader(_idle_timeout, "a duration")]
Silence = Annotated[int, _reader(_silence, "a duration")]
Footprint = Annotated[int | None, _reader(_mib_up, "an amount of memory")]
Budget = Annotated[int, _reader(_mib_down, "an amount of memory")]
JobPath = Annotated[str, _reader(_path, "a path")]
MaybePollPath = Annotated[str | None, _reader(_poll_path, "a path")]
FieldName = Annotated[str, _reader(_field, "text")]
Bytes = Annotated[int, _reader(units.memory_bytes, "an amount of memory")]


def _whole(low: int, high: int) -> BeforeValidator:
    return _reader(_bounded(low, high), "a whole number")


Costs = Annotated[dict[str, Annotated[int, _whole(1, 1_000_000_000)]], BeforeValidator(_mapping)]


def key(kind: str, text: str, default: object = None, *, shown: str = "") -> Any:
    """A key of the file.

    Args:
        kind: what its value is, for the reference.
        text: what it means, for the reference.
        default: text is read as if the author had written it; None = not stated; `...` = the
            key must be there.
        shown: what the reference says in place of the default.
    """
    is_written = isinstance(default, str)
    if not shown:
        shown = str(default) if is_written else "required" if default is ... else "–"
    extra = {"kind": kind, "shown": shown}
    field: Any = Field  # its overloads do not know a default of any kind
    return field(default, description=text, json_schema_extra=extra, validate_default=is_written)


class Keys(BaseModel):
    """A mapping of which every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ScalingKeys(Keys):
    """How many replicas a model must and may have. `{max: n}` alone means `min: 0`; `{min: n}`
    alone means `max: n`; `max: 0` is off. A model that states neither takes both from
    `defaults`, and is off if they are not stated there."""

    min: Annotated[int | None, _whole(0, 1000)] = key(
        "number", "Replicas kept whatever happens.", shown="0"
    )
    max: Annotated[int | None, _whole(0, 1000)] = key(
        "number", "Replicas at most; 0 = off.", shown="`min`"
    )
    idle_timeout: MaybeIdleTimeout = key(
        "duration",
        "A replica above `min` steps down after this long without use; 0 = never.",
        shown="10m",
    )
    up_after: MaybeDuration = key(
        "duration",
        "A further replica is started, within `max`, when a request has waited so long for a slot "
        "of those there are. It takes no memory from a model that was used lately.",
        shown="5s",
    )


class SharedKeys(Keys):
    """What a model may state, and `defaults` for all models that do not."""

    scaling: ScalingKeys = key(
        "mapping", "How many replicas, and when one steps down.", ScalingKeys(), shown="off"
    )
    concurrency: Annotated[int, _whole(1, 10_000)] = key(
        "number",
        "Slots: requests that one replica takes at once. For llama.cpp, `parallel` is the default.",
        "10",
    )
    queue_max: Annotated[int, _whole(0, 1_000_000)] = key(
        "number", "Requests that may wait for the model; over it 429 `queue_full`.", "1000"
    )
    when_full: Annotated[
        Literal["queue", "reject"], _reader(_one_of("queue", "reject"), "text")
    ] = key(
        "`queue` or `reject`",
        "What a request meets that finds every slot taken: it waits, or it gets a 429.",
        "queue",
    )
    priority: Annotated[int, _whole(-1_000, 1_000)] = key(
        "number", "Who goes first among models that wait for room; higher goes first.", "0"
    )
    queue_wait: Duration = key(
        "duration", "How long a request waits for a slot; past it 429 `model_busy`.", "10m"
    )
    activation_wait: Duration = key(
        "duration",
        "How long a request holds its connection for a load; past it 503 with `Retry-After`.",
        "45s",
    )
    patience: Duration = key(
        "duration",
        "How long a waiting request honours the holds and the work of others. "
        "`X-Rota-Patience-Ms` says otherwise for one request.",
        "5m",
    )
    hold: Duration = key(
        "duration",
        "After an answer that calls a tool, how long the model is kept for its caller's next "
        "request. `X-Rota-Hold-Ms` says otherwise for one request.",
        "10s",
    )
    hold_finished: Duration = key("duration", "The same after any other answer.", "1s")
    websocket_idle: Duration = key(
        "duration",
        "An open web socket counts as use until nothing but pings has passed for so long; "
        "0 = for as long as it is open.",
        "0",
    )
    start_timeout: SomeDuration = key(
        "duration",
        "A start fails when it is not ready so long after it began or after its last output, "
        "whichever is later.",
        "5m",
    )
    start_timeout_max: MaybeSomeDuration = key(
        "duration",
        "And so long after it began in any case.",
        shown="4 × `start_timeout`",
    )
    silent_after: Silence = key(
        "duration",
        "A ready engine that answers nothing for so long, neither requests nor its `ready` path, "
        "is replaced; 0 = never. It is to be longer than the engine is ever blocked by its own "
        "work.",
        "1m",
    )
    stop_grace: Duration = key(
        "duration", "Between asking an engine to end and killing its process group.", "10s"
    )


class JobsKeys(Keys):
    """Work that goes on after the answer that gave its id. `jobs: openai-videos` (or `{}`) takes
    every default; `jobs: /v1/renders` states `submit` alone."""

    submit: JobPath = key("path", "What a job is posted to.", "/v1/videos")
    poll: MaybePollPath = key(
        "path",
        "What it is asked after under, `{id}` being one whole segment; what lies below (as "
        "`/content`) goes to the same replica.",
        shown="`submit` and `/{id}`",
    )
    id: FieldName = key("text", "Where the answers have the job's id; dots go into objects.", "id")
    status: FieldName = key("text", "Where they have how the job is.", "status")
    done: Texts = key(
        "list",
        "What that says at the end, in any case.",
        (),
        shown=", ".join(f"`{word}`" for word in sorted(DONE)),
    )
    ttl: SomeDuration = key(
        "duration", "A job keeps its replica for this long at most, whatever it says.", "1h"
    )
    keep: Duration = key(
        "duration",
        "After a job's end its replica is kept for so long, or until the client has fetched "
        "something below the job's path.",
        "5s",
    )


class ModelKeys(SharedKeys):
    """One entry under `models:`. Exactly one of `cmd`, `model` and `url` says what it is."""

    cmd: Text = key(
        "text",
        "The command to run, split as a shell would but run without one. `${PORT}`, `${MODEL}` "
        "and `macros` are filled in.",
    )
    model: Text = key("path", "A GGUF file, run by llama.cpp.")
    url: Text = key("URL", "A server that someone else runs.")
    engine: Text = key("text", "`llama.cpp`; implied by `model`.")
    aliases: Texts = key("list", "Other names that clients may ask for.", ())
    upstream_model: Text = key(
        "text",
        "`cmd`, `url`: what the engine calls it, sent whichever name a client asked for.",
        shown="the model's name",
    )
    jobs: Annotated[JobsKeys | None, BeforeValidator(_jobs)] = key(
        "mapping, or a word", "Its work goes on after the answer that gave a job's id.", shown="no"
    )
    pinned: Truth = key(
        "true or false",
        "Once loaded, it never leaves to make room and never steps down; `rota unpin` lets it go.",
        "false",
    )
    preload: Annotated[
        Literal["never", "once", "always"], _reader(_one_of("never", "once", "always"), "text")
    ] = key(
        "`never`, `once` or `always`",
        "Loaded though nobody asks, where memory is free and nobody waits for it: `once` after the "
        "start; `always` whenever there is room, so that a default model is back when the one that "
        "displaced it has gone. Nobody is evicted for it, and it may be evicted.",
        "never",
    )
    exclusive_while_busy: Truth = key(
        "true or false",
        "While it serves a request or is leased, nothing is loaded on its devices.",
        "false",
    )

    memory: Footprint = key(
        "memory",
        "What a replica takes of each of its devices.",
        shown="estimated for `model`, else the whole device",
    )
    device_count: Annotated[int, _whole(1, 1024)] = key(
        "number", "Devices that a replica needs.", "1"
    )
    devices: Texts = key("list", "Ids of the devices it may be placed on.", ())

    ready: Text = key(
        "path",
        "Probed until it answers 200; `none` = ready at once.",
        shown="`/health`; `none` for `url`",
    )
    port: Annotated[int | None, _whole(1, 65_535)] = key(
        "number", "`cmd`: a fixed port, for commands that cannot be told one.", shown="a free one"
    )
    cwd: Text = key("path", "`cmd`: the folder to run in.", shown="the file's folder")
    cmd_stop: Text = key(
        "text",
        "`cmd`: a command that ends the engine, run in place of SIGTERM (`docker stop NAME`). It "
        "is split and filled in as `cmd` is, `${PID}` too, and has the engine's folder and "
        "environment.",
        shown="SIGTERM",
    )
    env: TextMap = key("mapping", "`cmd`, `model`: added to rota's own environment.", {})

    server: Text = key(
        "path", "`model`: the `llama-server` to run.", shown="the embedded llama.cpp"
    )
    context: Annotated[int, _whole(1, 100_000_000)] = key(
        "number", "`model`: tokens per slot.", "4096"
    )
    parallel: Annotated[int, _whole(1, 1024)] = key("number", "`model`: slots.", "4")
    threads: Annotated[int | None, _whole(1, 4096)] = key(
        "number", "`model`: CPU threads.", shown="llama.cpp decides"
    )
    gpu_layers: Annotated[int | None, _whole(0, 100_000)] = key(
        "number", "`model`: layers on the GPU.", shown="llama.cpp decides"
    )
    embedding: Truth = key("true or false", "`model`: serve `/v1/embeddings`.", "false")
    args: Texts = key("list", "`model` with `server`: more arguments.", ())


class DeviceKeys(Keys):
    """One entry under `devices:`: a budget. `cpu` is the machine's RAM."""

    memory: Budget = key("memory", "What may be used of it.", ...)
    visible: Text = key(
        "text", "What engines placed here get as `CUDA_VISIBLE_DEVICES`: an index or a UUID."
    )


class ClientKeys(Keys):
    """One entry under `keys:`: a client's key, by its hash."""

    sha256: Annotated[bytes, _reader(_digest, "text")] = key(
        "hex", "What `rota keys hash` prints for the key.", ...
    )
    priority: Annotated[int | None, _whole(-1_000, 1_000)] = key(
        "number", "Who goes first; instead of the model's.", shown="the model's"
    )
    hold: MaybeDuration = key(
        "duration", "`hold` of its requests, instead of the model's.", shown="the model's"
    )
    hold_finished: MaybeDuration = key("duration", "The same.", shown="the model's")
    patience: MaybeDuration = key(
        "duration",
        "What a request without `X-Rota-Patience-Ms` is taken to have said there.",
        shown="the model's",
    )
    patience_min: MaybeDuration = key(
        "duration",
        "The shortest patience that `X-Rota-Patience-Ms` may ask for, where the model's is longer.",
        shown="`patience`",
    )


class GroupKeys(Keys):
    """One entry under `groups:`: models that make each other, or everyone else, leave."""

    members: Texts = key("list", "Models, by name; each is in one group at most.", ...)
    swap: Truth = key(
        "true or false", "One member at a time; with `false` all may be loaded together.", "true"
    )
    exclusive: Truth = key(
        "true or false",
        "A member that is loaded makes every model outside the group leave.",
        "true",
    )
    persistent: Truth = key(
        "true or false",
        "No model outside the group makes a member leave, be it by a rule or for memory.",
        "false",
    )


class MatrixKeys(Keys):
    """`matrix:`: the sets of models that may be loaded together."""

    sets: TextMap = key(
        "mapping",
        "Expressions of models, each by a name: `a & b` together, `a | b` one of them, `( )`, "
        "`+x` what set `x` allows. `&` binds tighter.",
        ...,
    )
    vars: TextMap = key("mapping", "Short names for models, within `sets` and `evict_costs`.", {})
    evict_costs: Costs = key(
        "mapping",
        "What it costs that a model leaves, 1 or more; the set that costs least is taken.",
        {},
        shown="1 each",
    )


class FileKeys(Keys):
    """The file."""

    listen: Text = key("HOST:PORT", "Where clients connect.", shown="127.0.0.1:8080")
    state: Text = key(
        "path",
        "The folder for the lock, engine logs and records.",
        shown="`$XDG_STATE_HOME/rota`",
    )
    devices: Annotated[dict[str, DeviceKeys], BeforeValidator(_mapping)] = key(
        "mapping", "Memory to place replicas on, each by a name.", {}
    )
    macros: TextMap = key(
        "mapping", "Texts to fill in for `${name}` in `cmd`, `cmd_stop`, `args` and `env`.", {}
    )
    queue_bytes_max: Bytes = key(
        "memory",
        "What the bodies of all waiting requests may take together; so may those being read.",
        "512MiB",
    )
    hold_max: Duration = key("duration", "The longest hold that a request can ask for.", "5m")
    lease_ttl_max: SomeDuration = key(
        "duration", "The longest that a lease lasts, its renewals included.", "1h"
    )
    body_bytes_max: Bytes = key("memory", "What one request's body may take.", "64MiB")
    keys: Annotated[dict[str, ClientKeys], BeforeValidator(_mapping)] = key(
        "mapping",
        "Who may ask for models, each by a name. With keys, nobody else may; without, whoever can "
        "connect.",
        {},
    )
    defaults: SharedKeys = key("mapping", "For every model that says nothing else.", SharedKeys())
    eviction: Annotated[Literal["value", "lru"], _reader(_one_of("value", "lru"), "text")] = key(
        "`value` or `lru`",
        "Who makes room, among those who may: who is least likely to be missed for what it frees, "
        "by its requests so far and what a load takes; or who was not used for longest.",
        "value",
    )
    groups: Annotated[dict[str, GroupKeys], BeforeValidator(_mapping)] = key(
        "mapping", "Models that swap with each other or with everyone, each group by a name.", {}
    )
    matrix: Annotated[MatrixKeys | None, BeforeValidator(_mapping)] = key(
        "mapping", "Which models may be loaded together; in place of `groups`.", shown="no rule"
    )
    models: Annotated[dict[str, ModelKeys], BeforeValidator(_mapping)] = key(
        "mapping", "What is served, each by the name clients ask for.", {}, shown="required"
    )


# Designed and not built: refused by name, so that nobody takes silence for consent.
NOT_BUILT = frozenset(
    {
        "sleep",
        "on_exit",
    }
)

# What other tools of the field call it, or where it belongs here.
SYNONYMS = {
    "checkEndpoint": "ready",
    "cmdStop": "cmd_stop",
    "command": "cmd",
    "concurrencyLimit": "concurrency",
    "ctx": "context",
    "ctx_size": "context",
    "healthCheckTimeout": "start_timeout",
    "max_replicas": "scaling: {max: …}",
    "min_replicas": "scaling: {min: …}",
    "scale_up_after": "scaling: {up_after: …}",
    "n_ctx": "context",
    "ngl": "gpu_layers",
    "path": "model",
    "proxy": "url",
    "replicas": "scaling: {max: …}",
    "ttl": "scaling: {idle_timeout: …}",
    "useModelName": "upstream_model",
    "vram": "memory",
}
