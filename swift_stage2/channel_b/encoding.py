"""Turns samples into requests and targets into segments, with the pipeline's own copy of the template.

One of the few files that know ms-swift. The template decides the prompt, the images' resized size and
with it the coordinate space; nothing here repeats its arithmetic. Called by one thread at a time: the
pipeline's, the preprocessing process's, or that of the checks at the start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from PIL.Image import DecompressionBombError

from swift_stage2.channel_b.task import Convert
from swift_stage2.columns import COLUMNS
from swift_stage2.compat import zero3_unknown
from swift_stage2.errors import ConfigError, DatasetError, PromptMismatch, SampleError
from swift_stage2.records import Rollout, Sample, Segment, Target
from swift_stage2.servers.image_opening import image_as_base64

IGNORED_LABEL = -100
ALTERNATIVE_TOKENS = ("alternatives", "duplicates")
"""Fields of a target and entries of a batch: (place, token), in the batch of shape (pairs, 2), ascending."""
_PLACEHOLDERS = ("<ref-object>", "<bbox>")
# The template and the picture library raise these for a row that they cannot use.
_ENCODING_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    OSError,
    RuntimeError,
    SyntaxError,
    DecompressionBombError,
)


@dataclass(frozen=True, slots=True)
class PromptEncoding:
    """A sample as the model is asked it, and the way into the template's coordinate space."""

    encoding: Mapping[str, Any]  # input_ids and image tensors, as the template gives them
    token_ids: tuple[int, ...]
    convert: Convert
    """Raises SampleError for coordinates outside the image."""
    images_size: tuple[tuple[int, int], ...] = ()  # (width, height) of each image as the model sees it

    @property
    def space(self) -> tuple[int, int] | None:
        """Width and height of what boxes are written in; None without images."""
        return self.convert.space


