"""ms-swift's vLLM engine of ``swift rollout``, asynchronous, with workers that can say what they loaded.

Encoding, sampling parameters, stop words and the reply's records are ms-swift's own code, so that a request means
here what it means to the stock server. Lives on the engine thread's event loop. Knows ms-swift and vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from swift_stage2.compat import declare_operators
from swift_stage2.errors import ProtocolError, UserError
from swift_stage2.rollout_server.engine import GenerationRequest, JobAborted, WeightStamp, weights_of
from swift_stage2.rollout_server.swift_generator import checkpoint_manifest, decode_images, seal_template
from swift_stage2.rollout_server.vllm_weights import WORKER_EXTENSION, Report, in_place_of
from swift_stage2.servers.infer_wire import Completion, Turns, as_one
from swift_stage2.wire import TensorSpec

declare_operators()  # before the first import of ms-swift, which imports torchvision

from swift.arguments import RolloutArguments  # noqa: E402
from swift.infer_engine import GRPOVllmEngine, RequestConfig  # noqa: E402
from swift.infer_engine.protocol import RolloutInferRequest  # noqa: E402
from swift.utils import get_seed  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: E402

from swift_stage2.checks.swift_parsing import COMMAND_LINE, parse_swift_arguments  # noqa: E402

# What a round's merged weights and the learner's prompts allow of the arguments of `swift rollout`.
_SERVED = {
    "vllm_data_parallel_size": 1,
    "vllm_enable_lora": False,
    "adapters": [],
    "use_gym_env": False,
}
Spans = list[tuple[WeightStamp, int]]
_turns = ContextVar[list[tuple[int, Spans]]]("turns")
"""Of the request that a task answers: of each turn the prompt's length, and which weights sampled how many tokens."""
__all__ = ["EngineDeadError", "VllmGenerator", "build_generator", "request_failure"]


@dataclass
class ServerArguments(RolloutArguments):  # type: ignore[misc]
    """The arguments of ``swift rollout``. Where there is no accelerator, none are counted."""

    def __post_init__(self) -> None:
        self.vllm_use_async_engine = True
        super().__post_init__()

    def _check_device_count(self) -> None:
        if torch.accelerator.is_available():
            super()._check_device_count()


def build_generator(argv: Sequence[str], *, trusts_code: bool = False, sleeps: bool = False) -> VllmGenerator:
    """The engine for the command line of ``swift rollout``; blocks until the model is loaded.

    One that ``sleeps`` can give its memory back; on a CPU vLLM keeps it, says so, and does all else.

    Raises:
        UserError: arguments that ms-swift refuses, or that this server does not serve.
    """
    arguments = parse_swift_arguments(argv, ServerArguments, where=COMMAND_LINE)
    _refuse_unserved(arguments)
    engine_kwargs = (arguments.vllm_engine_kwargs or {}) | {"worker_extension_cls": WORKER_EXTENSION}
    options = {
        **arguments.get_vllm_engine_kwargs(),
        "model_id_or_path": arguments.model,
        "model_type": arguments.model_type,
        "revision": arguments.model_revision,
        "torch_dtype": arguments.torch_dtype,
        "template": arguments.get_template(),
        "seed": get_seed(),
        # As the stock server: log-probabilities after temperature and the other warpers.
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": sleeps and torch.accelerator.is_available(),
        "load_format": engine_kwargs.pop("load_format", "auto"),
        "engine_kwargs": engine_kwargs,
    }
    VllmGenerator.trusts_code = trusts_code
    generator = VllmGenerator(**options)
    seal_template(generator.template)
    if arguments.multi_turn_scheduler:
        from swift.pipelines.infer.rollout import get_rollout_engine_type

        generator.scheduler = get_rollout_engine_type(arguments, generator)
    return generator


def _refuse_unserved(arguments: Any) -> None:
    for name, only in _SERVED.items():
        if (value := getattr(arguments, name)) != only:
            remedy = "use swift rollout for it, or start one server for each replica"
            raise UserError(f"--engine vllm serves {name}={only} only", got=f"{name}={value}", remedy=remedy)


