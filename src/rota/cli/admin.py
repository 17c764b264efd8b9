"""The admin API as the verbs use it: small JSON calls to a rota on this machine.

The standard library's client is enough for that, and starts fast. It is used directly, without
proxies from the environment: those are not for loopback.
"""

from __future__ import annotations

import http.client
import json
import select
from typing import Any
from urllib.parse import quote, urlsplit

from rota.errors import CapacityError, ReplicaError, RequestError, RotaError

ANSWER_S_MAX = 10.0  # for what is answered at once
RELOAD_S_MAX = 60.0  # a large file takes seconds
Json = dict[str, Any]


class Admin:
    """A rota at a URL.

    Raises: RequestError: it is not an http(s) URL. Every call raises RotaError: what rota
    answered, or `no_answer` when none does.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._port = parts.port
        except ValueError as error:
            raise _no_url(url) from error
        if parts.scheme not in {"http", "https"} or not parts.hostname or not url.isascii():
            raise _no_url(url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._host = parts.hostname
        self._is_https = parts.scheme == "https"
        self._path = parts.path.rstrip("/")

    def status(self) -> Json:
        """`GET /rota/v1/status`."""
        keys = {"models", "devices"}
        return self.send("GET", "/rota/v1/status", keys, wait_s_max=ANSWER_S_MAX).result()

    def queue(self) -> Json:
        """`GET /rota/v1/queue`."""
        return self.send("GET", "/rota/v1/queue", {"queue"}, wait_s_max=ANSWER_S_MAX).result()

    def plan(self, model: str) -> Json:
        """`GET /rota/v1/models/{name}/plan`."""
        path = f"/rota/v1/models/{quote(model, safe='')}/plan"
        keys = {"outcome", "text", "leaves", "rule"}
        return self.send("GET", path, keys, wait_s_max=ANSWER_S_MAX).result()

    def explain(self, request: str) -> Json:
        """`GET /rota/v1/explain/{id}`."""
        path = f"/rota/v1/explain/{quote(request, safe='')}"
        return self.send("GET", path, {"requests"}, wait_s_max=ANSWER_S_MAX).result()

    def save_journal(self) -> Json:
        """`POST /rota/v1/journal`."""
        return self.send("POST", "/rota/v1/journal", {"path"}, wait_s_max=ANSWER_S_MAX).result()

    def reload(self) -> Json:
        """`POST /rota/v1/reload`."""
        return self.send("POST", "/rota/v1/reload", {"reloaded"}, wait_s_max=RELOAD_S_MAX).result()

    def preview(self, text: bytes) -> Json:
        """`POST /rota/v1/reload?dry_run=true`."""
        path = "/rota/v1/reload?dry_run=true"
        return self.send("POST", path, {"reloaded"}, wait_s_max=RELOAD_S_MAX, body=text).result()

    def leases(self) -> Json:
        """`GET /rota/v1/leases`."""
        keys = {"leases", "ended"}
        return self.send("GET", "/rota/v1/leases", keys, wait_s_max=ANSWER_S_MAX).result()

    def lease(self, model: str, *, ttl_s: float, reason: str, load: bool) -> Pending:
        """Begin to take a lease; the answer comes when there is a replica to have it on."""
        body = {"model": model, "ttl_s": ttl_s, "reason": reason, "load": load}
        return self.send("POST", "/rota/v1/leases", {"lease", "model"}, body=body)

    def renew(self, lease: str, *, ttl_s: float) -> Json:
        """`POST /rota/v1/leases/{id}/renew`."""
        return self._steer(f"leases/{quote(lease, safe='')}/renew", {"lease"}, {"ttl_s": ttl_s})

    def release(self, lease: str) -> Json:
        """`POST /rota/v1/leases/{id}/release`."""
        return self._steer(f"leases/{quote(lease, safe='')}/release", {"lease", "why"})

    def pin(self, model: str, *, is_pinned: bool) -> Json:
        """`POST /rota/v1/models/{name}/pin`, or `/unpin`."""
        verb = "pin" if is_pinned else "unpin"
        return self._steer(f"models/{quote(model, safe='')}/{verb}", {"model", "pinned"})

    def _steer(self, path: str, keys: set[str], body: Json | None = None) -> Json:
        """A POST that is answered at once."""
        path = f"/rota/v1/{path}"
        return self.send("POST", path, keys, wait_s_max=ANSWER_S_MAX, body=body).result()

    def load(self, model: str) -> Pending:
        """Begin to load a model; the answer comes when it is ready."""
        path = f"/rota/v1/models/{quote(model, safe='')}/load?wait=true"
        return self.send("POST", path, {"model", "state"})

    def unload(self, model: str | None, *, grace_s: float | None) -> Json:
        """Take a model down, None = all; returns when it is gone."""
        path = (
            "/rota/v1/unload"
            if model is None
            else f"/rota/v1/models/{quote(model, safe='')}/unload"
        )
        grace = "" if grace_s is None else f"&grace_s={grace_s:g}"
        return self.send("POST", f"{path}?wait=true{grace}", {"model", "state"}).result()

    def send(
        self,
        method: str,
        path: str,
        keys: set[str],
        *,
        wait_s_max: float | None = None,
        body: Json | bytes | None = None,
    ) -> Pending:
        """Send a request; its answer may be waited for, and will have these keys."""
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=wait_s_max)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request(method, self._path + path, data)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _no_answer(self.url, error) from error
        return Pending(self.url, connection, keys)


class Pending:
    """A request that was sent and may not be answered yet."""

    def __init__(self, url: str, connection: http.client.HTTPConnection, keys: set[str]) -> None:
        self._url = url
        self._connection = connection
        self._keys = keys

    def is_answered(self, wait_s_max: float) -> bool:
        """Whether the answer begins within so many seconds."""
        ready, _, _ = select.select([self._connection.sock], [], [], wait_s_max)
        return bool(ready)

    def result(self) -> Json:
        """The answer, waited for. Raises RotaError: rota refused, or went away."""
        try:
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(self._url, error) from error
        finally:
            self._connection.close()
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if response.status >= 400:
            raise _refusal(self._url, response.status, answer)
        if not isinstance(answer, dict) or not self._keys <= answer.keys():
            raise _not_rota(self._url, response.status)
        return answer


def _refusal(url: str, status: int, answer: object) -> RotaError:
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return _not_rota(url, status)
    kind = (
        CapacityError if status in {429, 503} else ReplicaError if status >= 500 else RequestError
    )
    return kind(str(error["message"]), code=str(error.get("code", "")), status=status)


def _not_rota(url: str, status: int) -> RotaError:
    return RequestError(
        f"what answers at {url} is not rota (HTTP {status})", code="no_answer", status=status
    )


def _no_answer(url: str, error: Exception) -> RotaError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return CapacityError(
        f"no rota answers at {url} ({reason.lower()}); start one with `rota serve`, or say where "
        "it is with --url or ROTA_URL",
        code="no_answer",
        status=503,
    )


def _no_url(url: str) -> RequestError:
    return RequestError(f"`{url}` is not a URL like http://127.0.0.1:8080", code="wrong_url")
