"""The small JSON object that a call to the admin surface brings, read strictly.

A key that is not known is refused with a suggestion, as in the configuration file: `ttl` for
`ttl_s` must not mean "no time at all".
"""

from __future__ import annotations

import difflib
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from rota.errors import RequestError
from rota.gateway.watch import ClientGoneError

BODY_BYTES_MAX = 64 * 1024  # such objects have a few hundred

S = TypeVar("S", bound=msgspec.Struct)


async def read_fields(request: Request, kind: type[S]) -> S:
    """The body as the fields of a struct.

    Raises:
        RequestError: 400 or 413, with what is wrong.
        ClientGoneError: the client left.
    """
    body = await read_body(request, BODY_BYTES_MAX)
    try:
        _check_names(msgspec.json.decode(body, type=dict[str, msgspec.Raw]), kind)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:  # before its parent: it is JSON, of another shape
        raise bad_request(f"the body is to be an object with {_offer(kind)}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(
            f"the body is not JSON ({error}); an object with {_offer(kind)} is wanted"
        ) from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error


async def read_body(request: Request, bytes_max: int) -> bytes:
    """A whole body.

    Raises:
        RequestError: 413, it is larger.
        ClientGoneError: the client left.
    """
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > bytes_max:
                raise RequestError(
                    f"the body is larger than {bytes_max} bytes, the most that is taken here",
                    code="body_too_large",
                    status=413,
                )
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return body


def _check_names(body: dict[str, msgspec.Raw], kind: type[S]) -> None:
    for name in body:
        if name not in kind.__struct_fields__:
            close = difflib.get_close_matches(name[:100], kind.__struct_fields__, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"there is {_offer(kind)}"
            raise bad_request(f"unknown key {name[:100]!r}; {hint}")


def _offer(kind: type[S]) -> str:
    return ", ".join(f"`{name}`" for name in kind.__struct_fields__)


def bad_request(message: str) -> RequestError:
    return RequestError(message, code="invalid_request", status=400)
