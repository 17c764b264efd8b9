"""A model's name put where a client wrote another, for an engine that knows only the one.

A client asks for an alias, or for a name of the catalog that the engine never heard of, and
vLLM answers that with a 404. So the value of the one field that names the model is replaced,
and every other byte goes on as it came: decoding and encoding the whole would cost twenty
times as much, and lose the order, the spacing and the doubles that somebody may have meant.
Of doubles, that one is replaced which the intake went by.

Answers are not touched: there the name stands in every event of a stream.
"""

from __future__ import annotations

import urllib.parse

import msgspec

from rota.gateway import multipart

FIELD = "model"


class _Fields(msgspec.Struct):
    model: msgspec.Raw


_DECODER = msgspec.json.Decoder(_Fields)


def rename(body: bytes, content_type: bytes, name: str) -> bytes:
    """A body that the intake has read, with another name for its model; copied once."""
    if multipart.is_form(content_type):
        place = multipart.find(body, content_type, FIELD)
        assert place is not None, "the intake found it"
        value = name.encode()
    else:
        place = _place_in(body)
        value = msgspec.json.encode(name)
    view = memoryview(body)
    return b"".join((view[: place.start], value, view[place.stop :]))


def rename_in_query(query: bytes, name: str) -> bytes:
    """A query with another name for its model: in its first field `model` that has a value."""
    fields = query.split(b"&")
    for index, field in enumerate(fields):
        key, _, value = field.partition(b"=")
        if value and urllib.parse.unquote_plus(key.decode("latin-1")) == FIELD:
            fields[index] = b"%b=%b" % (key, urllib.parse.quote(name, safe="").encode())
            return b"&".join(fields)
    return query


def _place_in(body: bytes) -> slice:
    """Where the value of a JSON body's own `model` stands, quotes included."""
    value = bytes(_DECODER.decode(body).model)
    start = body.find(value)
    if body.find(value, start + 1) >= 0:
        start = _start_of_view(body)
    return slice(start, start + len(value))


def _start_of_view(body: bytes) -> int:
    """The same where the value stands in other places too.

    Only the decoder knows which it is, and it tells no position, but gives a view of what it
    read. Of a copy, therefore, half after half is blanked, to see in which the view lies. To
    follow the braces here would take seconds for a large body with nothing but braces.
    """
    copy = bytearray(body)
    seen = memoryview(_DECODER.decode(copy).model)
    low, high = 0, len(copy)
    while high - low > 1:
        middle = (low + high) // 2
        copy[low:middle] = bytes(middle - low)
        if seen[0]:
            low = middle
        else:
            copy[low:middle] = body[low:middle]
            high = middle
    return low
