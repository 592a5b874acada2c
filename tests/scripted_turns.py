"""ms-swift's own scheduler over answers that are written down, with the real template: no server, no vLLM."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

from real_model import make_template
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    UsageInfo,
)
from swift.rollout import MultiTurnScheduler

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.records import Rollout, Sample, VersionSpan
from swift_stage2.servers.infer_wire import Completion, parse_infer_reply


class Scripted:
    """Answers as vLLM would, with what it is given; the prompt's ids are the real template's."""

    def __init__(self, template: Any, answers: list[tuple[int, ...]]) -> None:
        self.template, self._answers = template, answers
        template.set_mode("transformers")

    async def infer_async(
        self, request: RolloutInferRequest, config: RequestConfig
    ) -> ChatCompletionResponse:
        turn = {"messages": copy.deepcopy(request.messages), "images": list(request.images)}
        prompt = self.template.encode(turn)["input_ids"]
        ids = list(self._answers.pop(0))
        log_probs = {"content": [{"logprob": -(token % 7) / 8 - place} for place, token in enumerate(ids)]}
        message = ChatMessage("assistant", self.template.decode_generate_ids(ids))
        choice = ChatCompletionResponseChoice(0, message, "stop", log_probs, ids)
        usage = UsageInfo(len(prompt), len(ids), len(prompt) + len(ids))
        return ChatCompletionResponse("m", [choice], usage, prompt_token_ids=prompt)


def conversation(
    kind: type[MultiTurnScheduler], encoder: Encoder, sample: Sample, texts: list[str]
) -> tuple[Any, Completion]:
    """A scheduler's whole answer, and what a learner reads of it."""
    answers = [encoder.tokenise(text)[0] + encoder.closing_token_ids[:1] for text in texts]
    template = make_template()
    scheduler = kind(Scripted(template, answers), max_turns=len(texts), tokenizer=template.tokenizer)
    request = RolloutInferRequest(**encoder.request(sample))
    output = asyncio.run(scheduler.run(request, RequestConfig()))
    record = json.loads(output.model_dump_json())
    (completion,) = parse_infer_reply([record], 1, {"log_probs"})
    return output, completion


def rollout_of(sample: Sample, found: Completion, advantages: tuple[float, ...] | None = None) -> Rollout:
    """An answer of several turns, as a client gives it."""
    return Rollout(
        sample=sample,
        text=found.text,
        token_ids=found.token_ids,
        prompt_token_ids=found.prompt_token_ids,
        truncated=found.finish_reason == "length",
        seed=1,
        server="http://127.0.0.1:1",
        spans=(VersionSpan(1, 0, len(found.token_ids)),),
        log_probs=found.log_probs,
        turns=found.turns,
        advantages=advantages,
    )
