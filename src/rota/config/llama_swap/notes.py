"""What becomes of settings that rota has not: a sentence for each, shown where it stood.

"Not built yet" is said only of what a later version is to have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rota.config.complaints import Place

_LATER = "not built yet"
_LISTS = "the list of models shows names only"
_OWN_LOG = "rota logs to stderr, and engines to files in its state folder"

LOST_AT_THE_TOP: Mapping[str, str] = {
    "logLevel": _OWN_LOG,
    "logTimeFormat": _OWN_LOG,
    "logToStdout": _OWN_LOG,
    "logRequests": "it had no effect there either",
    "metricsMaxInMemory": f"a record of requests is {_LATER}",
    "captureBuffer": "bodies of requests are not kept",
    "store": f"a record of requests is {_LATER}",
    "ui": f"the page is {_LATER}",
    "performance": f"figures over time are {_LATER}",
    "sendLoadingState": f"telling a stream that its model loads is {_LATER}",
    "includeAliasesInList": "aliases are names to ask for, and are not listed",
    "upstream": "every request under /upstream/ loads its model",
    "profiles": "names have one meaning; use `aliases`",
    "selectors": "a request is for one model; ask for a target by name",
    "slotCache": f"saving KV slots to disk is {_LATER}",
}

LOST_OF_A_MODEL: Mapping[str, str] = {
    "name": _LISTS,
    "description": _LISTS,
    "unlisted": "every model is listed",
    "metadata": _LISTS,
    "capabilities": _LISTS,
    "sendLoadingState": LOST_AT_THE_TOP["sendLoadingState"],
    "timeouts": "a connection to an engine lasts as long as its request",
    "estRamGB": "host memory is not budgeted",
    "slotCachePreamble": LOST_AT_THE_TOP["slotCache"],
}

LOST_FILTER = f"requests pass unchanged; filters are {_LATER}"
LOST_PEER_KEY = f"a key for it is {_LATER}: it is asked without one, and may answer 401"


@dataclass(frozen=True, slots=True)
class Note:
    """Something to tell about one key.

    Args:
        key: as in llama-swap's file.
        is_lost: it has no counterpart; else it has one that wants a look.
    """

    place: Place
    key: str
    text: str
    is_lost: bool = False

    def __str__(self) -> str:
        return f"`{self.key}`: {self.text}"
