"""What llama-swap checks of settings together, and which names come out of it.

Where it is lenient and the outcome is of no use to anyone (an alias as a member of a group, one
with a priority, a name to load at the start that nobody has), the meant model is taken if there
is one, and a note says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rota.config.complaints import Complaints, Place, did_you_mean
from rota.config.llama_swap.fields import Fields, Item
from rota.config.llama_swap.notes import Note
from rota.config.llama_swap.settings import (
    GroupSettings,
    MatrixSettings,
    ModelSettings,
    RouterSettings,
    Settings,
)

DEFAULT_GROUP = "(default)"
_STRATEGIES = ("pin", "warm", "spillover")


@dataclass(slots=True)
class PeerModel:
    """A model of a peer.

    Args:
        name: `peer/model`, by which it can always be asked for.
        alias: the model's own name, where it is nobody else's; else empty.
    """

    name: str
    peer: str
    model: str
    alias: str
    place: Place


@dataclass(slots=True)
class Catalog:
    """The names of the file, settled.

    Args:
        aliases: by model, in the order of the file.
        groups: members are names of models; the last may be those that are in no other.
        matrix: instead of groups.
        priorities, preload: by names of models.
    """

    settings: Settings
    aliases: dict[str, list[Item]] = field(default_factory=dict)
    groups: list[GroupSettings] = field(default_factory=list)
    matrix: MatrixSettings | None = None
    priorities: dict[str, int] = field(default_factory=dict)
    preload: set[str] = field(default_factory=set)
    peers: list[PeerModel] = field(default_factory=list)

    @property
    def models(self) -> Mapping[str, ModelSettings]:
        return self.settings.models


def settle(settings: Settings, complaints: Complaints) -> Catalog:
    """Check names against each other and say what they come to."""
    return _Settling(Catalog(settings), complaints).run()


@dataclass(slots=True)
class _Settling:
    catalog: Catalog
    complaints: Complaints
    owners: dict[str, str] = field(default_factory=dict)  # alias → model

    def run(self) -> Catalog:
        for model in self.catalog.models.values():
            self._aliases(model)
        self._router()
        self._priorities()
        self._preload()
        self._peers()
        self._selectors()
        self._profiles()
        self._listeners()
        return self.catalog

    # --- names ---

    def _aliases(self, model: ModelSettings) -> None:
        """Its own, and the names that it sets parameters for."""
        kept = []
        for item in model.aliases:
            if item.text in self.owners:
                said = f"the alias `{item.text}` is already one of `{self.owners[item.text]}`"
                self._problem(item.place, said)
                continue
            self.owners[item.text] = model.name
            if item.text not in self.catalog.models:
                kept.append(item)
            elif item.text != model.name:
                text = f"`{item.text}` is a model of its own, which is what is asked for by it"
                model.notes.append(Note(item.place, "aliases", text))
        for item in model.by_id:
            if item.text == model.name:
                continue
            owner = self.owners.setdefault(item.text, model.name)
            if item.text in self.catalog.models:
                self._problem(item.place, f"`{item.text}` is a model of its own")
            elif owner != model.name:
                self._problem(item.place, f"`{item.text}` is an alias of `{owner}` already")
            elif all(item.text != other.text for other in kept):
                kept.append(item)
        self.catalog.aliases[model.name] = kept

    def _real(self, name: str) -> str | None:
        """The model that a name or an alias is of."""
        return name if name in self.catalog.models else self.owners.get(name)

    def _is_known(self, name: str) -> bool:
        return self._real(name) is not None or any(
            name in {model.name, model.model} for model in self._peer_models()
        )

    # --- who may stand together ---

    def _router(self) -> None:
        settings = self.catalog.settings
        legacy, router = settings.legacy, settings.router
        if legacy.is_stated and router.is_stated:
            place = max(settings.fields.at("groups"), settings.fields.at("matrix"))
            self._problem(
                place, "`groups` or `matrix` is here and `routing.router` is too; keep one of them"
            )
        elif legacy.groups and legacy.matrix:
            place = max(settings.fields.at("groups"), settings.fields.at("matrix"))
            self._problem(place, "`groups` and `matrix` are both there; keep one of them")
        if legacy.is_stated:
            self._choose("group" if legacy.matrix is None else "matrix", legacy)
        else:
            self._choose(router.use or "group", router)

    def _choose(self, use: str, router: RouterSettings) -> None:
        fields = self.catalog.settings.fields.under("routing").under("router")
        if use == "group":
            self.catalog.groups = list(self._groups(router.groups))
        elif use != "matrix":
            fields.problem("use", "is neither group nor matrix")
        elif router.matrix is None:
            fields.problem("use", "is matrix, and there is none under `settings`")
        else:
            self.catalog.matrix = router.matrix
            if not router.matrix.sets:
                self._problem(router.matrix.fields.place, "the matrix has no `sets`")

    def _groups(self, groups: Mapping[str, GroupSettings]) -> Iterator[GroupSettings]:
        """The groups as written, and one of all models that are in none."""
        homes: dict[str, str] = {}
        for group in groups.values():
            if group.name != DEFAULT_GROUP:  # llama-swap's own goes over one of this name
                yield replace(group, members=list(self._members(group, homes)))
        models = self.catalog.models.items()
        rest = [Item(name, model.place) for name, model in models if name not in homes]
        if rest:
            yield GroupSettings(DEFAULT_GROUP, Place(), rest)

    def _members(self, group: GroupSettings, homes: dict[str, str]) -> Iterator[Item]:
        for item in group.members:
            name = self._real(item.text)
            if name is None:
                hint = did_you_mean(item.text, self.catalog.models)
                self._problem(item.place, f"there is no model `{item.text}`{hint}")
            elif name in homes:
                where = "this group twice" if homes[name] == group.name else f"`{homes[name]}` too"
                self._problem(item.place, f"`{item.text}` is in {where}")
            else:
                homes[name] = group.name
                if name != item.text:
                    text = f"`{item.text}` is an alias; its model `{name}` is taken"
                    self._note(item.place, "groups", text)
                yield Item(name, item.place)

    # --- who goes first, and who is there from the start ---

    def _priorities(self) -> None:
        settings = self.catalog.settings
        fifo = settings.fields.under("routing").under("scheduler").under("settings").under("fifo")
        places = fifo.under("priority")
        for name, priority in settings.priorities.items():
            real = self._real(name)
            if real is None:
                hint = did_you_mean(name, self.catalog.models)
                self._problem(places.at(name), f"there is no model `{name}`{hint}")
            elif real == name:
                self.catalog.priorities[name] = priority
            elif real not in settings.priorities:
                text = f"`{name}` is an alias; its model `{real}` is taken"
                self._note(places.at(name), "priority", text)
                self.catalog.priorities[real] = priority

    def _preload(self) -> None:
        groups = {group.name for group in self.catalog.groups}
        for item in self.catalog.settings.preload:
            name = item.text.strip()
            real = self._real(name)
            if real is not None:
                self.catalog.preload.add(real)
            elif name:
                what = "is a group" if name in groups else "is no model"
                hint = did_you_mean(name, self.catalog.models)
                self._note(item.place, "preload", f"`{name}` {what}; nothing is loaded{hint}")

    # --- peers ---

    def _peers(self) -> None:
        models = list(self._peer_models())
        counts = Counter(model.model for model in models)
        taken: dict[str, PeerModel] = {}
        for model in models:
            first = taken.setdefault(model.name, model)
            if first is not model:
                said = f"`{model.name}` is a model of the peer `{first.peer}` too"
                self._problem(model.place, said)
            elif self._real(model.name) is not None:
                self._problem(model.place, f"`{model.name}` is also the name of a model here")
            else:
                self.catalog.peers.append(model)
        names = self.catalog.models.keys() | self.owners.keys() | taken.keys()
        for model in models:
            if counts[model.model] == 1 and model.model not in names:
                model.alias = model.model

    def _peer_models(self) -> Iterator[PeerModel]:
        for peer in self.catalog.settings.peers.values():
            seen: set[str] = set()
            for item in peer.models:
                if item.text not in seen:
                    name = f"{peer.name}/{item.text}"
                    yield PeerModel(name, peer.name, item.text, "", item.place)
                seen.add(item.text)

    # --- what is only checked ---

    def _selectors(self) -> None:
        top = self.catalog.settings.fields
        names = top.entries_of("selectors")
        for name, selector in top.each_of("selectors"):
            place = selector.place
            if not name.strip():
                self._problem(place, "a selector has no name")
            if self._real(name) is not None or name in {m.name for m in self._peer_models()}:
                self._problem(place, f"the selector `{name}` has the name of a model")
            strategy = selector.text("strategy")
            if strategy not in _STRATEGIES:
                selector.problem("strategy", f"is none of {', '.join(_STRATEGIES)}")
            targets = selector.texts("targets")
            if not targets:
                self._problem(place, f"the selector `{name}` has no `targets`")
            for target in targets:
                if target.text in names:
                    self._problem(target.place, f"`{target.text}` is a selector itself")
                elif not self._is_known(target.text):
                    self._problem(target.place, f"there is no model `{target.text}`")
                elif strategy == "warm" and self._real(target.text) is None:
                    self._problem(target.place, f"`{target.text}` is a peer's; warm ones are ours")
            if strategy == "spillover":
                self._spillover(selector, targets)

    def _spillover(self, selector: Fields, targets: list[Item]) -> None:
        """Distinct targets that may stand together."""
        if selector.under("settings").whole("spillover", 1) < 1:
            selector.under("settings").problem("spillover", "is under 1")
        real = [self._real(target.text) or target.text for target in targets]
        local = {name for name in real if name in self.catalog.models}
        if len(set(real)) < len(real):
            selector.problem("targets", "names a model twice")
        if len(local) < 2 or self.catalog.matrix is not None:
            return
        homes = [
            group
            for group in self.catalog.groups
            if local <= {member.text for member in group.members}
        ]
        if not homes or homes[0].swap:
            selector.problem("targets", "are not in one group with `swap: false`")

    def _profiles(self) -> None:
        top = self.catalog.settings.fields
        selectors = top.entries_of("selectors")
        peers = {model.name for model in self._peer_models()}
        for name, profile in top.each_of("profiles"):
            pins = profile.under("pins")
            if not pins.entries:
                self._problem(profile.place, f"the profile `{name}` has no `pins`")
            for pin in pins.entries:
                target = pins.text(pin)
                if pin in peers:
                    self._problem(pins.at(pin), f"the pin `{pin}` has the name of a peer's model")
                elif target and target not in selectors and not self._is_known(target):
                    self._problem(pins.at(pin), f"there is no model `{target}`")

    def _listeners(self) -> None:
        """Quartermaster's: an address and the groups whose models it has."""
        settings = self.catalog.settings
        names = {group.name for group in self.catalog.groups} | {DEFAULT_GROUP}
        listeners = settings.fields.under("listeners")
        if settings.listeners and self.catalog.matrix is not None:
            self._problem(listeners.place, "`listeners` go with groups, not with a matrix")
            return
        for address, groups in settings.listeners.items():
            place = listeners.at(address)
            if not address.strip() or not groups:
                what = "has no `groups`" if address.strip() else "has no address"
                self._problem(place, f"the listener `{address}` {what}")
            for index, item in enumerate(groups):
                if item.text not in names:
                    self._problem(item.place, f"there is no group `{item.text}`")
                if item.text in {other.text for other in groups[:index]}:
                    self._problem(item.place, f"the group `{item.text}` is there twice")

    def _problem(self, place: Place, text: str) -> None:
        self.complaints.problem(place, text)

    def _note(self, place: Place, key: str, text: str) -> None:
        self.catalog.settings.notes.append(Note(place, key, text))
