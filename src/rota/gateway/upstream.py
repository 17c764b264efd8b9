"""What of a call is for the engine and what of its answer is for the client, and how it is said
that an engine cannot be had."""

from __future__ import annotations

from rota.config.values import Config
from rota.engines.base import Endpoint
from rota.errors import CapacityError, ReplicaError, RotaError
from rota.gateway.client import Headers, UnreachableError
from rota.gateway.surface import GrantHandle

# What `Node.endpoint` calls a replica that ended between its grant and its first byte.
GONE = "replica_gone"

# Meant for one connection, not for the message (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
# Ours to say towards the engine, or a secret between the client and rota.
NOT_SENT = frozenset(
    HOP_BY_HOP
    | {b"host", b"content-length", b"expect"}
    | {b"authorization", b"x-api-key", b"api-key", b"cookie"}
)  # fmt: skip
# For an answer that is looked into: it must come as it is.
NOT_SENT_TO_READ = NOT_SENT | {b"accept-encoding"}
# Ours to say towards the client: the server states its own date, and a rota behind a rota is
# not the one that was asked.
NOT_RETURNED = frozenset(
    HOP_BY_HOP
    | {
        b"date", b"x-request-id", b"x-rota-model", b"x-rota-model-loaded", b"x-rota-wait-ms",
        b"x-qm-model", b"x-qm-model-loaded", b"x-qm-wait-ms",
    }
)  # fmt: skip

_PLAIN_CONNECTION = {b"keep-alive", b"close"}


def end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers that are for the other end: all but `dropped` and what `Connection` names."""
    kept: Headers = []
    named: set[bytes] = set()
    for raw_name, value in headers:
        name = raw_name.lower()
        if name == b"connection":
            named.update(token.strip() for token in value.lower().split(b","))
        elif name not in dropped:
            kept.append((name, value))
    if named - _PLAIN_CONNECTION:
        return [header for header in kept if header[0] not in named]
    return kept


def target_at(endpoint: Endpoint, path: str, query: bytes) -> str:
    """Path and query as an endpoint takes them, a character per byte."""
    if endpoint.base_path.endswith("/v1"):  # a URL as SDKs want it
        path = path.removeprefix("/v1")
    # As it came, byte for byte.
    return f"{path}?{query.decode('latin-1')}" if query else path


def unreachable(config: Config, grant: GrantHandle, error: UnreachableError) -> RotaError:
    """What a caller is told whose engine takes no connection."""
    endpoint = grant.endpoint
    where = f"{endpoint.scheme}://{endpoint.host}:{endpoint.port}"
    message = f"{grant.model!r} does not answer at {where}: {error}"
    entry = config.models.get(grant.model)
    if entry is not None and entry.model.is_external:
        return CapacityError(message, code="no_endpoint", status=503)
    return ReplicaError(message, code=GONE, status=502)
