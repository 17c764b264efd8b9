"""Any refusal as HTTP: one JSON body that the OpenAI and the Anthropic clients both read.

OpenAI's clients look into `error` (message, type, param, code), Anthropic's also at the outer
`type`; both ignore what they do not know, so one superset serves them and `error` is never a
bare string (Home Assistant fell over one). `loading` tells a person's tool how far a model is.
"""

from __future__ import annotations

import msgspec
from starlette.types import Send

from rota.errors import RotaError

Headers = list[tuple[bytes, bytes]]

# The words are Anthropic's, by status; OpenAI's clients read `code` and the status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def internal_error(request_id: str) -> RotaError:
    """What a caller is told of a mistake of ours; the log has the rest under the same id."""
    return RotaError(f"rota made a mistake; its log tells more under {request_id}")


def error_body(error: RotaError, request_id: str) -> bytes:
    """The JSON body of an error answer."""
    body: dict[str, object] = {
        "type": "error",
        "error": _error_object(error),
        "request_id": request_id,
    }
    if error.loading is not None:
        body["loading"] = error.loading
    return msgspec.json.encode(body)


def error_event(error: RotaError) -> bytes:
    """The error as a server-sent event, for a stream whose status has long been sent."""
    return b"data: " + msgspec.json.encode({"error": _error_object(error)}) + b"\n\n"


def error_headers(
    error: RotaError, request_id: str, body_bytes: int, *, is_last: bool = False
) -> Headers:
    """The headers of an error answer; SDKs obey `Retry-After` and `x-should-retry`.

    Args:
        is_last: whether the connection ends with it.
    """
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % body_bytes),
        (b"x-request-id", request_id.encode("ascii")),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.retry is not None:
        headers.append((b"x-should-retry", b"true" if error.retry else b"false"))
    if is_last or error.status == 408:
        headers.append((b"connection", b"close"))  # the rest of its body may yet come
    return headers


async def send_error(
    send: Send, error: RotaError, request_id: str, more_headers: Headers | None = None
) -> None:
    """Answer a request with an error, whole."""
    body = error_body(error, request_id)
    headers = error_headers(error, request_id, len(body)) + (more_headers or [])
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error_object(error: RotaError) -> dict[str, object]:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    return {
        "type": _TYPES.get(error.status, default),
        # A message may end with an engine's log, which may hold anything.
        "message": error.message.encode("utf-8", "replace").decode("utf-8"),
        "code": error.code,
        "param": None,
    }
