"""`pytest tests --rewrite` writes transcripts anew; read the difference before committing."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write transcripts anew")
