"""The field that names a model is found in a form, wherever it stands, and junk is told apart.
How: forms as bytes, as clients of OpenAI's SDK send them and as nobody should."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.gateway.multipart import NotAFormError, field, is_form

KIND = b"multipart/form-data; boundary=xyz"


def form(*parts: tuple[str, bytes]) -> bytes:
    body = b""
    for head, value in parts:
        body += b"--xyz\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n"
        body += value + b"\r\n"
    return body + b"--xyz--\r\n"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (form(('name="model"', b"m")), "m"),
        (form(('name="prompt"', b"a cat"), ('name="model"', b"org/m:7b")), "org/m:7b"),
        (form(('name="f"; filename="model"', b"\0\xff\r\n--xy"), ("name=model", b"m")), "m"),
        (form(('filename="x"; name="model"', b"no"), ('name="model"', b"m")), "m"),
        (b"preamble\r\n" + form(('name="model"', "modèle".encode())), "modèle"),
        (form(('name="model"', b"first"), ('name="model"', b"second")), "first"),
        (form(('name="model"', b"")), ""),
        (form(('name="models"', b"m"), ('name="x"', b'name="model"')), None),
        (form(), None),
    ],
)
def test_the_model_of_a_form(body: bytes, value: str | None) -> None:
    assert field(body, KIND, "model") == value


def test_a_boundary_in_quotes_and_the_kinds_that_are_forms() -> None:
    assert is_form(b' Multipart/Form-Data; boundary="a b"')
    assert not is_form(b"application/json")
    body = b'--a b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--a b--'
    assert field(body, b'multipart/form-data; charset=utf-8; boundary="a b"', "model") == "m"


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        (form(), b"multipart/form-data", "states no boundary"),
        (form(), b"multipart/form-data; boundary=" + b"x" * 71, "states no boundary"),
        (b"", KIND, "not in it"),
        (b"{}", KIND, "not in it"),
        (b'--xyz\r\nContent-Disposition: form-data; name="model"\r\n\r\nm', KIND, "not whole"),
        (b"--xyz\r\n" + b"x" * 9_000 + b"\r\n\r\n\r\n--xyz--", KIND, "not whole"),
        (form(('name="model"', b"\xff")), KIND, "not UTF-8"),
    ],
)
def test_what_is_no_form(body: bytes, kind: bytes, why: str) -> None:
    with pytest.raises(NotAFormError, match=why):
        field(body, kind, "model")


@given(st.lists(st.sampled_from([b"--xyz", b"\r\n", b"--", b"\r\n\r\n", b'name="model"', b"x"])))
def test_any_bytes_have_a_model_or_have_none(pieces: list[bytes]) -> None:
    with suppress(NotAFormError):
        field(b"".join(pieces), KIND, "model")
