"""Our file, written from llama-swap's: its rules in our keys, and in comments what became of the
rest, each thing where it stood.

One decision is made here that no key of the file states. llama-swap's clients hold the line for
as long as a load takes, so `activation_wait` is the time that a load may take; rota's own 45 s
are for clients that come back by themselves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rota.config.addresses import LISTEN, is_loopback, split_listen
from rota.config.complaints import Complaints, Place
from rota.config.llama_swap.command import lay_out, split
from rota.config.llama_swap.engines import address_of, variables_of
from rota.config.llama_swap.notes import Note
from rota.config.llama_swap.rules import Catalog, PeerModel
from rota.config.llama_swap.settings import SLOTS, UNLOAD_S, GroupSettings, ModelSettings
from rota.config.llama_swap.standing import Standing, standing_of
from rota.config.llama_swap.writing import Page, flow, quoted
from rota.config.units import DURATION_MS_MAX, show_duration

PRIORITY_MAX = 1_000
SLOTS_MAX = 10_000

_MEANT = re.compile(r"\$(?=\{([^{}]*)\})")
_RELATIVE = re.compile(r"\.{1,2}/.*|[^/~$:-][^:$=]*\.gguf")


@dataclass(slots=True)
class Rendering:
    """A page in the making.

    Args:
        title: the files' names.
        environ: the variables there are; engines inherit them from rota.
        environment: those that the files ask for by name.
        notes: everything that was told, in the order of the page.
    """

    catalog: Catalog
    complaints: Complaints
    title: str
    environ: Mapping[str, str]
    environment: frozenset[str]
    page: Page = field(default_factory=Page)
    notes: list[Note] = field(default_factory=list)

    @property
    def running(self) -> list[ModelSettings]:
        """The models that there is a command for."""
        return [model for model in self.catalog.models.values() if split(model.cmd)]

    @property
    def has_models(self) -> bool:
        return bool(self.running or self.catalog.peers)

    def run(self) -> None:
        """Write the page."""
        models = self.running
        standing = standing_of(self.catalog, models)
        self.notes += standing.notes
        self._head(standing, models)
        self._listen()
        self._devices(standing)
        self._defaults()
        self._keys()
        self._rest_of_the_top()
        self._groups(standing)
        self._matrix()
        self._models(standing)

    # --- the top ---

    def _head(self, standing: Standing, models: list[ModelSettings]) -> None:
        page = self.page
        page.comment(f"Made of {self.title} by `rota import llama-swap`.")
        page.comment("")
        page.comment(
            "What has no counterpart here, or another one than may be expected, is told where it "
            "stood."
        )
        for text in self._remarks(standing, models):
            page.comment("")
            page.comment(text)
        if any(_has_dollar(model) for model in models):
            page.gap()
            page.comment("`${dollar}{…}` is `${…}` as it is: text for a program, not a macro.")
            page.add('macros: {dollar: "$"}')

    def _remarks(self, standing: Standing, models: list[ModelSettings]) -> Iterable[str]:
        if models and not standing.has_sizes:
            yield (
                "llama-swap does not know what its models take, so rota does not either: each is "
                "given 1 MiB of a device that stands for the machine, and the rules alone decide "
                "who is loaded together. With real `devices:` and each model's `memory:` rota "
                "decides by what fits, and needs no rules."
            )
        if any(_is_relative(word, n) for m in models for n, word in enumerate(split(m.cmd))):
            yield (
                "Relative paths start at the folder of this file (llama-swap's: at the folder it "
                "was started in); `cwd:` of a model says another."
            )
        if self.environment:
            names = ", ".join(sorted(self.environment))
            yield (
                f"Filled in from the environment of the import: {names}. Where that is a secret, "
                "this file has one."
            )

    def _listen(self) -> None:
        """Quartermaster's listeners: one of them can be kept."""
        listeners = self.catalog.settings.listeners
        if not listeners:
            self._step_aside()
            return
        fields = self.catalog.settings.fields
        address = min(listeners)
        host, _, port = address.rpartition(":")
        listen = f"{host or '0.0.0.0'}:{port}"  # noqa: S104  # what `:1250` means there
        self.page.gap()
        note = Note(
            fields.at("listeners"),
            "listeners",
            "addresses with models of their own are not built yet: one address has all models",
        )
        self._tell([note], 0)
        if is_loopback(host) or self.catalog.settings.api_keys:
            self.page.add(f"listen: {quoted(listen)}", fields.at("listeners"))
        else:
            self.page.comment(f"listen: {listen}   # others can reach it: needs `keys:` or --open")

    def _step_aside(self) -> None:
        """Another port where a model has rota's own: llama-swap's is told it when it starts."""
        _, own = split_listen(LISTEN)
        taken = {address_of(model, self.complaints).port for model in self.running}
        if own in taken:
            free = next(port for port in range(own + 1, own + len(taken) + 1) if port not in taken)
            self.page.gap()
            self.page.add(f"listen: 127.0.0.1:{free}   # {own} is a model's")

    def _devices(self, standing: Standing) -> None:
        name, memory = standing.device
        fields = self.catalog.settings.fields
        self.page.gap()
        self.page.add("devices:", fields.at("vramBudgetGB"))
        what = "vramBudgetGB" if standing.has_sizes else "all there is; engines see every GPU"
        self.page.add(f"  {name}: {{memory: {memory}}}   # {what}")

    def _defaults(self) -> None:
        settings, page = self.catalog.settings, self.page
        fields = settings.fields
        start = _seconds(settings.health_s)
        page.gap()
        page.add("defaults:", fields.at("globalTTL"))
        idle = _seconds(settings.ttl_s)
        said = "globalTTL" if settings.ttl_s else "globalTTL: models stay until they must leave"
        page.add(f"  scaling: {{max: 1, idle_timeout: {idle}}}   # {said}")
        place = fields.at("healthCheckTimeout")
        page.add(f"  start_timeout: {start}   # healthCheckTimeout", place)
        page.add(f"  activation_wait: {start}   # a request waits for as long as a load may take")
        if settings.unload_s != UNLOAD_S:
            stop = _seconds(settings.unload_s)
            page.add(f"  stop_grace: {stop}   # unloadTimeout", fields.at("unloadTimeout"))
        if settings.hold_ms is not None:
            hold = _ms(settings.hold_ms)
            page.add(f"  hold: {hold}   # holdMs", fields.at("routing"))
            page.add(f"  hold_finished: {hold}")
        if settings.patience_ms is not None:
            page.add(f"  patience: {_ms(settings.patience_ms)}   # patienceMs")

    def _keys(self) -> None:
        """Keys by their hash; one that opens some models only is left out, since here it would
        open all."""
        settings, page = self.catalog.settings, self.page
        digests: dict[str, Place] = {}
        for item in settings.api_keys:
            if item.text not in settings.key_models:
                digests.setdefault(hashlib.sha256(item.text.encode()).hexdigest(), item.place)
        if not settings.api_keys:
            return
        page.gap()
        page.comment("By their hashes (`rota keys hash`): the keys themselves stand nowhere here.")
        if settings.key_models:
            place = settings.fields.at("apiKeyModels")
            text = "keys for some models only are not built yet; those are left out"
            self._tell([Note(place, "apiKeyModels", text)], 0)
        if not digests:
            settings.fields.problem("apiKeyModels", "leaves no key that opens all models")
        page.add("keys:", settings.fields.at("apiKeys"))
        for number, (digest, place) in enumerate(digests.items(), start=1):
            page.add(f"  key-{number}: {{sha256: {digest}}}", place)

    def _rest_of_the_top(self) -> None:
        notes = self.catalog.settings.notes
        if notes:
            self.page.gap()
            self._tell(notes, 0)

    # --- who may stand together ---

    def _groups(self, standing: Standing) -> None:
        page = self.page
        if not standing.groups:
            return
        page.gap()
        page.add("groups:", self.catalog.settings.fields.at("groups"))
        for group in standing.groups:
            for text in _of_group(group, standing):
                page.comment(text, 2)
            page.add(f"  {quoted(group.name)}:", group.place)
            for key in ("swap", "exclusive", "persistent"):
                is_so = getattr(group, key)
                if key != "persistent" or is_so:
                    page.add(f"    {key}: {'true' if is_so else 'false'}")
            page.add("    members:")
            for item in group.members:
                page.add(f"      - {quoted(item.text)}", item.place)

    def _matrix(self) -> None:
        matrix, page = self.catalog.matrix, self.page
        if matrix is None:
            return
        page.gap()
        page.add("matrix:", matrix.fields.place)
        for key, entries in (
            ("vars", {name: (item.text, item.place) for name, item in matrix.vars.items()}),
            (
                "evict_costs",
                {
                    name: (str(cost), matrix.fields.under("evict_costs").at(name))
                    for name, cost in matrix.costs.items()
                },
            ),
            ("sets", {name: (item.text, item.place) for name, item in matrix.sets.items()}),
        ):
            if entries:
                page.add(f"  {key}:", matrix.fields.at(key))
            for name, (text, place) in entries.items():
                shown = text if key == "evict_costs" else quoted(text)
                page.add(f"    {quoted(name)}: {shown}", place)

    # --- models ---

    def _models(self, standing: Standing) -> None:
        page = self.page
        page.gap()
        fields = self.catalog.settings.fields
        page.add("models:" if self.has_models else "models: {}", fields.at("models"))
        for n, model in enumerate(self.catalog.models.values()):
            if n:
                page.gap()
            if split(model.cmd):
                self._model(model, standing)
            else:
                text = f"`{model.name}` has no command, so there is nothing to run; it is left out"
                self._tell([Note(model.place, "models", text)], 2)
        self._peers()

    def _model(self, model: ModelSettings, standing: Standing) -> None:
        page, fields = self.page, model.fields
        address = address_of(model, self.complaints)
        page.add(f"  {quoted(model.name)}:", model.place)
        env = self._env(model)
        self._tell([*model.notes, *address.notes], 4)
        page.command("cmd", [_literal(line) for line in lay_out(model.cmd)], 4, fields.at("cmd"))
        if split(model.cmd_stop):
            lines = [_literal(line) for line in lay_out(model.cmd_stop)]
            page.command("cmd_stop", lines, 4, fields.at("cmdStop"))
        if address.port is not None:
            page.add(f"    port: {address.port}", fields.at("proxy"))
        if address.ready != "/health":
            page.add(f"    ready: {quoted(address.ready)}", fields.at("checkEndpoint"))
        if env:
            page.add("    env:", fields.at("env"))
            for name, value in env.items():
                page.add(f"      {quoted(name)}: {quoted(_literal(value))}")
        self._names(model)
        self._when(model)
        page.add(f"    memory: {standing.memory[model.name]}", fields.at("estVramGB"))

    def _names(self, model: ModelSettings) -> None:
        aliases = self.catalog.aliases[model.name]
        if aliases:
            place = model.fields.at("aliases")
            self.page.add(f"    aliases: {flow(item.text for item in aliases)}", place)
        if model.upstream:
            place = model.fields.at("useModelName")
            self.page.add(f"    upstream_model: {quoted(model.upstream)}", place)

    def _when(self, model: ModelSettings) -> None:
        settings, page, fields = self.catalog.settings, self.page, model.fields
        if model.ttl_s != settings.ttl_s:
            idle = _seconds(model.ttl_s)
            page.add(f"    scaling: {{idle_timeout: {idle}}}   # ttl", fields.at("ttl"))
        if model.unload_s != settings.unload_s:
            place = fields.at("unloadTimeout")
            page.add(f"    stop_grace: {_seconds(model.unload_s)}", place)
        if model.slots != SLOTS:
            place = fields.at("concurrencyLimit")
            page.add(f"    concurrency: {min(model.slots, SLOTS_MAX)}", place)
        priority = self.catalog.priorities.get(model.name, 0)
        if abs(priority) > PRIORITY_MAX:
            page.comment(f"priority {priority} there; priorities end at {PRIORITY_MAX}", 4)
            priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, priority))
        if priority:
            page.add(f"    priority: {priority}", settings.fields.at("routing"))
        if model.name in self.catalog.preload:
            page.add("    preload: once   # hooks.on_startup", settings.fields.at("hooks"))
        if model.ignores_sockets:
            page.comment("compat: a silent web socket keeps it no longer; opening one loads it", 4)
            page.add("    websocket_idle: 1s", fields.at("compat"))

    def _env(self, model: ModelSettings) -> dict[str, str]:
        """Its variables, but for those that engines inherit from rota as they are."""
        kept, inherited = {}, []
        for name, value in variables_of(model):
            if name in self.environment and self.environ.get(name) == value:
                inherited.append(name)
            else:
                kept[name] = value
        if inherited:
            names = ", ".join(inherited)
            self.page.comment(f"env: {names} as in rota's own environment, which it inherits", 4)
        return kept

    # --- peers ---

    def _peers(self) -> None:
        for name, peer in self.catalog.settings.peers.items():
            models = [model for model in self.catalog.peers if model.peer == name]
            if not models:
                continue
            self.page.gap()
            self.page.comment(f"The peer {name}; rota asks it and never starts anything there.", 2)
            self._tell(peer.notes, 2)
            for model in models:
                self._peer_model(model, peer.proxy, peer.fields.at("proxy"))

    def _peer_model(self, model: PeerModel, url: str, place: Place) -> None:
        page = self.page
        page.add(f"  {quoted(model.name)}:", model.place)
        page.add(f"    url: {quoted(url)}", place)
        page.add(f"    upstream_model: {quoted(model.model)}", model.place)
        if model.alias:
            page.add(f"    aliases: {flow([model.alias])}")

    # --- notes ---

    def _tell(self, notes: Iterable[Note], indent: int) -> None:
        """Notes as comments; those that say the same are one."""
        together: dict[tuple[str, bool], list[str]] = {}
        for note in notes:
            self.notes.append(note)
            keys = together.setdefault((note.text, note.is_lost), [])
            if note.key not in keys:
                keys.append(note.key)
        for (text, is_lost), keys in together.items():
            lost = "no counterpart; " if is_lost else ""
            self.page.comment(f"{', '.join(keys)}: {lost}{text}", indent)


