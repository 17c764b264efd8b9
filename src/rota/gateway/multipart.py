"""One field of a multipart form (RFC 7578), found in its bytes; the form itself is sent on whole.

A form library would unpack files into memory or onto disk, only for us to throw them away and
send on what came. The body is in memory already, and is not copied: parts are found by their
boundary, and only their heads are read.
"""

from __future__ import annotations

import re

PARTS_MAX = 256  # of forms with more, only the first are looked at
HEAD_MAX = 8 * 1024  # of one part
BOUNDARY_MAX = 70  # RFC 2046, 5.1.1
VALUE_MAX = 4 * 1024

_BOUNDARY = re.compile(rb'boundary=(?:"([^"\r\n]+)"|([^\s;"]+))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name=(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)


class NotAFormError(ValueError):
    """The body is no multipart form; says what is amiss."""


def is_form(content_type: bytes) -> bool:
    return content_type.strip().lower().startswith(b"multipart/form-data")


def field(body: bytes, content_type: bytes, name: str) -> str | None:
    """The value of the first field of a name that is no file.

    Returns: None where there is none; of a longer one, its first `VALUE_MAX` bytes.
    Raises:
        NotAFormError: there is no boundary, or the body does not keep to it.
    """
    place = find(body, content_type, name)
    return None if place is None else _text(body[place][:VALUE_MAX])


def find(body: bytes, content_type: bytes, name: str) -> slice | None:
    """Where that value stands.

    Returns: None where there is none.
    Raises:
        NotAFormError: there is no boundary, or the body does not keep to it.
    """
    boundary = _boundary(content_type)
    wanted = name.encode("ascii")
    start = 0 if body.startswith(boundary) else body.find(b"\r\n" + boundary) + 2
    if not body.startswith(boundary, start):
        raise NotAFormError("its boundary is not in it")
    for _ in range(PARTS_MAX):
        start += len(boundary)
        if body.startswith(b"--", start):
            return None
        head_end = body.find(b"\r\n\r\n", start, start + HEAD_MAX)
        end = body.find(b"\r\n" + boundary, start)
        if head_end < 0 or end < head_end:
            raise NotAFormError("a part of it is not whole")
        if _name_of(body[start:head_end]) == wanted:
            return slice(head_end + 4, end)
        start = end + 2
    return None


def _boundary(content_type: bytes) -> bytes:
    match = _BOUNDARY.search(content_type)
    boundary = (match[1] or match[2]) if match else b""
    if not 0 < len(boundary) <= BOUNDARY_MAX:
        raise NotAFormError("its content-type states no boundary")
    return b"--" + boundary


def _name_of(head: bytes) -> bytes | None:
    disposition = _DISPOSITION.search(head)
    if disposition is None or b"filename" in disposition[1].lower():
        return None
    match = _NAME.search(disposition[1])
    return (match[1] if match[1] is not None else match[2]) if match else None


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotAFormError("a field of it is not UTF-8") from error
