"""One entry under `models:`: what its keys mean together, and what they become.

Complaints go on while there is something sound to look at; a model with any problem comes out
as None, since the file will be refused.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from rota.config import schema
from rota.config.addresses import url_problem
from rota.config.complaints import Complaints, Place, did_you_mean
from rota.config.document import Document
from rota.config.footprint import estimate_mib
from rota.config.units import show_duration
from rota.config.values import (
    DONE,
    CommandEngine,
    DeviceConfig,
    EngineConfig,
    JobsConfig,
    LlamaCppEngine,
    ModelConfig,
    UrlEngine,
)
from rota.core.types import Model, Preload, Scaling

CPU = "cpu"  # the id of the machine's RAM among the devices
IDLE_TIMEOUT_MS = 600_000
UP_AFTER_MS = 5_000
START_TIMEOUTS_MAX = 4  # what a start that goes on writing gets, unless that is stated

# What says which kind a model is, and the keys that only one kind has.
_KINDS = ("cmd", "model", "url")
_KEYS_OF_KIND = {
    "ready": ("cmd", "url"),
    "upstream_model": ("cmd", "url"),
    "port": ("cmd",),
    "cwd": ("cmd",),
    "cmd_stop": ("cmd",),
    "env": ("cmd", "model"),
    **dict.fromkeys(
        ("server", "context", "parallel", "threads", "gpu_layers", "embedding", "args"),
        ("model",),
    ),
    **dict.fromkeys(
        (
            *("scaling", "memory", "device_count", "devices", "stop_grace"),
            *("start_timeout", "start_timeout_max", "silent_after"),
            *("pinned", "exclusive_while_busy"),
        ),
        ("cmd", "model"),
    ),
}

NAME_RULE = "names have 1 to 256 printable characters and no spaces around them"

# The placeholders that stay for each start.
_AT_START = ("PORT", "MODEL")

_PLACEHOLDER = re.compile(r"\$\{([^{}]*)\}")
_SHELL_WORDS = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>&1", "2>"})


@dataclass(frozen=True, slots=True)
class ModelReader:
    """Makes one model's values; every complaint is about this entry."""

    document: Document
    complaints: Complaints
    file: schema.FileKeys
    folder: Path
    name: str
    entry: schema.ModelKeys
    stated_devices: tuple[DeviceConfig, ...]

    def read(self) -> ModelConfig | None:
        """The model, or None when its kind cannot be told or its engine has a problem."""
        before = len(self.complaints.problems)
        self._check_name()
        kind = self._kind()
        if kind is None:
            return None
        self._check_keys(kind)
        engine = self._engine(kind)
        model = self._model(engine)
        start_timeout_ms, start_timeout_ms_max = self._start_timeouts()
        if model is None or len(self.complaints.problems) > before:
            return None
        return ModelConfig(
            model=model,
            engine=engine,
            aliases=self.entry.aliases,
            upstream_model=self.entry.upstream_model,
            start_timeout_ms=start_timeout_ms,
            start_timeout_ms_max=start_timeout_ms_max,
            silent_after_ms=self._shared("silent_after"),
            jobs=self._jobs(),
            websocket_idle_ms=self._shared("websocket_idle"),
            line=self.document.key_place("models", self.name).line,
        )

    def _check_name(self) -> None:
        if not is_name(self.name):
            self._problem(f"{show_name(self.name)} cannot be a name; {NAME_RULE}")
        for index, alias in enumerate(self.entry.aliases):
            if not is_name(alias):
                self._problem(
                    f"{show_name(alias)} cannot be an alias; {NAME_RULE}", "aliases", index
                )

        upstream = self.entry.upstream_model
        if upstream is not None and not is_name(upstream):
            self._problem(f"{show_name(upstream)} cannot be a name; {NAME_RULE}", "upstream_model")

    # --- kind ---

    def _kind(self) -> str | None:
        """Which of `cmd`, `model` and `url` it has; complains unless it is exactly one."""
        stated = [kind for kind in _KINDS if getattr(self.entry, kind) is not None]
        if not stated:
            self._problem(f"`{self.name}` has neither `cmd`, `model` nor `url`: nothing to run")
            return None
        if len(stated) > 1:
            self._problem(
                f"`{self.name}` has both `{stated[0]}` and `{stated[1]}`; keep one", stated[1]
            )
            return None
        if self.entry.engine is not None:
            self._check_engine(self.entry.engine, stated[0])
        return stated[0]

    def _check_engine(self, engine: str, kind: str) -> None:
        if engine != "llama.cpp":
            self._problem(
                f"engine `{engine}` is not known; it is `llama.cpp`, or leave it out and use `cmd`",
                "engine",
            )
        elif kind != "model":
            self._problem(f"engine `llama.cpp` needs `model`, not `{kind}`", "engine")

    def _check_keys(self, kind: str) -> None:
        for key in sorted(self.entry.model_fields_set):
            if kind not in _KEYS_OF_KIND.get(key, _KINDS):
                kinds = " or ".join(f"`{owner}`" for owner in _KEYS_OF_KIND[key])
                place = self.document.key_place("models", self.name, key)
                self.complaints.problem(
                    place, f"`{key}` does nothing with `{kind}`; it goes with {kinds}"
                )

    # --- engines ---

    def _engine(self, kind: str) -> EngineConfig:
        match kind:
            case "cmd":
                return self._command()
            case "model":
                return self._llama_cpp()
            case _:
                return self._url()

    def _command(self) -> CommandEngine:
        entry = self.entry
        assert entry.cmd is not None, entry
        cwd = self.folder if entry.cwd is None else resolve(self.folder, entry.cwd)
        argv = self._argv(entry.cmd, cwd)
        env = self._env()
        has_port = any("${PORT}" in text for text in (*argv, *env.values()))
        if argv and not has_port and entry.port is None:
            self._problem(
                "the command is told no port; write `${PORT}` in it, or state `port:`", "cmd"
            )
        if not cwd.is_dir():
            self._warn(f"there is no folder {cwd}", "cwd")
        ready = self._ready("/health")
        if ready is None and "silent_after" in entry.model_fields_set and entry.silent_after:
            self._warn("`silent_after` does nothing with `ready: none`", "silent_after")
        stop_argv: tuple[str, ...] = ()
        if entry.cmd_stop is not None:
            stop_argv = self._argv(entry.cmd_stop, cwd, "cmd_stop", at_start=("PID", *_AT_START))
        return CommandEngine(argv, ready, env, cwd, entry.port, stop_argv)

    def _argv(
        self, cmd: str, cwd: Path, key: str = "cmd", *, at_start: tuple[str, ...] = _AT_START
    ) -> tuple[str, ...]:
        """A command's words; complains about what only a shell would understand."""
        try:
            words = split_command(self._filled(cmd, key, at_start=at_start))
        except ValueError as error:
            self._problem(f"the command cannot be split: {str(error).lower()}", key)
            return ()
        if not words or not words[0]:
            self._problem("the command is empty", key)
            return ()
        program = words[0]
        if re.match(r"[A-Za-z_][A-Za-z0-9_]*=", program):
            self._problem(f"no shell runs the command; put `{program}` under `env:`", key)
            return tuple(words)
        for word in sorted(_SHELL_WORDS.intersection(words)):
            self._warn(
                f"no shell runs the command: `{word}` is handed to it as a word; use sh -c '…'",
                key,
            )
        if "/" in program and "${" not in program:
            words[0] = program = str(resolve(cwd, program))
        path = self.entry.env.get("PATH")
        if "${" not in program and shutil.which(program, path=path) is None:
            self._warn(f"there is no command {program}", key)
        return tuple(words)

    def _llama_cpp(self) -> LlamaCppEngine:
        entry = self.entry
        assert entry.model is not None, entry
        if entry.args and entry.server is None:
            self._problem("`args` go to a `llama-server`; state `server:` too", "args")
        return LlamaCppEngine(
            model=resolve(self.folder, entry.model),
            server=None if entry.server is None else self._server(entry.server),
            context=entry.context,
            parallel=entry.parallel,
            threads=entry.threads,
            gpu_layers=entry.gpu_layers,
            embedding=entry.embedding,
            args=tuple(
                self._filled(text, "args", index, at_start=())
                for index, text in enumerate(entry.args)
            ),
            env=self._env(),
        )

    def _server(self, text: str) -> Path:
        """A path, or a bare name to be found on the PATH."""
        server = resolve(self.folder, text) if "/" in text else Path(text)
        if shutil.which(server) is None:
            self._warn(f"there is no program {server}", "server")
        return server

    def _url(self) -> UrlEngine:
        assert self.entry.url is not None, self.entry
        url = self.entry.url.rstrip("/")
        problem = url_problem(url)
        if problem:
            self._problem(problem, "url")
        return UrlEngine(url, self._ready(None))

    def _ready(self, default: str | None) -> str | None:
        ready = self.entry.ready
        if ready is None:
            return default
        if ready == "none":
            return None
        if not re.fullmatch(r"/[!-~]*", ready):
            self._problem("`ready` is a path like /health, or none", "ready")
        return ready

    def _env(self) -> dict[str, str]:
        for name in self.entry.env:
            if not name or "=" in name:
                self._problem(f"`{name}` cannot be a variable's name", "env", name)
        return {name: self._filled(text, "env", name) for name, text in self.entry.env.items()}

    def _filled(self, text: str, *route: str | int, at_start: tuple[str, ...] = _AT_START) -> str:
        """The text with macros filled in; the placeholders `at_start` stay for each start."""
        macros = self.file.macros

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            if name not in macros and name not in at_start:
                there = ", ".join(f"${{{known}}}" for known in [*at_start, *macros])
                self._problem(
                    f"nothing is called `${{{name}}}`; there is {there or 'none'}", *route
                )
            return macros.get(name, match[0])

        return _PLACEHOLDER.sub(fill, text)

    def _jobs(self) -> JobsConfig | None:
        keys = self.entry.jobs
        if keys is None:
            return None
        if "ttl" in keys.model_fields_set and keys.ttl > self.file.lease_ttl_max:
            longest = show_duration(self.file.lease_ttl_max)
            self._warn(f"no lease lasts longer than `lease_ttl_max`, {longest}", "jobs", "ttl")
        return JobsConfig(
            submit=keys.submit,
            poll=keys.poll or f"{keys.submit}/{{id}}",
            id=keys.id,
            status=keys.status,
            done=frozenset(word.lower() for word in keys.done) or DONE,
            ttl_ms=keys.ttl,
            keep_ms=keys.keep,
        )

    # --- when ---

    def _model(self, engine: EngineConfig) -> Model | None:
        is_external = isinstance(engine, UrlEngine)
        scaling = Scaling(min=0, max=1, idle_timeout_ms=0) if is_external else self._scaling()
        if scaling is None:
            return None
        return Model(
            name=self.name,
            scaling=scaling,
            memory_mib=0 if is_external else self._memory_mib(engine, scaling),
            device_count=0 if is_external else self.entry.device_count,
            devices=None if is_external else self._devices(engine),
            slots=self._slots(),
            queue_max=self._shared("queue_max"),
            activation_wait_ms=self._shared("activation_wait"),
            queue_wait_ms=self._shared("queue_wait"),
            patience_ms=self._shared("patience"),
            hold_ms=self._shared("hold"),
            hold_finished_ms=self._shared("hold_finished"),
            stop_grace_ms=self._shared("stop_grace"),
            priority=self._shared("priority"),
            rejects_when_full=self._stated("when_full") == "reject",
            is_pinned=self._is_pinned(scaling),
            is_exclusive_while_busy=self.entry.exclusive_while_busy,
            scale_up_after_ms=self._up_after_ms(scaling),
            preload=self._preload(scaling, is_external=is_external),
        )

    def _shared(self, key: str) -> int:
        value = self._stated(key)
        assert isinstance(value, int), (key, value)
        return value

    def _stated(self, key: str) -> object:
        """What the model states, else what `defaults` does, else the schema's default."""
        source = self.entry if key in self.entry.model_fields_set else self.file.defaults
        return getattr(source, key)

    def _up_after_ms(self, scaling: Scaling) -> int:
        if self._stated("when_full") == "reject" and scaling.max > max(scaling.min, 1):
            self._warn(
                f"with `when_full: reject` no more than {max(scaling.min, 1)} of `max` "
                f"{scaling.max} replicas come up: one more is for those who wait, and nobody does"
            )
        own, default = self.entry.scaling.up_after, self.file.defaults.scaling.up_after
        stated = default if own is None else own
        return UP_AFTER_MS if stated is None else stated

    def _preload(self, scaling: Scaling, *, is_external: bool) -> Preload:
        preload = Preload(self.entry.preload)
        if preload is not Preload.NEVER and (scaling.is_off or is_external):
            what = "that someone else runs" if is_external else "that is off"
            self._warn(f"`preload` does nothing for a model {what}", "preload")
            return Preload.NEVER
        return preload

    def _is_pinned(self, scaling: Scaling) -> bool:
        if self.entry.pinned and scaling.is_off:
            self._warn("`pinned` does nothing while the model is off", "pinned")
        return self.entry.pinned

    def _start_timeouts(self) -> tuple[int, int]:
        """`start_timeout` and `start_timeout_max`."""
        stated = self.entry.model_fields_set
        timeout_ms = self._shared("start_timeout")
        source = self.entry if "start_timeout_max" in stated else self.file.defaults
        timeout_ms_max = source.start_timeout_max
        if timeout_ms_max is None:
            return timeout_ms, START_TIMEOUTS_MAX * timeout_ms
        if timeout_ms > timeout_ms_max:
            own = [key for key in ("start_timeout_max", "start_timeout") if key in stated]
            where = ("models", self.name, own[0]) if own else ("defaults", "start_timeout_max")
            place = self.document.value_place(*where)
            self.complaints.problem(place, "`start_timeout` is over `start_timeout_max`")
        return timeout_ms, timeout_ms_max

    def _slots(self) -> int:
        """llama.cpp's own parallelism is closer to the model than `defaults` are."""
        if self.entry.model is not None and "concurrency" not in self.entry.model_fields_set:
            return self.entry.parallel
        return self._shared("concurrency")

    def _scaling(self) -> Scaling | None:
        """Scaling, or None after a complaint. `min` and `max` are taken together from the model
        or together from `defaults`; `idle_timeout` on its own."""
        own, default = self.entry.scaling, self.file.defaults.scaling
        bounds = own if own.min is not None or own.max is not None else default
        if bounds.min is None and bounds.max is None:
            return self._unscaled(has_idle_timeout=own.idle_timeout is not None)
        low = bounds.min or 0
        high = low if bounds.max is None else bounds.max
        if low > high:
            where = ("models", self.name) if bounds is own else ("defaults",)
            place = self.document.value_place(*where, "scaling", "min")
            self.complaints.problem(place, f"`min` {low} is over `max` {high}")
            return None
        idle = default.idle_timeout if own.idle_timeout is None else own.idle_timeout
        return Scaling(low, high, IDLE_TIMEOUT_MS if idle is None else idle)

    def _unscaled(self, *, has_idle_timeout: bool) -> Scaling:
        if has_idle_timeout:
            self._warn("`idle_timeout` alone leaves the model off; add `max: 1`", "scaling")
        else:
            self._warn(f"`{self.name}` states no scaling, so it is off; add `scaling: {{max: 1}}`")
        return Scaling(min=0, max=0, idle_timeout_ms=IDLE_TIMEOUT_MS)

    def _memory_mib(self, engine: EngineConfig, scaling: Scaling) -> int | None:
        """As stated, else estimated from a GGUF file, else None: the whole device."""
        memory_mib = self.entry.memory
        if isinstance(engine, LlamaCppEngine):
            estimate = estimate_mib(engine.model, engine.context * engine.parallel)
            if estimate is None:
                self._warn(f"{_say_unreadable(engine.model)}; it cannot be started", "model")
                return memory_mib
            memory_mib = estimate if memory_mib is None else memory_mib
        if memory_mib is None and not scaling.is_off:
            self._warn(
                f"`{self.name}` states no `memory`, so it takes its device whole and shares it "
                "with nothing"
            )
        return memory_mib

    def _devices(self, engine: EngineConfig) -> frozenset[str] | None:
        """The ids it may be placed on. Where both RAM and GPUs are stated, the embedded llama.cpp
        (whose wheel computes on the CPU) goes to the RAM, and all else to the GPUs."""
        ids = {device.id for device in self.stated_devices}
        chosen = frozenset(self.entry.devices)
        if chosen and ids:
            self._check_devices(ids)
        if chosen:
            return chosen
        is_embedded = isinstance(engine, LlamaCppEngine) and engine.server is None
        if CPU not in ids or len(ids) == 1:
            return None
        return frozenset({CPU}) if is_embedded else frozenset(ids - {CPU})

    def _check_devices(self, ids: set[str]) -> None:
        for index, device in enumerate(self.entry.devices):
            if device not in ids:
                self._problem(
                    f"there is no device `{device}`{did_you_mean(device, ids)}", "devices", index
                )

    # --- complaints ---

    def _problem(self, text: str, *route: str | int) -> None:
        self.complaints.problem(self._place(route), text)

    def _warn(self, text: str, *route: str | int) -> None:
        self.complaints.warn(self._place(route), text)

    def _place(self, route: tuple[str | int, ...]) -> Place:
        if not route:
            return self.document.key_place("models", self.name)
        return self.document.value_place("models", self.name, *route)


def split_command(text: str) -> list[str]:
    """A command's words, as a shell would split it.

    Raises:
        ValueError: a quote is never closed.
    """
    # A backslash at the end of a line joins it to the next, as in a shell.
    return shlex.split(text.replace("\\\n", " "))


def resolve(folder: Path, text: str) -> Path:
    """A path of the file: `~` is the home folder, a relative one starts at `folder`."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # no such user
        path = Path(text)
    return Path(os.path.normpath(folder / path))


def _say_unreadable(file: Path) -> str:
    try:
        exists = file.is_file()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return f"{file} is not a GGUF file" if exists else f"there is no file {file}"


def is_name(text: str) -> bool:
    """Whether a text can name something in logs and answers."""
    return 0 < len(text) <= 256 and text == text.strip() and text.isprintable()


def show_name(text: str) -> str:
    """A name that may be none, quoted for a complaint."""
    return f"`{text[:60].encode('unicode_escape').decode()}`"
