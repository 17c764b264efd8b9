"""From a YAML file to frozen values, or to every complaint about it at once.

The parts, in the order a file meets them: `files` (whose it is; one of llama-swap's is made one
of ours by `llama_swap`), `document` (YAML to text with places), `schema`
(which keys there are), `loading` (what they mean together), `values` (what comes out).

Importing this package, or `rota.config.values`, costs no parser and no schema library: engine
processes read the values too, and should start fast.
"""

from __future__ import annotations

from pathlib import Path

from rota.config.values import Config


def load(
    path: Path,
    *,
    data: bytes | None = None,
    listen: str | None = None,
    state_dir: Path | None = None,
    allow_open: bool = False,
) -> Config:
    """Read and check a configuration file, ours or llama-swap's.

    Args:
        path: the YAML file; relative paths in it start from its folder.
        data: what the file holds, or is to hold; None = it is looked up.
        listen: `HOST:PORT`, instead of the file's.
        state_dir: instead of the file's.
        allow_open: listening beyond loopback is wanted, although there are no keys.

    Raises:
        ConfigError: the file cannot be used. It is a `rota.config.complaints.InvalidConfig`,
            which has every problem with its line and column.
    """
    from rota.config.files import load as load_file

    return load_file(path, data=data, listen=listen, state_dir=state_dir, allow_open=allow_open)
