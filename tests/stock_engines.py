"""A stock server's routes as ms-swift wrote them, in front of stand-ins for its data-parallel engines.

Without vLLM ms-swift's module cannot be imported; the methods that split a call among engines and collect what they
say are taken out of its installed source and run as they are.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_rollout_server import Answer, Call, FakeRolloutServer, json_answer, output

from swift_stage2 import wire

_ROUTES = {
    wire.WORLD_SIZE: "get_world_size",
    wire.STATE_KEYS: "get_model_state_keys",
    wire.RESET_PREFIX_CACHE: "reset_prefix_cache",
    wire.INFER: "infer",
}


class StandInEngine:
    """One engine behind its pipe: greedy ``answer``, and what its reset and its workers say (None: failed)."""

    def __init__(
        self, answer: Sequence[int] = (5, 6), reset: Any = True, keys: Any = (("a.weight",),)
    ) -> None:
        self._replies: list[Any] = []
        self.prompts: list[str] = []
        self._answer = answer
        self._says = {
            "reset_prefix_cache": reset,
            "collective_rpc": keys and [list(worker) for worker in keys],
        }

    def send(self, command: dict[str, Any]) -> None:
        if command["type"] != "call":
            return
        reply = (
            self._infer(command["kwargs"]) if command["method"] == "infer" else self._says[command["method"]]
        )
        self._replies.append(reply)

    def recv(self) -> Any:
        return self._replies.pop(0)

    def _infer(self, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        outputs = []
        for request in kwargs["infer_requests"]:
            self.prompts.append(request["messages"][0]["content"])
            item = output("")
            item["response"]["choices"][0]["token_ids"] = list(self._answer)
            outputs.append(item)
        return outputs


def stock_server(*engines: StandInEngine, tensor_parallel_size: int = 1) -> FakeRolloutServer:
    """A server that is not started yet."""
    arguments = SimpleNamespace(
        vllm_tensor_parallel_size=tensor_parallel_size, vllm_data_parallel_size=len(engines)
    )
    swift = SimpleNamespace(
        args=arguments, connections=list(engines), num_connections=len(engines), use_async_engine=False
    )
    methods = _methods_of_swift()

    def answer(call: Call) -> Answer:
        if call.path not in _ROUTES:
            return Answer(status=404)
        body = (call.body["infer_requests"], call.body["request_config"]) if call.path == wire.INFER else ()
        said = asyncio.run(methods[_ROUTES[call.path]](swift, *body))
        return json_answer(said)

    return FakeRolloutServer(on_infer=answer, on_reset=answer, on_get=answer)


def _methods_of_swift() -> dict[str, Callable[..., Any]]:
    found = importlib.util.find_spec("swift")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    trees = [
        ast.parse((folder / name).read_text())
        for name in ("rlhf_trainers/utils.py", "pipelines/infer/rollout.py")
    ]
    wanted = {"chunk_list", *_ROUTES.values()}
    functions = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in wanted
    ]
    future = ast.parse("from __future__ import annotations").body
    names: dict[str, Any] = {
        "chain": chain,
        "RolloutInferRequest": lambda messages: {"messages": messages},
    }
    exec(compile(ast.Module(body=[*future, *functions], type_ignores=[]), "ms-swift", "exec"), names)
    return {name: names[name] for name in wanted}
