"""`rota keys hash`, and what `rota check` says of keys.

How: the verbs in this process, keys on their standard input.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rota.cli import main

KEY = "sk-rota-0123456789abcdef"
HASH = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_key_becomes_its_hash(ending: str) -> None:
    result = CliRunner().invoke(main, ["keys", "hash"], input=KEY + ending)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{HASH}\n", "")


def test_a_short_key_is_hashed_with_a_warning() -> None:
    result = CliRunner().invoke(main, ["keys", "hash"], input="abc")
    assert (result.exit_code, len(result.stdout)) == (0, 65)
    assert result.stderr == "warning: a key of 3 characters can be guessed\n"


@pytest.mark.parametrize("key", ["", "\n", "two words and more", "a\nb", "schlüssel", "k" * 5_000])
def test_what_no_client_could_send(key: str) -> None:
    result = CliRunner().invoke(main, ["keys", "hash"], input=key)
    assert (result.exit_code, result.stdout) == (1, "")
    assert key.strip() not in result.stderr or not key.strip()


def test_bytes_that_are_no_text() -> None:
    result = CliRunner().invoke(main, ["keys", "hash"], input=b"\xff\xfe" * 20)
    assert (result.exit_code, result.stdout) == (1, "")


def test_check_names_them(tmp_path: Path) -> None:
    path = tmp_path / "rota.yaml"
    path.write_text(
        f"listen: 0.0.0.0:80\nkeys: {{alice: {{sha256: {HASH}}}, bob: {{sha256: {'0' * 64}}}}}\n"
        "models: {far: {url: http://far:1}}\n"
    )
    result = CliRunner().invoke(main, ["check", str(path)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "keys       alice, bob" in result.stdout
    answer = json.loads(CliRunner().invoke(main, ["check", str(path), "--json"]).stdout)
    assert answer["keys"] == ["alice", "bob"]
