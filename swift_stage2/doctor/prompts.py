"""Whether the server turns real samples into the learner's own prompts: token by token, and image by image."""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.records import Sample, SampleKey
from swift_stage2.channel_b.rollout_client.connection import ServerConnection
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.doctor.finding import Outcome, failed, ok
from swift_stage2.servers import protocol
from swift_stage2.servers.protocol import Completion

_TEXT_PROMPT = "Write one word."
_FIX = (
    "give the server the learner's model, template and pixel limits (--template, MAX_PIXELS, --max_pixels), "
    "and restart it"
)


def check_prompts(
    connection: ServerConnection, encoder: Encoder, samples: Sequence[Sample], timeout_s: float
) -> Outcome[None]:
    """Asks for one token each, greedily, and compares what the server says it read."""
    asked = [*samples, _text_sample()]
    prompts = [encoder.encode_prompt(sample) for sample in asked]
    config = protocol.request_config(
        max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
    )
    result = connection.infer([encoder.request(sample) for sample in asked], config, timeout_s=timeout_s)
    if result.end is not PostEnd.ANSWERED:
        return failed(
            f"{len(samples)} sample(s) of the data set: {result.reason}",
            "read the server's log for the cause; an image or a prompt that it refuses is named there",
        )
    for number, (prompt, completion) in enumerate(zip(prompts, result.completions, strict=True)):
        difference = _difference(prompt, completion)
        if difference:
            row = f"row {samples[number].key.index}" if number < len(samples) else "a prompt of text alone"
            return failed(f"{row}: {difference}", _FIX)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    sizes = sorted({f"{width}x{height}" for prompt in prompts for width, height in prompt.images_size})
    return ok(
        f"{len(samples)} sample(s) and one text: all {sum(lengths)} prompt tokens are the learner's own; images as the "
        f"model sees them: {', '.join(sizes[:4]) or 'none'}"
    )


def _difference(prompt: PromptEncoding, completion: Completion) -> str:
    own, theirs = prompt.token_ids, completion.prompt_token_ids
    if completion.images_size and completion.images_size != prompt.images_size:
        return f"images are {_sizes(completion.images_size)} on the server, {_sizes(prompt.images_size)} on the learner"
    if own != theirs:
        place = next(
            (i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b),
            min(len(own), len(theirs)),
        )
        return f"the server reads {len(theirs)} prompt tokens, the learner {len(own)}, different from place {place} on"
    return ""


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sizes) or "none"


def _text_sample() -> Sample:
    row = {"messages": [{"role": "user", "content": _TEXT_PROMPT}], "objects": {"ref": [], "bbox": []}}
    return Sample(SampleKey(0, 0, 0), row)
