"""From a configured engine to one concrete start: the command line and the whole environment.

A pure function of what it is given, so that what a child will see can be tested without a
child. Refused: a class per engine with a common base; at this size three short functions say
the same and hide nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import assert_never
from urllib.parse import urlsplit

from rota.config.values import CommandEngine, LlamaCppEngine, UrlEngine
from rota.engines.base import Endpoint, Launch

Spawned = CommandEngine | LlamaCppEngine  # the engines that are a process of ours


def launch_for(
    engine: Spawned,
    *,
    model: str,
    port: int,
    visible: Sequence[str] = (),
    environ: Mapping[str, str],
) -> Launch:
    """How to start `engine` once, on `port` of loopback.

    Args:
        model: the model's own name; stands for `${MODEL}` and is what the engine answers to.
        visible: what CUDA calls the devices it is placed on; none = it is told nothing. A
            placement is a promise to others, so it goes over what the file says in `env`.
        environ: rota's own environment, of which the child gets all but `ROTA_*`.
    """
    env = {key: value for key, value in environ.items() if not key.startswith("ROTA_")}
    env |= {key: _filled_in(value, model, port) for key, value in engine.env.items()}
    if visible:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    match engine:
        case CommandEngine():
            return Launch(
                argv=tuple(_filled_in(word, model, port) for word in engine.argv),
                env=env,
                port=port,
                ready=engine.ready,
                cwd=engine.cwd,
                stop_argv=tuple(_filled_in(word, model, port) for word in engine.stop_argv),
            )
        case LlamaCppEngine(server=None):
            argv = _embedded(engine, model, port)
        case LlamaCppEngine():
            argv = _llama_server(engine, model, port)
        case _:
            assert_never(engine)
    return Launch(argv=argv, env=env, port=port, ready="/health", files=(engine.model,))


def endpoint_of(engine: UrlEngine) -> Endpoint:
    """Where a URL points. Raises ValueError: it is not an http or https URL with a host."""
    url = urlsplit(engine.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"not an http:// or https:// URL: {engine.url}")
    port = url.port or (443 if url.scheme == "https" else 80)
    return Endpoint(url.hostname, port, url.scheme, url.path.rstrip("/"))


def _filled_in(text: str, model: str, port: int) -> str:
    return text.replace("${PORT}", str(port)).replace("${MODEL}", model)


def _embedded(engine: LlamaCppEngine, model: str, port: int) -> tuple[str, ...]:
    # -P: a folder named `rota` where rota was started is not this package.
    argv = [sys.executable, "-P", "-m", "rota.engines.llamacpp_server"]
    argv += ["--model", str(engine.model), "--alias", model, "--port", str(port)]
    argv += ["--context", str(engine.context), "--parallel", str(engine.parallel)]
    if engine.threads is not None:
        argv += ["--threads", str(engine.threads)]
    if engine.gpu_layers is not None:
        argv += ["--gpu-layers", str(engine.gpu_layers)]
    if engine.embedding:
        argv += ["--embedding"]
    return tuple(argv)


def _llama_server(engine: LlamaCppEngine, model: str, port: int) -> tuple[str, ...]:
    # --ctx-size is the total over the slots (llama.cpp, tools/server/README.md).
    argv = [str(engine.server), "--model", str(engine.model), "--alias", model]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--ctx-size", str(engine.context * engine.parallel)]
    argv += ["--parallel", str(engine.parallel)]
    if engine.threads is not None:
        argv += ["--threads", str(engine.threads)]
    if engine.gpu_layers is not None:
        argv += ["--n-gpu-layers", str(engine.gpu_layers)]
    if engine.embedding:
        # An input must fit one physical batch, or the server refuses it.
        argv += ["--embedding", "--pooling", "mean"]
        argv += ["--batch-size", str(engine.context), "--ubatch-size", str(engine.context)]
    return (*argv, *engine.args)
