"""What llama-swap's file says, with its defaults and what it checks of each value alone.

What it checks of values together (names that are there twice, groups, peers) is in `rules`.
Settings that rota has no counterpart for are read as well: a file that llama-swap refuses is
refused here, and each of them is told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rota.config.complaints import Complaints, Place, did_you_mean
from rota.config.llama_swap.fields import Fields, Item
from rota.config.llama_swap.macros import DEFAULT_PROXY, START_PORT
from rota.config.llama_swap.notes import (
    LOST_AT_THE_TOP,
    LOST_FILTER,
    LOST_OF_A_MODEL,
    LOST_PEER_KEY,
    Note,
)
from rota.config.llama_swap.source import Value

HEALTH_S, HEALTH_S_MIN = 120, 15
UNLOAD_S = 10
SLOTS = 10
COMFYUI, COMFYUI_SLOTS = "comfyui_auto", 50  # its page polls, so it gets more slots and no sockets

TOP_KEYS = frozenset(
    {
        *LOST_AT_THE_TOP,
        *("models", "macros", "groups", "matrix", "routing", "peers", "hooks", "apiKeys"),
        *("healthCheckTimeout", "globalTTL", "unloadTimeout", "startPort"),
        *("vramBudgetGB", "listeners", "apiKeyModels"),
    }
)

_LOG_TARGETS = ("proxy", "upstream", "both", "none")
_MODALITIES = ("text", "audio", "image")
_DURATION = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+|0", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(slots=True)
class ModelSettings:
    """One entry under `models:`.

    Args:
        ttl_s, unload_s: with the global ones filled in; 0 = never.
        slots: `concurrencyLimit`.
        memory_gib: Quartermaster's `estVramGB`; 0 = not known.
        by_id: the keys of `filters.setParamsByID`: names that the model answers to.
    """

    name: str
    fields: Fields
    cmd: str
    cmd_stop: str
    proxy: str
    check: str
    aliases: list[Item]
    env: list[Item]
    ttl_s: int
    unload_s: int
    upstream: str
    slots: int
    ignores_sockets: bool
    memory_gib: float
    by_id: list[Item]
    notes: list[Note] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return self.fields.place


@dataclass(slots=True)
class GroupSettings:
    """One group; `members` as written."""

    name: str
    place: Place
    members: list[Item]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


@dataclass(slots=True)
class MatrixSettings:
    """The matrix; `sets` in the order of the file."""

    fields: Fields
    vars: dict[str, Item]
    costs: dict[str, int]
    sets: dict[str, Item]


@dataclass(slots=True)
class RouterSettings:
    """Which models may stand together, as one place in the file says it."""

    groups: dict[str, GroupSettings]
    matrix: MatrixSettings | None
    use: str = ""

    @property
    def is_stated(self) -> bool:
        return bool(self.groups or self.matrix or self.use)


@dataclass(slots=True)
class PeerSettings:
    """One peer: where it is and what it has."""

    name: str
    fields: Fields
    proxy: str
    models: list[Item]
    notes: list[Note]


@dataclass(slots=True)
class Settings:
    """The file.

    Args:
        health_s: how long a start may take.
        legacy, router: who may stand together, said at the top or under `routing`.
        hold_ms, patience_ms: Quartermaster's; None = not stated.
        budget_gib: Quartermaster's `vramBudgetGB`; 0 = groups decide.
        key_models: Quartermaster's `apiKeyModels`: the keys that open some models only.
        listeners: Quartermaster's: address → groups.
    """

    fields: Fields
    health_s: int
    ttl_s: int
    unload_s: int
    models: dict[str, ModelSettings]
    legacy: RouterSettings
    router: RouterSettings
    peers: dict[str, PeerSettings]
    priorities: dict[str, int]
    preload: list[Item]
    api_keys: list[Item]
    key_models: frozenset[str]
    listeners: dict[str, list[Item]]
    budget_gib: float
    hold_ms: int | None
    patience_ms: int | None
    notes: list[Note]


def read(tree: dict[str, Value], complaints: Complaints) -> Settings:
    """The settings; what is wrong with a value is complained about."""
    return _Reader(Fields(tree, Place(), complaints)).read()


@dataclass(slots=True)
class _Reader:
    top: Fields
    notes: list[Note] = field(default_factory=list)

    def read(self) -> Settings:
        top = self.top
        self._check_numbers()
        self._check_lost()
        ttl_s, unload_s = top.whole("globalTTL"), top.whole("unloadTimeout") or UNLOAD_S
        routing = top.under("routing")
        router = routing.under("router")
        fifo = routing.under("scheduler").under("settings").under("fifo")
        settings = Settings(
            fields=top,
            health_s=max(HEALTH_S_MIN, top.whole("healthCheckTimeout", HEALTH_S)),
            ttl_s=ttl_s,
            unload_s=unload_s,
            models={
                name: self._model(name, entry, ttl_s, unload_s)
                for name, entry in top.each_of("models")
            },
            legacy=_router(top),
            router=_router(router.under("settings"), router.text("use")),
            peers={
                name: _peer(name, entry) for name, entry in top.each_of("peers") if entry.entries
            },
            priorities=fifo.wholes("priority"),
            preload=top.under("hooks").under("on_startup").texts("preload"),
            api_keys=top.texts("apiKeys"),
            key_models=frozenset(name for name, _ in _scopes(top)),
            listeners={name: entry.texts("groups") for name, entry in top.each_of("listeners")},
            budget_gib=max(0.0, top.number("vramBudgetGB")),
            hold_ms=max(0, fifo.whole("holdMs")) if fifo.has("holdMs") else None,
            patience_ms=max(0, fifo.whole("patienceMs")) if fifo.has("patienceMs") else None,
            notes=self.notes,
        )
        self._check_use(routing)
        self._check_keys()
        return settings

    # --- the top ---

    def _check_numbers(self) -> None:
        top = self.top
        if top.whole("startPort", START_PORT) < 1:
            top.problem("startPort", "is under 1")
        for key in ("globalTTL", "unloadTimeout"):
            if top.whole(key) < 0:
                top.problem(key, "is under 0")
        if top.has("startPort"):
            self._lose("startPort", "rota gives each start a free port; `port:` fixes one")

    def _check_lost(self) -> None:
        """Everything without counterpart, and whether llama-swap would take it."""
        top = self.top
        for key in ("logLevel", "logTimeFormat"):
            top.text(key)
        for key in ("logRequests", "sendLoadingState", "includeAliasesInList"):
            top.truth(key)
        for key in ("metricsMaxInMemory", "captureBuffer"):
            top.whole(key)
        if top.text("logToStdout", "proxy") not in _LOG_TARGETS:
            top.problem("logToStdout", f"is none of {', '.join(_LOG_TARGETS)}")
        top.under("ui").under("activity").texts("session_id")
        self._check_performance(top.under("performance"))
        if top.has("store"):
            self._check_store(top.under("store"))
        for item in top.under("upstream").texts("ignorePaths"):
            _check_pattern(item, top.complaints)
        for key in ("profiles", "selectors", "slotCache"):
            top.entries_of(key)
        for key, text in LOST_AT_THE_TOP.items():
            if top.has(key):
                self._lose(key, text)

    def _check_performance(self, performance: Fields) -> None:
        performance.truth("disabled")
        if not performance.has("every"):
            return
        seconds = _seconds(performance.text("every"))
        if seconds is None:
            performance.problem("every", "is not a duration like 5s")
        elif seconds < 5:
            performance.problem("every", "is under 5s")

    def _check_store(self, store: Fields) -> None:
        path = Path(store.text("path"))
        if not store.text("path").strip():
            store.problem("path", "is empty")
        elif path.is_dir():
            store.problem("path", "is a directory")
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            store.problem("path", "cannot be written")

    def _check_use(self, routing: Fields) -> None:
        scheduler = routing.under("scheduler")
        if scheduler.text("use") not in {"", "fifo"}:
            scheduler.problem("use", "names no scheduler; there is `fifo`")

    def _check_keys(self) -> None:
        for index, item in enumerate(self.top.texts("apiKeys")):
            if not item.text or " " in item.text:
                said = "is empty" if not item.text else "has a space in it"
                self.top.complaints.problem(item.place, f"item {index + 1} of `apiKeys` {said}")
        for key, value in self.top.unknown():
            hint = did_you_mean(key, TOP_KEYS)
            if "did you mean" in hint:
                text = f"no key of llama-swap's, and without effect there too{hint}"
                self.notes.append(Note(value.at, key, text))

    def _lose(self, key: str, text: str) -> None:
        self.notes.append(Note(self.top.at(key), key, text, is_lost=True))

    # --- models ---

    def _model(self, name: str, fields: Fields, ttl_s: int, unload_s: int) -> ModelSettings:
        slots = max(0, fields.whole("concurrencyLimit")) or SLOTS
        is_comfyui = name == COMFYUI
        ignores_sockets = fields.under("compat").truth("ignoreWebsockets") or is_comfyui
        own_ttl_s, own_unload_s = fields.whole("ttl", -1), fields.whole("unloadTimeout")
        if own_ttl_s < -1:
            fields.problem("ttl", "is under -1")
        if own_unload_s < 0:
            fields.problem("unloadTimeout", "is under 0")
        model = ModelSettings(
            name=name,
            fields=fields,
            cmd=fields.text("cmd"),
            cmd_stop=fields.text("cmdStop"),
            proxy=fields.text("proxy", DEFAULT_PROXY),
            check=fields.text("checkEndpoint", "/health").strip(),
            aliases=fields.texts("aliases"),
            env=fields.texts("env"),
            ttl_s=ttl_s if own_ttl_s == -1 else own_ttl_s,
            unload_s=own_unload_s or unload_s,
            upstream=fields.text("useModelName"),
            slots=max(slots, COMFYUI_SLOTS) if is_comfyui else slots,
            ignores_sockets=ignores_sockets,
            memory_gib=max(0.0, fields.number("estVramGB")),
            by_id=[
                Item(key, value.at)
                for key, value in fields.under("filters").entries_of("setParamsByID").items()
            ],
        )
        model.notes += self._lost_of(fields)
        return model

    def _lost_of(self, fields: Fields) -> Iterator[Note]:
        for key in ("name", "description"):
            fields.text(key)
        for key in ("unlisted", "sendLoadingState"):
            fields.truth(key)
        fields.number("estRamGB")
        fields.entries_of("metadata")
        fields.truth("slotCachePreamble")
        fields.whole("healthCheckTimeout")  # the global one goes over it
        _check_timeouts(fields)
        self._check_capabilities(fields.under("capabilities"))
        for key, text in LOST_OF_A_MODEL.items():
            if fields.has(key):
                yield Note(fields.at(key), key, text, is_lost=True)
        yield from _lost_filters(fields)
        if fields.has("healthCheckTimeout"):
            text = "the one at the top of the file goes over it, there too"
            yield Note(fields.at("healthCheckTimeout"), "healthCheckTimeout", text)
        for key, value in fields.unknown():
            yield Note(value.at, key, "no key of llama-swap's, and without effect there too")

    def _check_capabilities(self, fields: Fields) -> None:
        for key in ("in", "out"):
            for item in fields.texts(key):
                if item.text not in _MODALITIES:
                    said = f"`{item.text[:40]}` is none of {', '.join(_MODALITIES)}"
                    fields.complaints.problem(item.place, said)
        for key in ("tools", "reranker"):
            fields.truth(key)
        if fields.whole("context") < 0:
            fields.problem("context", "is under 0")


def _router(fields: Fields, use: str = "") -> RouterSettings:
    return RouterSettings(_groups(fields), _matrix(fields), use)


def _groups(fields: Fields) -> dict[str, GroupSettings]:
    return {
        name: GroupSettings(
            name=name,
            place=entry.place,
            members=entry.texts("members"),
            swap=entry.truth("swap", default=True),
            exclusive=entry.truth("exclusive", default=True),
            persistent=entry.truth("persistent"),
        )
        for name, entry in fields.each_of("groups")
    }


def _matrix(fields: Fields) -> MatrixSettings | None:
    if not fields.has("matrix"):
        return None
    matrix = fields.under("matrix")
    return MatrixSettings(
        fields=matrix,
        vars=matrix.texts_by_name("vars"),
        costs=matrix.wholes("evict_costs"),
        sets=matrix.texts_by_name("sets"),
    )


def _peer(name: str, fields: Fields) -> PeerSettings:
    peer = PeerSettings(name, fields, fields.text("proxy"), fields.texts("models"), [])
    if not peer.proxy:
        fields.complaints.problem(fields.place, f"the peer `{name}` has no `proxy`")
    if not peer.models:
        fields.complaints.problem(fields.place, f"the peer `{name}` has no `models`")
    if fields.text("apiKey"):
        peer.notes.append(Note(fields.at("apiKey"), "apiKey", LOST_PEER_KEY))
    peer.notes += _lost_filters(fields)
    _check_timeouts(fields)
    if fields.has("timeouts"):
        text = LOST_OF_A_MODEL["timeouts"]
        peer.notes.append(Note(fields.at("timeouts"), "timeouts", text, is_lost=True))
    return peer


def _lost_filters(fields: Fields) -> Iterator[Note]:
    filters = fields.under("filters")
    for key in ("stripParams", "strip_params"):
        filters.text(key)
    filters.entries_of("setParams")
    for key in ("stripParams", "strip_params", "setParams", "setParamsByID"):
        if filters.has(key):
            yield Note(filters.at(key), f"filters.{key}", LOST_FILTER, is_lost=True)


def _check_timeouts(fields: Fields) -> None:
    timeouts = fields.under("timeouts")
    for key in (
        *("connect", "keepalive", "responseHeader"),
        *("tlsHandshake", "expectContinue", "idleConn"),
    ):
        timeouts.whole(key)


def _check_pattern(item: Item, complaints: Complaints) -> None:
    """Nearly the expressions that Go has; what only one of the two knows is rare."""
    try:
        re.compile(item.text)
    except re.error as error:
        complaints.problem(item.place, f"is not a regular expression: {error}")


def _scopes(top: Fields) -> Iterator[tuple[str, list[Item]]]:
    """The keys that open some models only; one with an empty list opens all."""
    scopes = top.under("apiKeyModels")
    for key in scopes.entries:
        models = scopes.texts(key)
        if models:
            yield key, models


def _seconds(text: str) -> float | None:
    """A duration of Go's; None: it is none."""
    if not _DURATION.fullmatch(text):
        return None
    sign = -1 if text.startswith("-") else 1
    parts = _DURATION_PART.findall(text)
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)
