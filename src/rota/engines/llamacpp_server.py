"""llama.cpp's own HTTP server from the `xllamacpp` wheel, as a program.

A process of its own, so that a model is evicted by ending it and a crash in C++ takes nothing
else along. It keeps Python's default SIGTERM: the process ends at once, in the midst of a
load too, which is what an eviction wants. Refused: the server inside rota's process.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any


def main() -> None:
    """Load the model, serve it on loopback until a signal ends the process."""
    args = _arguments()
    try:
        import xllamacpp
    except ImportError:
        sys.exit("the embedded engine needs a wheel: pip install xllamacpp")
    try:
        server = xllamacpp.Server(_params(xllamacpp, args))  # returns once the model is loaded
    except RuntimeError as error:
        sys.exit(f"llama.cpp could not start: {error}")
    print(f"ready at {server.listening_address}", flush=True)  # noqa: T201 - goes to the log
    while True:
        signal.pause()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rota.engines.llamacpp_server", description=__doc__)
    parser.add_argument("--model", required=True, metavar="FILE")
    parser.add_argument("--alias", required=True, help="the name that answers carry")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--context", required=True, type=int, help="tokens per slot")
    parser.add_argument("--parallel", required=True, type=int, help="slots")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu-layers", type=int)
    parser.add_argument("--embedding", action="store_true")
    return parser.parse_args()


def _params(xllamacpp: Any, args: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {args.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_ctx = args.context * args.parallel  # the total over the slots
    params.n_parallel = args.parallel
    if args.threads is not None:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    if args.gpu_layers is not None:
        params.n_gpu_layers = args.gpu_layers
    if args.embedding:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        params.n_batch = params.n_ubatch = args.context  # an input must fit one physical batch
    params.ui = False
    params.cors_origins = ""  # its only caller is rota: no web page may read an answer
    # Its prompt cache takes up to 8 GiB of RAM unless told otherwise, beside the footprint
    # that the placement was planned with.
    params.cache_ram_mib = 0
    return params


if __name__ == "__main__":
    main()