def _of_group(group: GroupSettings, standing: Standing) -> Iterable[str]:
    if group.place.line:
        return
    if standing.has_sizes and not group.swap:
        yield "Those whose size is known, as many as fit; the others leave for them."
    else:
        yield (
            "Models that are in no group of the file: llama-swap has one of them at a time, and "
            "everyone outside leaves for it."
        )


def _has_dollar(model: ModelSettings) -> bool:
    texts = (model.cmd, model.cmd_stop, *(item.text for item in model.env))
    return any(_literal(text) != text for text in texts)


def _literal(text: str) -> str:
    """The text with `${dollar}{…}` for a `${…}` that is not filled in at each start."""
    return _MEANT.sub(
        lambda match: "$" if match[1] in {"PORT", "PID"} else "${dollar}",
        text,
    )


def _is_relative(word: str, position: int) -> bool:
    """Whether a word of a command looks like a path that starts somewhere."""
    is_program = position == 0 and "/" in word and not word.startswith(("/", "~"))
    return is_program or _RELATIVE.fullmatch(word) is not None


def _seconds(seconds: int) -> str:
    return _ms(seconds * 1_000)


def _ms(ms: int) -> str:
    """A duration; one of more than a year is cut."""
    return show_duration(min(ms, DURATION_MS_MAX))
