"""The verbs. `rota.cli:main` is the command; each verb's module is imported when it runs."""

from rota.cli.verbs import main

__all__ = ["main"]
