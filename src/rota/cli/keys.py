"""The verb for keys: `keys hash`. A key is read from stdin, never from the command line, which
every user of the machine can read."""

from __future__ import annotations

import hashlib
import sys

import click

from rota.cli.text import is_terminal
from rota.errors import RequestError

LENGTH_MAX = 4_096
SHORT = 16
"""Characters under which a key can be found by trying; a hash without salt does not slow that."""


def hash_key() -> None:
    """Print the SHA-256 of a key. Raises RequestError: no client could send what came."""
    key = _read().rstrip("\r\n")
    if not key:
        raise _no_key("no key came; give it on stdin: rota keys hash < FILE")
    if len(key) > LENGTH_MAX or not all("!" <= character <= "~" for character in key):
        raise _no_key(
            f"a key is one line of up to {LENGTH_MAX} printable ASCII characters without spaces; "
            "clients could not send this one"
        )
    if len(key) < SHORT:
        click.echo(f"warning: a key of {len(key)} characters can be guessed", err=True)
    click.echo(hashlib.sha256(key.encode("ascii")).hexdigest())


def _read() -> str:
    if is_terminal(sys.stdin):
        return str(click.prompt("key", hide_input=True, err=True))
    data = b"" if sys.stdin is None else sys.stdin.buffer.read(LENGTH_MAX + 3)
    return data.decode("ascii", "replace")


def _no_key(message: str) -> RequestError:
    return RequestError(message, code="invalid_key")
