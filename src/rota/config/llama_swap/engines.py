"""Where llama-swap asks an engine, in rota's terms: a port, and the path that says it is ready.

rota asks the engines that it starts on this machine, by plain HTTP, at the port that it gave
them. Of `proxy` a fixed port can be kept; another host, another scheme and a base path cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from rota.config.addresses import is_loopback
from rota.config.complaints import Complaints
from rota.config.llama_swap.macros import DEFAULT_PROXY
from rota.config.llama_swap.notes import Note
from rota.config.llama_swap.settings import ModelSettings

_PORT = "65535"  # in place of ${PORT}, which is no port to a parser


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model is asked.

    Args:
        port: a fixed one; None = the one that rota gives it.
        ready: the path that answers 200 when it is; `none` = at once.
    """

    port: int | None
    ready: str
    notes: tuple[Note, ...] = ()


def address_of(model: ModelSettings, complaints: Complaints) -> Address:
    """Read `proxy` and `checkEndpoint`."""
    proxy = model.proxy or DEFAULT_PROXY
    is_given = "${PORT}" in proxy
    try:
        parts = urlsplit(proxy.replace("${PORT}", _PORT))
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        model.fields.problem("proxy", "is not a URL like http://127.0.0.1:8080")
        return Address(None, "none")
    port = port or (443 if parts.scheme == "https" else 80)
    if parts.scheme == "https":
        said = "it was asked by HTTPS; rota asks its engines by HTTP"
    elif not (is_loopback(parts.hostname) or parts.hostname == "0.0.0.0"):  # noqa: S104  # is read
        said = f"it was asked at {parts.hostname}; rota asks its engines at 127.0.0.1"
    elif parts.path.rstrip("/"):
        said = f"it was asked below {parts.path}; rota adds nothing to a request's path"
    else:
        said = ""
    notes = [Note(model.fields.at("proxy"), "proxy", said)] if said else []
    ready, more = _ready_of(model, parts.path.rstrip("/"))
    return Address(None if is_given else port, ready, (*notes, *more))


def _ready_of(model: ModelSettings, base: str) -> tuple[str, list[Note]]:
    """The path that is probed: below that of `proxy`, and of a URL its path."""
    if model.check == "none":
        return "none", []
    try:
        parts = urlsplit(model.check)
    except ValueError:
        parts = urlsplit("")
    path = f"{base}/{parts.path.lstrip('/')}" + (f"?{parts.query}" if parts.query else "")
    if not parts.netloc:
        return path, []
    text = f"of a URL only the path counts, there too: {path}"
    return path, [Note(model.fields.at("checkEndpoint"), "checkEndpoint", text)]


def variables_of(model: ModelSettings) -> Iterator[tuple[str, str]]:
    """`env` as names and values, the last of a name; what is no `NAME=value` is told."""
    variables: dict[str, str] = {}
    for item in model.env:
        name, is_set, value = item.text.partition("=")
        if is_set and name:
            variables[name] = value
        else:
            text = "an item is not NAME=value, and sets nothing"
            model.notes.append(Note(item.place, "env", text))
    yield from variables.items()
