"""What a request asks for, found in its bytes without unpacking them.

The body is read whole, because only it names the model, and stays bytes from here to the
engine. Two fields are looked at; decoding the rest would cost ten times as much (a 214 KiB
chat: 184 µs for two fields, 2,075 µs for all) and help nobody. A form has `model` as a field.

Everything a caller can get wrong here is answered with a sentence that says what would be
accepted (4xx), never with a 500 and never by waiting.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from zlib import crc32

import msgspec
from starlette.types import Receive, Scope

from rota.errors import CapacityError, RequestError
from rota.gateway import multipart
from rota.gateway.keys import key_of
from rota.gateway.watch import ClientGoneError

UPLOAD_STALL_S_MAX = 60.0  # between two pieces of a body
UPLOADS_RETRY_S = 2  # an upload takes about as long
NAME_LENGTH_MAX = 512  # of a model's name; the longest on the hub has 96
ID_LENGTH_MAX = 128  # of a conversation's or a request's id, kept as it is

# Of each end of a body; reading all of the largest would hold the loop up for a while.
MARKED_BYTES = 65_536
# A caller is told to come back this long before its own time-out would strike, so that it
# hears why instead of a broken connection; never under half of what it allows.
TIMEOUT_MARGIN_MS = 5_000

_SALT = os.urandom(16)  # a key's hash is of no use outside this process


@dataclass(slots=True)
class Intake:
    """A request, read.

    Args:
        model: as the caller spelled it; may be an alias.
        body: as received, but for the name (see `naming`).
    """

    model: str
    body: bytes


class Uploads:
    """How much of bodies is being read, over all requests.

    What waits in the queue is counted there; without this, any number of bodies could be read
    into memory before the queue is asked.

    Args:
        bytes_max: says how much a body may not be read beyond.
    """

    def __init__(self, bytes_max: Callable[[], int]) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0

    def take(self, count: int) -> None:
        """Raises: CapacityError: 429, it would be too much. It counts until given back."""
        self._held_bytes += count
        if self._held_bytes > self._bytes_max():
            raise CapacityError(
                f"rota is reading as much of other requests as it may ({self._bytes_max()} bytes)",
                code="queue_full",
                status=429,
                retry_after_s=UPLOADS_RETRY_S,
            )

    def give_back(self, count: int) -> None:
        self._held_bytes -= count


class _Fields(msgspec.Struct):
    model: str
    stream: bool | None = None  # looked at for its type only


_DECODER = msgspec.json.Decoder(_Fields)


async def read_intake(
    scope: Scope,
    headers: Mapping[bytes, bytes],
    receive: Receive,
    body_bytes_max: int,
    uploads: Uploads,
) -> Intake:
    """Read a request's body and find what it asks for.

    A body announced as too large is refused before it is asked for (`Expect`).

    Raises:
        RequestError: 400, 408, 413 or 415.
        CapacityError: 429, too much is being read already.
        ClientGoneError: the client left.
    """
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        raise _bad_request(
            f"a body in content-encoding {encoding.decode('latin-1')!r} cannot be looked into; "
            "send it as it is",
            code="unsupported_encoding",
            status=415,
        )
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced[:20]) > body_bytes_max:
        raise _too_large(body_bytes_max)
    body = await _read_body(receive, body_bytes_max, uploads)
    if not body and b"upgrade" in headers:
        # Java's HttpClient does this by default; llhttp takes the body for the new protocol.
        raise _bad_request(
            "the request asks to upgrade the connection and so lost its body; "
            "speak plain HTTP/1.1 (in Java: HttpClient.Version.HTTP_1_1)"
        )
    content_type = headers.get(b"content-type", b"")
    if multipart.is_form(content_type):
        return Intake(model=_check_name(_field_of_form(body, content_type)), body=body)
    return Intake(model=_check_name(_decode(body).model), body=body)


async def _read_body(receive: Receive, body_bytes_max: int, uploads: Uploads) -> bytes:
    loop = asyncio.get_running_loop()
    pieces: list[bytes] = []
    received = 0
    is_more = True
    try:
        async with asyncio.timeout(UPLOAD_STALL_S_MAX) as stall:
            while is_more:
                if pieces:
                    stall.reschedule(loop.time() + UPLOAD_STALL_S_MAX)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                piece = message.get("body", b"")
                received += len(piece)
                uploads.take(len(piece))
                if received > body_bytes_max:
                    raise _too_large(body_bytes_max)
                pieces.append(piece)
                is_more = message.get("more_body", False)
    except TimeoutError as error:
        raise RequestError(
            f"no more of the body came for {UPLOAD_STALL_S_MAX:g} s",
            code="request_timeout",
            status=408,
        ) from error
    finally:
        uploads.give_back(received)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _decode(body: bytes) -> _Fields:
    try:
        fields = _DECODER.decode(body)
    except msgspec.ValidationError as error:  # before its parent: it is JSON, of another shape
        raise _bad_request(
            f"the body must be an object with a text `model` (and, if given, a boolean `stream`): "
            f"{error}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_request(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise _bad_request("the body is nested too deeply") from error
    _check_text(body)
    return fields


def _field_of_form(body: bytes, content_type: bytes) -> str:
    try:
        model = multipart.field(body, content_type, "model")
    except multipart.NotAFormError as error:
        raise _bad_request(f"the body is not a multipart form: {error}") from error
    if model is None:
        raise _bad_request("the form must have a text field `model`")
    return model


def _check_name(model: str) -> str:
    """Raises: RequestError: 400, what cannot be a model's name."""
    if not model.strip():
        raise _bad_request("`model` is empty; GET /v1/models lists what there is")
    if len(model) > NAME_LENGTH_MAX:
        raise _bad_request(f"`model` is longer than {NAME_LENGTH_MAX} characters")
    return model


