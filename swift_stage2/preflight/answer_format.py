"""The format of channel A's answers, learned from every row of the data set when a run starts.

The template renders one sample; all other rows are rendered as text alone, without their images, which is quick. The
outcome depends on the rows and their order only, so that every rank, and a resumed run, learns the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swift_stage2.channel_b.answer_format import AnswerFormat, fill_placeholders, learn_format
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.ground_truth import read_ground_truth
from swift_stage2.channel_b.sample_source import Rows
from swift_stage2.channel_b.task import DetectionTask
from swift_stage2.errors import ConfigError, DatasetError, SampleError
from swift_stage2.records import Sample


def learn_answer_format(rows: Rows, sample: Sample, encoder: Encoder, task: DetectionTask) -> AnswerFormat:
    """How channel A's answers are written. A row that channel B cannot use teaches nothing.

    Args:
        sample: any of the rows; the template renders its answer.

    Raises:
        ConfigError: an answer is nothing that the task's dialect can write, or the template changes what it renders.
        DatasetError: two rows are written in two ways; shows both.
        SampleError: the template refuses the sample.
    """
    text, objects = encoder.check_answer_format(sample)
    shown = task.check_answer(text, objects)
    answer = encoder.normalise(fill_placeholders(_answer(sample.row), objects))
    before, found, after = text.partition(answer)
    if not found:
        raise ConfigError(
            "the template must render an answer as it stands in the data set, got "
            f"answer={text[:160]!r} of {answer[:160]!r}; set QWENVL_BBOX_FORMAT=new"
        )
    texts = (before + encoder.normalise(filled) + after for filled in _answers(rows))
    return learn_format(texts, shown.dialect)


def _answers(rows: Rows) -> Iterator[str]:
    for number in range(len(rows)):
        row = rows[number]
        try:
            labels, boxes = read_ground_truth(row)
        except SampleError:
            continue  # nor will channel B draw it
        if row["messages"][-1]["role"] == "assistant":
            yield fill_placeholders(_answer(row), tuple(zip(labels, boxes, strict=True)))


def _answer(row: Mapping[str, Any]) -> str:
    content = row["messages"][-1]["content"]
    if not isinstance(content, str):
        raise DatasetError(f"an answer must be plain text, got content={content!r}; write the text itself")
    return content
