"""What a GGUF file is expected to take, from its size alone.

Good enough to tell what fits beside what; reading the header, and measuring, replace it in a
later version, and a stated `memory:` does so now. Nothing here opens more than four bytes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from rota.config.units import MIB

_SPLIT = re.compile(r"(.*-)00001(-of-(\d{5})\.gguf)")

# Beside weights and KV: code, vocabulary, compute buffers, HTTP. Embedded llama.cpp with a tiny
# model takes about this much.
FIXED_MIB = 96
WEIGHTS_FACTOR = 1.15


def estimate_mib(file: Path, tokens: int) -> int | None:
    """Memory that llama.cpp is expected to take for a file and so many tokens of KV cache.

    The KV cache takes layers × KV width per token, the weights layers × width²; so it grows
    about as the square root of the weights. 64 KiB × √(GB of file) fits what headers say, at
    16 bits per value: SmolLM2 135M 22 KiB (here 20), Gemma 3 270M 18 (32), Llama 3 8B Q4 128
    (142), Qwen 3 32B Q4 256 (286), Llama 3.3 70B Q4 320 (417). Seen in all, at 16,384 tokens:
    SmolLM2 509 MiB (here 526), Gemma 3 270M 453 (889: its windows slide). Models without
    grouped-query attention take more: state their memory.

    Args:
        file: the GGUF file, or the first of a split one (all its parts are counted).
        tokens: of all slots together.

    Returns: MiB; None when the file cannot be read or is not GGUF.
    """
    try:
        if not file.is_file():  # a pipe would be waited for
            return None
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                return None
        size = sum(part.stat().st_size for part in _parts(file))
    except (OSError, ValueError):
        return None
    kv_bytes = tokens * 64 * 1024 * math.sqrt(size / 1e9)
    return math.ceil((size * WEIGHTS_FACTOR + kv_bytes) / MIB) + FIXED_MIB


def _parts(file: Path) -> list[Path]:
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return [file]
    stem, rest, count = split.groups()
    return [file.with_name(f"{stem}{n:05}{rest}") for n in range(1, int(count) + 1)]
