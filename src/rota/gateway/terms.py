"""On what terms a request is served: what it states, within what its key leaves it to say.

Requests and web sockets alike; the terms are arguments of `Controller.grant`, so that neither has
to pass each on by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from starlette.types import Scope

from rota.config.values import KeyConfig
from rota.core.types import Model
from rota.gateway.intake import declared_wait_ms, stated_ms
from rota.gateway.keys import key_of


class Terms(TypedDict, total=False):
    """How a request is to be served, where it or its key says so; else as its model is."""

    activation_wait_ms: int
    queue_wait_ms: int
    priority: int | None
    hold_ms: int | None
    default_holds_ms: tuple[int | None, int | None]
    patience_ms: int | None


def terms_of(scope: Scope, headers: Mapping[bytes, bytes], model: Model) -> Terms:
    """The terms of one request. No wait is longer than the caller's own time-out allows."""
    patience_ms = stated_ms(headers, b"patience")
    terms = Terms(hold_ms=stated_ms(headers, b"hold"), patience_ms=patience_ms)
    declared_ms = declared_wait_ms(headers)
    if declared_ms is not None:
        terms["activation_wait_ms"] = min(model.activation_wait_ms, declared_ms)
        terms["queue_wait_ms"] = min(model.queue_wait_ms, declared_ms)
    key = key_of(scope)
    if key is not None:  # without keys there is nobody to give leave, and anything goes
        terms["priority"] = key.priority
        terms["default_holds_ms"] = (key.hold_ms, key.hold_finished_ms)
        terms["patience_ms"] = _granted_patience_ms(key, model, patience_ms)
    return terms


def _granted_patience_ms(key: KeyConfig, model: Model, stated_ms: int | None) -> int | None:
    """What is not stated is the key's to say; a short patience needs its leave."""
    if stated_ms is None:
        return key.patience_ms
    own_ms = model.patience_ms if key.patience_ms is None else key.patience_ms
    floor_ms = own_ms if key.patience_ms_min is None else key.patience_ms_min
    return max(stated_ms, min(floor_ms, model.patience_ms))
