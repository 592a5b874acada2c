"""Hooks of the unmodified ``swift rollout``: its engines get the worker extension, its app a route that asks them.

Registered in the server's process, before its app is built, and in every process that runs an engine.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import Depends
from fastapi.responses import JSONResponse

from swift_stage2.rollout_server.vllm_weights import WORKER_EXTENSION, combine
from swift_stage2.wire import WEIGHT_SUMS

_WORKER_METHOD = "stage2_weight_sums"
_ENGINE_METHOD = "stage2_ask_workers"
_ANSWER_S = 240.0


def register_server(program: Any) -> None:
    """Changes ``program``, ms-swift's module of ``swift rollout``.

    Raises:
        RuntimeError: it is of a release that this was not made for.
    """
    deploy = getattr(program, "SwiftRolloutDeploy", None)
    for owner, name in (
        (program, "GRPOVllmEngine"),
        (deploy, "_register_rl_rollout_app"),
        (deploy, "_require_api_key"),
    ):
        if not hasattr(owner, name):
            raise RuntimeError(f"checksums are shown of ms-swift 4.6, got another release: it has no {name}")
    program.GRPOVllmEngine = _summing(program.GRPOVllmEngine)
    build_app = program.SwiftRolloutDeploy._register_rl_rollout_app

    def build_app_with_sums(server: Any) -> None:
        build_app(server)
        _add_route(server)

    program.SwiftRolloutDeploy._register_rl_rollout_app = build_app_with_sums


def _summing(engine_class: type[Any]) -> type[Any]:
    """ms-swift's engine whose workers are extended by ours; ms-swift names its own extension in the same place."""

    def init(self: Any, *args: Any, engine_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        extended = {**(engine_kwargs or {}), "worker_extension_cls": WORKER_EXTENSION}
        engine_class.__init__(self, *args, engine_kwargs=extended, **kwargs)

    return type(engine_class.__name__, (engine_class,), {"__init__": init, _ENGINE_METHOD: _ask_workers})


def _ask_workers(engine: Any, question: str) -> Any:
    """Asks the workers of every engine behind this one; to be awaited from an asynchronous one."""
    if engine.use_async_engine:
        return _ask_workers_of_all(engine.engine, question)
    return [engine.engine.collective_rpc(_WORKER_METHOD, args=(question,))]


async def _ask_workers_of_all(engine: Any, question: str) -> list[Any]:
    # Of several data-parallel engines vLLM's own collective call hands back the first one's answer alone.
    ask_all = getattr(engine.engine_core, "call_utility_all_async", None)
    if ask_all is None:
        return [await engine.collective_rpc(_WORKER_METHOD, args=(question,))]
    return list(await ask_all("collective_rpc", _WORKER_METHOD, None, (question,), {}))


def _add_route(server: Any) -> None:
    incarnation = uuid.uuid4().hex

    async def tell_incarnation() -> dict[str, str]:
        return {"incarnation": incarnation}

    async def tell_sums() -> JSONResponse:
        question = uuid.uuid4().hex
        # On the event loop, as ms-swift asks its engines: nobody else may read an answer from these pipes meanwhile.
        for connection in server.connections:
            connection.send({"type": "call", "method": _ENGINE_METHOD, "args": (question,)})
        end = time.monotonic() + _ANSWER_S
        answers = []
        for connection in server.connections:
            if not connection.poll(max(0.0, end - time.monotonic())):
                # Its late answer would pass for one to ms-swift's next call.
                return JSONResponse({"detail": "an engine does not answer; start the server again"}, 503)
            answers.append(connection.recv())  # deadline: something is there
        engines = [engine for answer in answers for engine in answer or [None]]
        num_workers = server.args.vllm_tensor_parallel_size * server.args.vllm_data_parallel_size
        return JSONResponse(combine(incarnation, question, engines, num_workers).to_json())

    guard = [Depends(server._require_api_key())]
    server.app.get(WEIGHT_SUMS, dependencies=guard)(tell_incarnation)
    server.app.post(WEIGHT_SUMS, dependencies=guard)(tell_sums)
