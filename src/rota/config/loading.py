"""What the keys of the file mean, alone and together; out come the frozen values.

In order: (1) the file as text with places, (2) each entry against the schema, (3) each model
on its own, (4) models together, (5) models and devices. Every step complains and goes on with
what is sound, so that one run shows all there is to repair.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rota.config import document as documents
from rota.config import schema
from rota.config.addresses import LISTEN, is_loopback, is_own, split_listen
from rota.config.checking import check_file
from rota.config.complaints import Complaints, Place
from rota.config.entry import NAME_RULE, ModelReader, is_name, resolve, show_name
from rota.config.fit import fits, needs_of, want_of
from rota.config.rules import RuleReader, are_never_together
from rota.config.units import show_mib
from rota.config.values import (
    CommandEngine,
    Config,
    DeviceConfig,
    KeyConfig,
    ModelConfig,
    UrlEngine,
)
from rota.core.coexistence import Coexistence
from rota.core.types import Eviction, Model
from rota.errors import ConfigError


def load(
    path: Path,
    data: bytes,
    complaints: Complaints,
    *,
    listen: str | None,
    state_dir: Path | None,
    allow_open: bool,
) -> Config:
    """See `rota.config.load`; what is complained about is in `complaints` too."""
    document = documents.read(path, complaints, data)
    keys = check_file(document, complaints)
    reader = _Reader(document, complaints, keys, path.absolute().parent)
    host, port = reader.listen(listen, allow_open=allow_open)
    devices = reader.devices()
    clients = reader.client_keys()
    models = reader.models(devices)
    reader.check_names()
    rules = RuleReader(document, complaints, keys)
    coexistence = rules.read()
    rules.check_company([model.model for model in models.values()], coexistence)
    reader.check_ports(models, coexistence, host, port)
    reader.check_room(models, devices)
    state_dir = state_dir or reader.state_dir()
    complaints.raise_if_any()
    return Config(
        host=host,
        port=port,
        models=models,
        devices=devices,
        state_dir=state_dir,
        queue_bytes_max=keys.queue_bytes_max,
        hold_ms_max=keys.hold_max,
        lease_ttl_ms_max=keys.lease_ttl_max,
        eviction=Eviction(keys.eviction),
        coexistence=coexistence,
        keys=clients,
        body_bytes_max=keys.body_bytes_max,
        allow_open=allow_open,
        path=path,
        warnings=complaints.warning_lines(),
    )


def state_home() -> Path:
    """Where programs keep their state (XDG base directories).

    Raises:
        ConfigError: whoever runs this has no home folder, as in some containers.
    """
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise ConfigError(
            "there is no home folder; say where to keep state (`state:` or --state)",
            code="no_home",
        ) from error


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes values of checked keys. `folder` is where relative paths start."""

    document: documents.Document
    complaints: Complaints
    keys: schema.FileKeys
    folder: Path

    def state_dir(self) -> Path:
        """The file's, else rota's own; complains where there is no home folder to have it in."""
        if self.keys.state is not None:
            return self._path(self.keys.state)
        try:
            return state_home() / "rota"
        except ConfigError as error:
            self.complaints.problem(Place(), error.message)
            return self.folder

    def listen(self, override: str | None, *, allow_open: bool) -> tuple[str, int]:
        """Where to listen; complains about what is not an address or is open to others."""
        place = Place() if override else self.document.value_place("listen")
        try:
            host, port = split_listen(override or self.keys.listen or LISTEN)
        except ValueError as error:
            self.complaints.problem(place, str(error))
            return split_listen(LISTEN)
        if not is_loopback(host) and not self._has_keys():
            said = f"{host} can be reached from other machines, and there are no keys"
            if allow_open:
                self.complaints.warn(place, f"{said}: `rota serve` needs --open")
            else:
                self.complaints.problem(place, f"{said}; listen on 127.0.0.1 or say --open")
        return host, port

    def _has_keys(self) -> bool:
        """Whether keys are meant to be there; what is wrong with them is said of themselves."""
        return isinstance(self.document.tree, dict) and "keys" in self.document.tree

    def client_keys(self) -> dict[str, KeyConfig]:
        """Who may ask; complains about names that cannot be told, and one key for two."""
        owners: dict[bytes, str] = {}
        for name, entry in self.keys.keys.items():
            if not is_name(name):
                self.complaints.problem(
                    self.document.key_place("keys", name),
                    f"{show_name(name)} cannot be a key's name; {NAME_RULE}",
                )
            owner = owners.setdefault(entry.sha256, name)
            if owner != name:
                self.complaints.problem(
                    self.document.value_place("keys", name, "sha256"),
                    f"`{name}` has the same key as `{owner}`",
                )
        return {
            name: KeyConfig(
                name=name,
                digest=entry.sha256,
                priority=entry.priority,
                hold_ms=entry.hold,
                hold_finished_ms=entry.hold_finished,
                patience_ms=entry.patience,
                patience_ms_min=entry.patience_min,
            )
            for name, entry in self.keys.keys.items()
        }

    def devices(self) -> tuple[DeviceConfig, ...]:
        return tuple(
            DeviceConfig(id=name, memory_mib=device.memory, visible=device.visible)
            for name, device in self.keys.devices.items()
        )

    def models(self, devices: tuple[DeviceConfig, ...]) -> dict[str, ModelConfig]:
        """The models that are sound on their own."""
        models = {}
        for name, entry in self.keys.models.items():
            reader = ModelReader(
                self.document, self.complaints, self.keys, self.folder, name, entry, devices
            )
            model = reader.read()
            if model is not None:
                models[name] = model
        return models

    def check_names(self) -> None:
        """Complains about aliases that are someone's name or alias already."""
        owners = {name: name for name in self.keys.models}
        for name, entry in self.keys.models.items():
            for index, alias in enumerate(entry.aliases):
                if alias not in owners:
                    owners[alias] = name
                    continue
                owner = owners[alias]
                what = "the name" if owner == alias else "already an alias"
                line = self.document.key_place("models", owner).line
                self.complaints.problem(
                    self.document.value_place("models", name, "aliases", index),
                    f"alias `{alias}` is {what} of `{owner}` in line {line}",
                )

    def check_ports(
        self, models: Mapping[str, ModelConfig], rules: Coexistence, host: str, port: int
    ) -> None:
        """Complains about engines at rota's own address, or two at one fixed port, unless each
        makes the other leave."""
        taken: dict[int, list[str]] = {}
        for name, model in models.items():
            match model.engine:
                case UrlEngine(url=url) if is_own(url, host, port):
                    place = self.document.value_place("models", name, "url")
                    self.complaints.problem(
                        place, f"`{url}` is where rota itself listens: it would ask itself for ever"
                    )
                case CommandEngine(port=int(fixed)):
                    holders = taken.setdefault(fixed, [])
                    rivals = [h for h in holders if not are_never_together(rules, name, h)]
                    self._check_fixed_port(model, fixed, port, rivals)
                    holders.append(name)
                case _:
                    pass

    def _check_fixed_port(
        self, model: ModelConfig, fixed: int, own: int, rivals: list[str]
    ) -> None:
        place = self.document.value_place("models", model.name, "port")
        if fixed == own:
            self.complaints.problem(place, f"port {fixed} is where rota itself listens")
        elif rivals:
            self.complaints.problem(
                place, f"port {fixed} is also that of `{rivals[0]}`; leave it out and use ${{PORT}}"
            )
        elif model.model.scaling.max > 1:
            self.complaints.problem(
                place, f"several replicas cannot share port {fixed}; leave it out and use ${{PORT}}"
            )

    def check_room(
        self, models: Mapping[str, ModelConfig], devices: tuple[DeviceConfig, ...]
    ) -> None:
        """Complains about what can never stand on the stated devices, alone or together."""
        if not devices:  # found when serving: `rota serve` says what will not fit
            return
        totals = {device.id: device.memory_mib for device in devices}
        placed = [m.model for m in models.values() if not m.model.is_external]
        always = [model for model in placed if model.scaling.is_always]
        pinned = [want_of(model) for model in always for _ in range(model.scaling.min)]
        if not fits(pinned, totals):
            self._complain_always(always, totals)
            return
        for model in placed:
            if model.scaling.is_always or model.scaling.is_off:
                continue
            if not fits([want_of(model)], totals):
                self._warn_room(model, "can never be loaded")
            elif not fits([want_of(model), *pinned], totals):
                self._warn_room(model, "can never be loaded beside the models that always run")

    def _complain_always(self, always: list[Model], totals: Mapping[str, int]) -> None:
        needs = ", ".join(f"`{model.name}` ({needs_of(model)})" for model in always)
        have = ", ".join(f"{device} {show_mib(mib)}" for device, mib in totals.items())
        last = max(self.document.key_place("models", model.name) for model in always)
        self.complaints.problem(
            last, f"models with `min` of 1 or more never fit the devices ({have}) together: {needs}"
        )

    def _warn_room(self, model: Model, what: str) -> None:
        place = self.document.key_place("models", model.name)
        self.complaints.warn(place, f"`{model.name}` {what}: it needs {needs_of(model)}")

    def _path(self, text: str) -> Path:
        return resolve(self.folder, text)
