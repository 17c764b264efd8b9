"""What a configuration file says, checked: frozen values with integer units.

Made by `rota.config.load` from YAML and by nothing else outside tests. Durations are
milliseconds, memory is MiB. How a model is run (`engine`) stands beside when it is run
(`model`, the core's view of the same entry).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rota.core.coexistence import FREE, Coexistence
from rota.core.types import Eviction, Model


@dataclass(frozen=True, slots=True)
class CommandEngine:
    """Any command that serves HTTP.

    Args:
        argv: the command, split as a shell would split it but run without one; `${PORT}` and
            `${MODEL}` are filled in at each start, wherever they stand.
        ready: the path probed until it answers 200; None = ready at once.
        env: added to rota's own environment; the same placeholders are filled in.
        port: a fixed port; None = a free one is chosen at each start.
        stop_argv: what is run to end it, in place of SIGTERM; `${PID}`, the engine's own, is
            filled in too. Empty = SIGTERM it is.
    """

    argv: tuple[str, ...]
    ready: str | None = "/health"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    port: int | None = None
    stop_argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LlamaCppEngine:
    """llama.cpp on a GGUF file: embedded from the `xllamacpp` wheel, or `llama-server`.

    Args:
        model: the GGUF file.
        server: the `llama-server` to run; None = the embedded one.
        context: tokens per slot.
        parallel: slots.
        gpu_layers: layers on the GPU; None = the engine's default.
        embedding: serve embeddings (mean pooling) instead of text.
        args: more arguments for `llama-server`; refused for the embedded engine.
    """

    model: Path
    server: Path | None = None
    context: int = 4096
    parallel: int = 4
    threads: int | None = None
    gpu_layers: int | None = None
    embedding: bool = False
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UrlEngine:
    """A server that someone else runs, at an `http://` or `https://` URL.

    `ready` is the path probed once before use; None = not probed.
    """

    url: str
    ready: str | None = None


EngineConfig = CommandEngine | LlamaCppEngine | UrlEngine


DONE = frozenset(
    {
        *{"completed", "complete", "succeeded", "success", "finished", "done", "incomplete"},
        *{"failed", "failure", "error", "cancelled", "canceled", "expired"},
    }
)
"""What the job interfaces of the field call an end: OpenAI's videos and background responses,
Replicate's predictions, ComfyUI's history, and those made after them."""


@dataclass(frozen=True, slots=True)
class JobsConfig:
    """Work that a POST starts, that goes on after its answer, and that is asked after by an id.

    Args:
        submit: the path of that POST.
        poll: the path to ask under; `{id}` is one whole segment of it.
        id: where the answer has the job's id; dots go into objects.
        status: where it has how the job is.
        done: what that says, in lower case, when the work is over.
        ttl_ms: a job's replica counts as in use for this long at most.
        keep_ms: and for this long after the end, for its result to be fetched.
    """

    submit: str = "/v1/videos"
    poll: str = "/v1/videos/{id}"
    id: str = "id"
    status: str = "status"
    done: frozenset[str] = DONE
    ttl_ms: int = 3_600_000
    keep_ms: int = 5_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One entry under `models:`.

    Args:
        upstream_model: what the engine calls it; None = as we do.
        start_timeout_ms: a start fails so long after it began, or after the last output.
        start_timeout_ms_max: and so long after it began in any case.
        silent_after_ms: how long a ready engine may answer nothing; 0 = for ever.
        jobs: None = a request's work is over when its answer is.
        websocket_idle_ms: an open web socket counts as use until it has been silent for so
            long; 0 = for as long as it is open.
    """

    model: Model
    engine: EngineConfig
    aliases: tuple[str, ...] = ()
    upstream_model: str | None = None
    start_timeout_ms: int = 300_000
    start_timeout_ms_max: int = 1_200_000
    silent_after_ms: int = 60_000
    jobs: JobsConfig | None = None
    websocket_idle_ms: int = 0
    line: int = 0  # where it stands in the file

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def upstream_name(self) -> str:
        """The name that its engine is asked for, whichever of its names a client used."""
        return self.name if self.upstream_model is None else self.upstream_model


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One entry under `devices:`: a stated budget.

    `visible` is what an engine is told in `CUDA_VISIBLE_DEVICES` when it is placed here
    (a GPU's UUID); None = it is told nothing.
    """

    id: str
    memory_mib: int
    visible: str | None = None


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """One entry under `keys:`: who may ask, and how.

    Args:
        digest: the SHA-256 of the key; the key itself is nowhere.
        priority: instead of the model's, if any.
        hold_ms, hold_finished_ms, patience_ms: of a request that states none; None = the model's.
        patience_ms_min: the shortest patience that a request may ask for where the model's is
            longer; None = that of this key, else the model's.
    """

    name: str
    digest: bytes = field(repr=False)
    priority: int | None = None
    hold_ms: int | None = None
    hold_finished_ms: int | None = None
    patience_ms: int | None = None
    patience_ms_min: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration.

    Args:
        devices: as stated; empty = found on the machine.
        state_dir: where the lock, engine logs and records are kept.
        lease_ttl_ms_max: the longest that a lease lasts, its renewals included.
        eviction: what decides who makes room, among those who may.
        coexistence: which models may be loaded together, by the file's groups or matrix.
        keys: who may ask for models; empty = whoever can connect.
        allow_open: listen beyond loopback although there are no keys.
        dialect: whose keys the file has: `rota` or `llama-swap`.
        warnings: what the author should know, each with its line; not errors.
    """

    host: str
    port: int
    models: Mapping[str, ModelConfig]
    devices: tuple[DeviceConfig, ...] = ()
    state_dir: Path = Path("state")
    queue_bytes_max: int = 512 * 1024 * 1024
    hold_ms_max: int = 300_000
    lease_ttl_ms_max: int = 3_600_000
    body_bytes_max: int = 64 * 1024 * 1024
    eviction: Eviction = Eviction.VALUE
    coexistence: Coexistence = FREE
    keys: Mapping[str, KeyConfig] = field(default_factory=dict)
    allow_open: bool = False
    path: Path | None = None
    dialect: str = "rota"
    warnings: tuple[str, ...] = ()

    def resolve(self, name: str) -> str:
        """The model's own name for a name or an alias; an unknown name comes back as it is."""
        if name in self.models:
            return name
        for model in self.models.values():
            if name in model.aliases:
                return model.name
        return name
