"""Who may ask for models: the keys of the file, and what each decides for its requests.

With keys in the file every path wants one, save those that tell nothing (`/`, `/health`) and
those that the admin surface guards in its own way; a path that is added is closed until it is
named here. A key is compared by its digest, with every digest there is and in constant time, and
is kept nowhere: what goes on from here, to logs and to callers' places in line, is its name.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping

from starlette.types import Scope

from rota.config.values import KeyConfig
from rota.errors import RequestError

CHALLENGE = [(b"www-authenticate", b"Bearer")]

_OPEN = frozenset({"/", "/health", "/running", "/unload", "/queue"})
_OPEN_BELOW = ("/rota/", "/upstream/")
_STATE = "key"  # its name in a scope's state
_SOCKET_KEY = b"openai-insecure-api-key."  # how pages send it, for whom headers are out of reach


def authenticate(scope: Scope, keys: Mapping[str, KeyConfig]) -> None:
    """Let a request pass, and note whose it is.

    Raises:
        RequestError: 401, there are keys and it brings none of them.
    """
    if not keys or scope["path"] in _OPEN or scope["path"].startswith(_OPEN_BELOW):
        return
    is_any = False
    for secret in _secrets(dict(scope["headers"])):
        is_any = True
        digest = hashlib.sha256(secret).digest()
        found = [key for key in keys.values() if hmac.compare_digest(key.digest, digest)]
        if found:
            scope.setdefault("state", {})[_STATE] = found[0]
            return
    came = "the one that came is not known" if is_any else "none came"
    raise RequestError(
        f"a key is wanted, as `Authorization: Bearer KEY` or `x-api-key: KEY`; {came}",
        code="invalid_api_key",
        status=401,
    )


def key_of(scope: Scope) -> KeyConfig | None:
    """The key that a request brought; None where there are none."""
    key = scope.get("state", {}).get(_STATE)
    assert key is None or isinstance(key, KeyConfig), key
    return key


def _secrets(headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        yield token.strip()
    if b"x-api-key" in headers:
        yield headers[b"x-api-key"].strip()
    for protocol in headers.get(b"sec-websocket-protocol", b"").split(b","):
        if protocol.strip().startswith(_SOCKET_KEY):
            yield protocol.strip().removeprefix(_SOCKET_KEY)