def _check_text(body: bytes) -> None:
    """What the decoder skipped is text too; an engine's own parser may answer it with a 500."""
    if body.isascii():
        return
    view = memoryview(body)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(view), 65_536):
            decoder.decode(view[start : start + 65_536])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _bad_request("the body is not UTF-8") from error


def identify_caller(scope: Scope, headers: Mapping[bytes, bytes]) -> str:
    """Who asks, as finely as can be told: conversation, else key, else peer address.

    A caller who was told to come back finds its place again by this. A key is hashed with a
    salt of this process, and is the same key however the client sends it; one of the file's goes
    by its name.
    """
    conversation = headers.get(b"x-conversation-id")
    if conversation:
        name = conversation.decode("latin-1")
        sane = len(name) <= ID_LENGTH_MAX and name.isprintable()
        return f"conversation:{name if sane else _hash(conversation)}"
    known = key_of(scope)
    if known is not None:
        return f"key:{known.name}"
    key = headers.get(b"authorization") or headers.get(b"x-api-key")
    if key:
        scheme, _, token = key.partition(b" ")
        return f"key:{_hash(token if scheme.lower() == b'bearer' else key)}"
    client = scope.get("client")
    return f"peer:{client[0]}" if client else "peer:local"


def mark_of(caller: str, body: bytes) -> int:
    """What tells this request from others of its caller: its bytes, which are the same when a
    client tries again. A conversation is one thing after the other and needs no mark.

    Of a large body its two ends are looked at; a prompt grows at the end.
    """
    if caller.startswith("conversation:"):
        return 0
    if len(body) > 2 * MARKED_BYTES:
        body = body[:MARKED_BYTES] + body[-MARKED_BYTES:] + str(len(body)).encode()
    return crc32(body) or 1


def declared_wait_ms(headers: Mapping[bytes, bytes]) -> int | None:
    """How long this caller can be kept waiting, by the read time-out it declares.

    The Python SDKs of OpenAI and Anthropic send `x-stainless-read-timeout` in seconds with
    each request (seen in openai 3.57, anthropic 2.14: `600`, `600.0`), the JavaScript ones
    `x-stainless-timeout` when one was set. None: nothing was declared, or nothing legible.
    """
    raw = headers.get(b"x-stainless-read-timeout") or headers.get(b"x-stainless-timeout")
    if raw is None:
        return None
    try:
        timeout_s = float(raw)
    except ValueError:
        return None
    if not 0 < timeout_s < math.inf:
        return None
    timeout_ms = min(int(timeout_s * 1_000), 10**12)  # a time-out of 30 years is none
    return max(timeout_ms - TIMEOUT_MARGIN_MS, timeout_ms // 2)


def stated_ms(headers: Mapping[bytes, bytes], what: bytes) -> int | None:
    """What a caller says of its `hold` or `patience` in milliseconds, under rota's name or
    the one that clients of Quartermaster use. None: nothing was said, or nothing legible."""
    raw = headers.get(b"x-rota-%b-ms" % what) or headers.get(b"x-qm-%b-ms" % what)
    if raw is None or not raw.isdigit():
        return None
    return int(raw[:12])


def given_request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The caller's own `X-Request-Id`, if it is one that can be written into a log."""
    raw = headers.get(b"x-request-id", b"")
    sane = 0 < len(raw) <= ID_LENGTH_MAX and raw.isascii()
    return raw.decode("ascii") if sane and raw.decode("ascii").isprintable() else None


def _hash(secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=8, key=_SALT).hexdigest()


def _bad_request(message: str, *, code: str = "invalid_request", status: int = 400) -> RequestError:
    return RequestError(message, code=code, status=status)


def _too_large(body_bytes_max: int) -> RequestError:
    return RequestError(
        f"the body is larger than {body_bytes_max} bytes, the most that is taken",
        code="body_too_large",
        status=413,
    )
