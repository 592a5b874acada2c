"""ms-swift's vLLM engine of ``swift rollout``, asynchronous, with workers that can say what they loaded.

Encoding, sampling parameters, stop words and the reply's records are ms-swift's own code, so that a request means
here what it means to the stock server. Lives on the engine thread's event loop. Knows ms-swift and vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift_stage2.compat import declare_operators
from swift_stage2.errors import UserError
from swift_stage2.rollout_server.answer_prefix import append_prefix
from swift_stage2.rollout_server.engine import GenerationRequest, JobAborted, WeightStamp
from swift_stage2.rollout_server.swift_generator import checkpoint_manifest, decode_images, seal_template
from swift_stage2.rollout_server.vllm_weights import WORKER_EXTENSION, Report
from swift_stage2.servers.infer_wire import Completion
from swift_stage2.wire import TensorSpec

declare_operators()  # before the first import of ms-swift, which imports torchvision

from swift.arguments import RolloutArguments  # noqa: E402
from swift.infer_engine import GRPOVllmEngine, RequestConfig  # noqa: E402
from swift.infer_engine.protocol import RolloutInferRequest  # noqa: E402
from swift.utils import get_seed  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: E402

from swift_stage2.checks.swift_parsing import COMMAND_LINE, parse_swift_arguments  # noqa: E402

# What a round's merged weights and one turn allow of the arguments of `swift rollout`.
_SERVED = {
    "vllm_data_parallel_size": 1,
    "vllm_enable_lora": False,
    "adapters": [],
    "multi_turn_scheduler": None,
    "use_gym_env": False,
}
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


def build_generator(argv: Sequence[str], *, trusts_code: bool = False) -> VllmGenerator:
    """The engine for the command line of ``swift rollout``; blocks until the model is loaded.

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
        "load_format": engine_kwargs.pop("load_format", "auto"),
        "engine_kwargs": engine_kwargs,
    }
    VllmGenerator.trusts_code = trusts_code
    generator = VllmGenerator(**options)
    seal_template(generator.template)
    return generator


def _refuse_unserved(arguments: Any) -> None:
    for name, only in _SERVED.items():
        if (value := getattr(arguments, name)) != only:
            remedy = "use swift rollout for it, or start one server for each replica"
            raise UserError(f"--engine vllm serves {name}={only} only", got=f"{name}={value}", remedy=remedy)


class VllmGenerator(GRPOVllmEngine):  # type: ignore[misc]
    """One model in vLLM's own processes. Its coroutines run on the loop on which it was built."""

    trusts_code = False
    """True if server and workers may run the checkpoint's own Python code."""

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
        self, request: GenerationRequest, request_id: str, stamp: WeightStamp, is_aborted: Callable[[], bool]
    ) -> Completion:
        """Generates one completion.

        Raises:
            JobAborted: ``is_aborted`` was true when the request had been encoded.
            SampleError: an image that is none, or a prefix that no answer has.
            EngineDeadError: vLLM's processes have died.
            Exception: whatever ms-swift's template or vLLM raises on a request it cannot take.
        """

        template_inputs = None

        def before_start(arguments: dict[str, Any]) -> dict[str, Any]:
            nonlocal template_inputs
            if is_aborted():
                raise JobAborted
            sampling, template_inputs = arguments["generation_config"], arguments["inputs"]["template_inputs"]
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            if request.prefix:
                arguments["inputs"] = self._with_prefix(arguments["inputs"], request.prefix, sampling)
                # Where nothing is left, vLLM refuses the prompt as too long.
                sampling.max_tokens = max(1, sampling.max_tokens - len(request.prefix))
            return arguments

        images = await asyncio.to_thread(decode_images, request, is_aborted, self.template)
        wanted = RolloutInferRequest(**{**request.conversation, "images": images}, uuid=request_id)
        response = await self.infer_async(wanted, _request_config(request), pre_infer_hook=before_start)
        choice = response.choices[0]
        text = choice.message.content
        if request.prefix:  # a character may be spelt by its last id and the first new one
            text = self.template.decode_generate_ids(
                [*request.prefix, *choice.token_ids], template_inputs=template_inputs
            )
        num_prompt = len(response.prompt_token_ids) - len(request.prefix)
        return Completion(
            text=text,
            token_ids=tuple(choice.token_ids),
            finish_reason=choice.finish_reason,
            prompt_token_ids=tuple(response.prompt_token_ids[:num_prompt]),
            images_size=tuple((width, height) for width, height in response.images_size or ()),
            log_probs=_log_probs(choice.logprobs) if request.sampling.logprobs else None,
            weight_version=stamp.version,
            run_id=stamp.run_id,
        )

    def _with_prefix(self, inputs: dict[str, Any], prefix: tuple[int, ...], sampling: Any) -> dict[str, Any]:
        """vLLM itself puts as many ids as an image needs in the place of the one that the prompt has for it."""
        configured = self.engine.input_processor.generation_config_fields.get("eos_token_id")
        ends = configured if isinstance(configured, list) else [configured]
        return append_prefix(
            inputs,
            prefix,
            num_ids=self.engine.model_config.get_vocab_size(),
            end_ids={self.tokenizer.eos_token_id, *sampling.stop_token_ids, *ends},
            media_ids=self.template.placeholder_tokens,
        )

    async def abort(self, request_id: str) -> None:
        """Ends a request; its completion says ``abort``. Does nothing to one that vLLM does not hold."""
        await self.engine.abort(request_id)

    async def load_weights(self, path: str) -> list[str]:
        """Has every worker load a snapshot; why it could not read it, empty of one that has."""
        refusals: list[str] = await self.engine.collective_rpc("stage2_load_weights", args=(path,))
        return refusals

    async def held_weights(self) -> list[Report]:
        """Each worker's record of its last load of weights, as ``vllm_weights`` describes it."""
        reports: list[Report] = await self.engine.collective_rpc("stage2_weight_sums", args=("",))
        return reports

    async def reset_caches(self) -> bool:
        """Empties all that was computed with the weights; False when vLLM could not, as a request still uses it."""
        await self.engine.reset_encoder_cache()
        await self.engine.reset_mm_cache()
        return bool(await self.engine.reset_prefix_cache())

    def shut_down(self, timeout_s: float) -> None:
        self.engine.shutdown(timeout=timeout_s)


def request_failure(error: Exception) -> Exception:
    """The cause that vLLM wraps."""
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def _request_config(request: GenerationRequest) -> RequestConfig:
    sampling = request.sampling
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    options: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    options |= {"max_tokens": request.max_new_tokens, "seed": request.seed}
    given = {name: value for name, value in options.items() if value is not None}
    return RequestConfig(**given, logprobs=bool(sampling.logprobs), return_details=True)


def _log_probs(record: dict[str, Any] | None) -> tuple[float, ...]:
    return tuple(float(entry["logprob"]) for entry in record["content"]) if record else ()