class Encoder:
    """Encodes for channel B. Owns its template and tokenizer; not thread-safe, one thread owns it."""

    def __init__(self, template: Any, *, packing_length: int) -> None:
        # A copy through the template's own pickling support carries no weights and shares no tokenizer
        # with channel A (a fast tokenizer must not be used by two threads at once).
        self._template = copy.deepcopy(template)
        self._template.set_mode("train")
        self._template.padding_free = True
        self._template.packing = False
        self._template.sequence_parallel_size = 1
        self.attach_model()
        self._tokenizer = self._template.tokenizer
        # ms-swift turns them into ids in a list of the template's class, which no other process has.
        self._media_tokens = frozenset(self._template.placeholder_tokens)
        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError(
                "channel B maps text to tokens by character offsets and needs a fast tokenizer",
                got=f"tokenizer={type(self._tokenizer).__name__}",
                remedy="convert it with tokenizers",
            )
        if prefix := self._template._get_response_prefix():
            raise ConfigError(
                "answers must begin with their list of objects",
                got=f"a template that begins them with {prefix!r}",
                remedy="train a model whose template adds nothing, as Qwen3-VL's Instruct models",
            )
        self.packing_length = packing_length
        self.closing_token_ids = self._find_closing_ids()
        """The end-of-turn tokens that the template puts after an answer."""

    def attach_model(self) -> None:
        """Gives the template a model without weights. Pickling drops it, and loading it sets what ms-swift changes in
        other modules, pixel limits for one; so whoever unpickles an encoder calls this before anything else.
        """
        self._template.dummy_model = _model_without_weights(self._template)

    @property
    def plain_token_ids(self) -> tuple[int, ...]:
        """Tokens of text alone: neither special ones nor the places of an image."""
        special = self._tokenizer.added_tokens_decoder
        return tuple(token for token in range(len(self._tokenizer)) if token not in special)

    def request(self, sample: Sample) -> dict[str, Any]:
        """The ``/infer/`` request of a sample: its prompt and its images, base64 of the original files.

        Raises:
            SampleError: an image is missing, the row has video or audio, or the prompt holds ``<bbox>`` or
                ``<ref-object>``.
        """
        return {
            "messages": _prompt_messages(sample.row),
            "images": [image_as_base64(image) for image in sample.row.get("images") or []],
        }

    def encode_prompt(self, sample: Sample) -> PromptEncoding:
        """Encodes the prompt alone.

        Raises:
            SampleError: the template refuses the row (unreadable image, prompt too long).
        """
        kept = {key: value for key, value in sample.row.items() if key not in ("messages", "objects")}
        row = copy.deepcopy(kept)  # the template changes what it is given
        row["messages"] = _prompt_messages(sample.row)
        row["objects"] = {"ref": [], "bbox": []}  # so that the template keeps the images' own sizes
        encoding = self._encode(row, return_template_inputs=True)
        inputs = encoding.pop("template_inputs")
        sizes = tuple(image.size for image in inputs.images)
        size = sizes[0] if sizes else None
        space = (1000, 1000) if sizes and self._template.norm_bbox == "norm1000" else size
        convert = Convert(self._converter(inputs, sample.row.get("objects") or {}, space), space, size)
        return PromptEncoding(encoding, tuple(encoding["input_ids"]), convert, sizes)

    def tokenise(self, text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Token ids of an answer, tokenised once as a whole, and each token's character offsets."""
        tokens = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(tokens["input_ids"]), tuple((start, end) for start, end in tokens["offset_mapping"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a turn that was sampled, without the end of turn."""
        ended = bool(token_ids) and self.closing_token_ids[:1] == tuple(token_ids[-1:])
        return str(self._tokenizer.decode(token_ids[:-1] if ended else token_ids))

    def encode_segment(
        self,
        rollout: Rollout,
        prompt: PromptEncoding,
        sequences: Sequence[tuple[Target, float | None]],
    ) -> Segment:
        """Joins the prompt and each of the targets to what ``template.encode`` gives for the same conversation.

        The prompt is not encoded again, because that would process its images twice. Tokens of weight
        zero are not supervised, as ms-swift has it.

        Args:
            sequences: targets, each with the weight of the end of turn that is put behind it; None puts nothing there,
                behind tokens as they were sampled. Those that do not fit into a pack with the first are left out.

        Raises:
            PromptMismatch: the server was asked another prompt.
            SampleError: the segment is longer than a pack.
        """
        require_same_prompt(rollout, prompt)
        encodings = [self._sequence(prompt, target, closing) for target, closing in sequences]
        num_tokens = sum(encoding["length"] for encoding in encodings)
        while len(encodings) > 1 and num_tokens > self.packing_length:
            num_tokens -= encodings.pop()["length"]
        if num_tokens > self.packing_length:
            raise SampleError(
                "a segment must fit a pack and is never cut",
                got=f"num_tokens={num_tokens} packing_length={self.packing_length}",
                remedy="raise packing_length",
            )
        return Segment(
            key=rollout.sample.key,
            version=rollout.version,
            encodings=tuple(encodings),
            num_tokens=num_tokens,
            num_supervised_tokens=sum(
                label != IGNORED_LABEL for encoding in encodings for label in encoding["labels"]
            ),
            quality=sequences[0][0].quality,
            num_left_out=len(sequences) - len(encodings),
        )

    def _sequence(
        self, prompt: PromptEncoding, target: Target, closing_weight: float | None
    ) -> dict[str, Any]:
        closing_ids = () if closing_weight is None else self.closing_token_ids
        answer = target.token_ids + closing_ids
        weights = target.weights + (closing_weight or 0.0,) * len(closing_ids)
        num_prompt = len(prompt.token_ids)
        encoding = dict(prompt.encoding)
        encoding["input_ids"] = [*prompt.token_ids, *answer]
        encoding["labels"] = [IGNORED_LABEL] * num_prompt + [
            token if weight > 0 else IGNORED_LABEL for token, weight in zip(answer, weights, strict=True)
        ]
        encoding["loss_scale"] = [0.0] * num_prompt + list(weights)
        for name, values in target.columns.items():
            encoding[name] = COLUMNS[name].beside(values, num_prompt, len(closing_ids))
        for name in ALTERNATIVE_TOKENS:
            if found := [(place, token) for place, token in getattr(target, name) if weights[place] > 0]:
                encoding[name] = [(num_prompt + place, token) for place, token in found]
        encoding["length"] = len(encoding["input_ids"])
        encoding["lengths"] = [encoding["length"]]
        if (types := encoding.get("mm_token_type_ids")) is not None:
            encoding["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, len(answer)))
        return encoding

    def require_trainable(self, rollout: Rollout) -> None:
        """Raises SampleError when the sampled tokens cannot be trained as they are: one stands for an image."""
        media = self._media_tokens.intersection(rollout.token_ids)
        if media:
            raise SampleError(
                "a rollout that is trained as it was sampled may hold no token that stands for an image, video or "
                "audio",
                got=f"token_id={min(media)}",
            )

    def collate(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """One padding-free batch of one row, in which segments do not see each other.

        Hugging Face isolates packed segments only when the text position ids are the first of four rows
        of ``position_ids`` (and no cache is used, which the trainer sees to); ms-swift's own collator
        hands them over in a separate entry that its trainer removes again. Columns that any segment carries are
        entries of the batch, beside ``labels``.
        """
        encodings = [dict(encoding) for segment in segments for encoding in segment.encodings]
        columns = _take_columns(encodings) | _take_alternative_tokens(encodings)
        batch: dict[str, Any] = self._template.data_collator(encodings) | columns
        text_positions = batch.pop("text_position_ids", None)
        if text_positions is not None:
            batch["position_ids"] = torch.cat([text_positions[None], batch["position_ids"]])
        return batch

    def answer_of(self, sample: Sample) -> str:
        """Channel A's own answer to a sample.

        Raises:
            DatasetError: the row has no answer.
            SampleError: the template refuses the row.
        """
        _prompt_messages(sample.row)
        encoding = self._encode(copy.deepcopy(dict(sample.row)))
        labels = encoding["labels"]
        start = len(labels)
        while start and labels[start - 1] != IGNORED_LABEL:  # earlier turns are channel B's prompt
            start -= 1
        answer = encoding["input_ids"][start:]
        if not answer:
            raise DatasetError(
                "a row needs an assistant message", got="none", remedy="add the answer to every row"
            )
        if self.closing_token_ids and tuple(answer[-len(self.closing_token_ids) :]) == self.closing_token_ids:
            answer = answer[: -len(self.closing_token_ids)]
        return str(self._tokenizer.decode(answer))

    def normalise(self, text: str) -> str:
        """Text as its tokens spell it: some tokenizers compose accents."""
        normalizer = self._tokenizer.backend_tokenizer.normalizer
        return str(normalizer.normalize_str(text)) if normalizer is not None else text

    def _converter(
        self, inputs: Any, objects: Mapping[str, Any], space: tuple[int, int] | None
    ) -> Callable[[Sequence[Sequence[float]]], tuple[tuple[int, ...], ...]]:
        """``inputs`` are the template's own, with resized images; ``objects`` says in what a row's coordinates are."""
        sizes = {key: inputs.objects[key] for key in ("width", "height")}
        units = {key: value for key in ("bbox_type", "image_id") if (value := objects.get(key))}

        def convert(coordinates: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
            # A fresh copy: the template changes what it is given.
            inputs.objects = copy.deepcopy({**sizes, **units, "bbox": list(map(list, coordinates))})
            if inputs.images:
                with _template_errors():
                    self._template.normalize_bbox(inputs)
            found = tuple(tuple(map(int, each)) for each in inputs.objects["bbox"])
            if space is not None and len(inputs.images) == 1:
                _check_inside(found, *space)
            return found

        return convert

    def _encode(self, row: dict[str, Any], **options: Any) -> dict[str, Any]:
        with _template_errors():
            encoding: dict[str, Any] = self._template.encode(row, return_length=True, **options)
        return encoding

    def _find_closing_ids(self) -> tuple[int, ...]:
        probe = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        conversation = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": {"token_ids": probe}},
        ]
        encoding = self._template.encode({"messages": conversation})
        start = next(i for i, label in enumerate(encoding["labels"]) if label != IGNORED_LABEL)
        return tuple(encoding["input_ids"][start + len(probe) :])


def _take_alternative_tokens(encodings: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Those of the whole batch by name, out of the encodings; nothing of which no segment has any."""
    tensors = {}
    ends = list(accumulate(encoding["length"] for encoding in encodings))
    for name in [name for name in ALTERNATIVE_TOKENS if any(name in encoding for encoding in encodings)]:
        own = zip([0, *ends], (encoding.pop(name, ()) for encoding in encodings), strict=False)
        tensors[name] = torch.tensor(
            [(start + place, token) for start, pairs in own for place, token in pairs]
        )
    return tensors


def _take_columns(encodings: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The columns by name, out of the encodings; fillers for those that lack one."""
    tensors = {}
    for name in [name for name in COLUMNS if any(name in encoding for encoding in encodings)]:
        filler = COLUMNS[name].filler
        values = (encoding.pop(name, [filler] * encoding["length"]) for encoding in encodings)
        tensors[name] = torch.tensor([list(chain.from_iterable(values))])
    return tensors


def _model_without_weights(template: Any) -> Any:
    """A model on the meta device, which the template asks for position ids.

    Made here, because the template would make it on first use by guessing its type from the files, which
    fails for a type that shares its architecture with another.
    """
    from swift.model import get_model_processor

    info = template.model_info
    with torch.device("meta"), zero3_unknown():
        model, _ = get_model_processor(info.model_dir, model_type=info.model_type, return_dummy_model=True)
    return model


def _prompt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    for key in ("videos", "audios"):
        if row.get(key):
            raise SampleError(
                "channel B asks about images alone",
                got=f"a row with {key}",
                remedy="channel A trains it without its objects, by "
                "stage2_ab.channel_b.rows_without_objects: channel_a_only",
            )
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise SampleError("a row must end in a user message and, for channel A, its answer")
    for turn in messages:
        if isinstance(turn["content"], str) and any(mark in turn["content"] for mark in _PLACEHOLDERS):
            raise SampleError(
                f"a prompt must not hold {' or '.join(_PLACEHOLDERS)}", remedy="write labels and boxes out"
            )
    return messages


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except _ENCODING_ERRORS as error:
        raise SampleError(f"the template cannot encode the row: {type(error).__name__}: {error}") from error


def _check_inside(boxes: Sequence[tuple[int, ...]], width: int, height: int) -> None:
    for box in boxes:
        if max(box[::2]) > width or max(box[1::2]) > height:
            raise SampleError(
                f"a {'point' if len(box) == 2 else 'box'} must lie inside its image",
                got=f"bbox={list(box)} width={width} height={height} in the template's space",
                remedy="mend the annotation",
            )


def require_same_prompt(rollout: Rollout, prompt: PromptEncoding) -> None:
    """Raises PromptMismatch when the server was asked another prompt than the sample's."""
    theirs, ours = rollout.prompt_token_ids, prompt.token_ids
    if theirs == ours:
        return
    pairs = enumerate(zip(theirs, ours, strict=False))
    first_difference = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
    raise PromptMismatch(
        "the server's prompt must equal the learner's",
        got=f"num_server_tokens={len(theirs)} num_learner_tokens={len(ours)} first_difference={first_difference}",
        remedy="check that both use the same template, processor and pixel limits",
        expected=ours,
    )
