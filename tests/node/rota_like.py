"""A program that stands in for rota, to be killed: a node with three awkward engines up.

Prints one line of JSON when they are: the pids of the guard server, the guards and the rest.
What follows the state directory in its arguments is the command that ends each engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rota.node.guard import descendants
from tests.node.support import fake, model, scene

STOP_ARGV = tuple(sys.argv[2:])
MODELS = (
    model("polite", fake(stop_argv=STOP_ARGV)),
    model("stubborn", fake("--ignore-sigterm", stop_argv=STOP_ARGV)),
    model("parent", fake("--grandchild", "setsid", stop_argv=STOP_ARGV)),
)


async def main(state_dir: Path) -> None:
    async with scene(state_dir, *MODELS) as it:
        replicas = [await it.up(one.name) for one in MODELS]
        server = it.server_pid()
        guards = [it.guard_pid(replica) for replica in replicas]
        rest = sorted(set(descendants(server)) - set(guards))
        print(json.dumps({"server": server, "guards": guards, "rest": rest}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