class VllmGenerator(GRPOVllmEngine):  # type: ignore[misc]
    """One model in vLLM's own processes. Its coroutines run on the loop on which it was built.

    vLLM changes weights under running requests, and says which tokens are of which, from version 0.32 on. What was
    computed for a running answer is kept.
    """

    trusts_code = False
    """True if server and workers may run the checkpoint's own Python code."""
    scheduler: Any = None
    """ms-swift's scheduler of several turns; None without one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._label = "default"  # of the weights that the model holds, as vLLM calls the checkpoint's
        self._stamps = {self._label: WeightStamp()}

    def _prepare_engine_kwargs(self, *arguments: Any, **options: Any) -> None:
        """ms-swift tells vLLM to run it, and has no argument for that."""
        super()._prepare_engine_kwargs(*arguments, **options)
        self.engine_args.trust_remote_code = self.trusts_code

    @property
    def is_dead(self) -> bool:
        """True once vLLM's core or a worker has died."""
        return bool(self.engine.errored)

    @property
    def num_running(self) -> int:
        """Requests that vLLM holds now, waiting in its scheduler or computed."""
        return int(self.engine.output_processor.get_num_unfinished_requests())

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The checkpoint's own names and shapes, in the dtype that vLLM holds them in."""
        info = self.model_info
        return checkpoint_manifest(info.model_dir, info.model_type, self.engine.model_config.dtype)

    async def answer(
        self, request: GenerationRequest, request_id: str, is_aborted: Callable[[], bool]
    ) -> Completion:
        """Generates one completion.

        Raises:
            JobAborted: ``is_aborted`` was true when the request had been encoded.
            SampleError: an image that is none.
            ProtocolError: a scheduler that gives a list, or turns that are not in its conversation.
            EngineDeadError: vLLM's processes have died.
            Exception: whatever ms-swift's template or vLLM raises on a request it cannot take.
        """

        def before_start(arguments: dict[str, Any]) -> dict[str, Any]:
            if is_aborted():
                raise JobAborted
            arguments["generation_config"].output_kind = RequestOutputKind.FINAL_ONLY
            return arguments

        images = await asyncio.to_thread(decode_images, request, is_aborted, self.template)
        wanted = RolloutInferRequest(**{**request.conversation, "images": images}, uuid=request_id)
        turns: list[tuple[int, Spans]] = []
        _turns.set(turns)
        run = self.infer_async if self.scheduler is None else self.scheduler.run
        output = await run(wanted, _request_config(request), pre_infer_hook=before_start)
        if isinstance(output, list):
            raise ProtocolError(
                f"a scheduler must return one output per request, got {len(output)} in a list"
            )
        response = output if self.scheduler is None else output.response
        choice = response.choices[0]
        last = Completion(
            text=choice.message.content,
            token_ids=tuple(choice.token_ids),
            finish_reason=choice.finish_reason,
            prompt_token_ids=tuple(response.prompt_token_ids),
            images_size=tuple((width, height) for width, height in response.images_size or ()),
            log_probs=_log_probs(choice.logprobs) if request.sampling.logprobs else None,
        )
        said = Turns() if self.scheduler is None else Turns.from_json(vars(output))
        whole = as_one(last, said, needs_log_probs=False)  # who asks knows
        spans = _of_all(turns, len(whole.prompt_token_ids), len(last.prompt_token_ids + last.token_ids))
        return replace(whole, **weights_of(spans))

    def _create_chat_completion_response(self, result: Any, *arguments: Any, **options: Any) -> Any:
        """ms-swift's, with what vLLM says of the weights that sampled its tokens."""
        response = super()._create_chat_completion_response(result, *arguments, **options)
        output = result.outputs[0]
        spans = [
            (self._stamps[span.version], span.end - span.start)
            for span in getattr(output, "weight_versions", None) or ()
        ]
        spans = spans or [(self._stamps[self._label], len(output.token_ids))]
        _turns.get([]).append((len(result.prompt_token_ids), spans))
        return response

    def _add_request(self, *arguments: Any, **options: Any) -> Any:
        """ms-swift's, whose prompt finds no prefix that other weights have computed."""
        generate = self.engine.generate

        def salted(prompt: dict[str, Any], *rest: Any, **more: Any) -> Any:
            return generate({**prompt, "cache_salt": self._label}, *rest, **more)

        with in_place_of(self.engine, "generate", salted):
            return super()._add_request(*arguments, **options)

    async def abort(self, request_id: str) -> None:
        """Ends a request. Does nothing to one that vLLM does not hold."""
        await self.engine.abort(request_id)

    async def load_weights(self, path: str) -> list[str]:
        """Has every worker load a snapshot; why it could not read it, empty of one that has."""
        refusals: list[str] = await self.engine.collective_rpc("stage2_load_weights", args=(path,))
        return refusals

    async def held_weights(self) -> list[Report]:
        """Each worker's record of its last load of weights, as ``vllm_weights`` describes it."""
        reports: list[Report] = await self.engine.collective_rpc("stage2_weight_sums", args=("",))
        return reports

    @property
    def keeps_requests(self) -> bool:
        """True: vLLM changes weights under running requests, and reports the weights that sampled each token."""
        return hasattr(self.engine, "update_weight_version")

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Between two tokens: nothing is computed inside, and what was being answered goes on afterwards."""
        try:
            if self.keeps_requests:
                await self.engine.pause_generation(mode="keep", clear_cache=False)
            yield
        finally:
            if self.keeps_requests:
                await self.engine.resume_generation()

    async def sleep(self, level: int) -> None:
        """Gives back caches and weights, at level 1 to main memory; nothing is computed until both are awake."""
        await self.engine.sleep(level)

    async def is_sleeping(self) -> bool:
        """Whether any part of the memory is given back, or nothing is computed for another reason."""
        return bool(await self.engine.is_sleeping())

    async def wake(self, part: str) -> None:
        """Takes memory for ``weights``, or for ``kv_cache``, again; after the second vLLM computes."""
        await self.engine.wake_up([part])

    async def name_weights(self, stamp: WeightStamp) -> None:
        """Has vLLM label every token that it samples from now on with these weights."""
        self._label = str(len(self._stamps))
        self._stamps[self._label] = stamp
        if self.keeps_requests:
            await self.engine.update_weight_version(self._label)

    async def reset_caches(self) -> bool:
        """Empties what was computed with other weights and would be used again; False when vLLM could not."""
        await self.engine.reset_encoder_cache()
        return self.keeps_requests or bool(await self.engine.reset_prefix_cache())

    def shut_down(self, timeout_s: float) -> None:
        self.engine.shutdown(timeout=timeout_s)


def request_failure(error: Exception) -> Exception:
    """The cause that vLLM wraps."""
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def _of_all(turns: Sequence[tuple[int, Spans]], first: int, end: int) -> Spans:
    """The weights of all tokens from ``first`` to ``end``: those of a turn hold until the next one begins."""
    found, place = Spans(), first
    for (_, spans), until in zip(turns, [*(start for start, _ in turns[1:]), end], strict=True):
        for number, (stamp, num_tokens) in enumerate(spans, 1):
            stop = until if number == len(spans) else min(place + num_tokens, until)
            found.append((stamp, stop - place))
            place = stop
    of_one = groupby(found, key=lambda span: span[0])
    return [(stamp, sum(num_tokens for _, num_tokens in run)) for stamp, run in of_one]


def _request_config(request: GenerationRequest) -> RequestConfig:
    sampling = request.sampling
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    options: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    options |= {"max_tokens": request.max_new_tokens, "seed": request.seed}
    given = {name: value for name, value in options.items() if value is not None}
    return RequestConfig(**given, logprobs=bool(sampling.logprobs), return_details=True)


def _log_probs(record: dict[str, Any] | None) -> tuple[float, ...]:
    return tuple(float(entry["logprob"]) for entry in record["content"]) if record else ()
