"""Lets a task correct what a model may say, before a run rests on it; a fault of the task is told with its place.

While a run goes on, only SampleError and MatchingError cost one sample. Anything else ends channel B.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_target
from swift_stage2.channel_b.task import Task, name_of
from swift_stage2.checks.packing_isolation import empty_rollout
from swift_stage2.columns import stand_ins
from swift_stage2.errors import DatasetError, MatchingError, SampleError, Stage2Error, TaskError
from swift_stage2.records import Sample

_NONSENSE = "flibbertigibbet"


def try_answers(encoder: Encoder, task: Task, samples: Sequence[Sample]) -> None:
    """Corrects, for each sample, silence, its true answer, half of that, and a word that answers nothing.

    Raises:
        TaskError: the task breaks on one of them.
    """
    for sample in samples:
        try:
            silence, prompt = empty_rollout(sample, encoder), encoder.encode_prompt(sample)
            answer = encoder.answer_of(sample)
        except (SampleError, DatasetError):
            continue  # told elsewhere
        half = answer[: len(answer) // 2]
        for text in ("", answer, _NONSENSE, half):
            token_ids, _ = encoder.tokenise(text)
            said = {"text": text, "token_ids": token_ids, **stand_ins(len(token_ids))}
            rollout = replace(silence, **said, truncated=text == half)
            try:
                make_target(rollout, prompt, encoder, task)
            except TaskError:
                raise
            except (SampleError, MatchingError):
                continue  # costs this sample
            except Exception as error:
                if _file_of(task) is None:
                    raise
                raise _fault(task, error, f" for answer={text[:80]!r}") from error


@contextmanager
def task_faults(task: Task) -> Iterator[None]:
    """Tells an exception that came through the task's own file as the task's fault, as TaskError."""
    try:
        yield
    except Stage2Error:
        raise
    except Exception as error:
        if _last_line(task, error) is None:
            raise
        raise _fault(task, error) from error


def _fault(task: Task, error: Exception, occasion: str = "") -> TaskError:
    place = _last_line(task, error) or type(task).correct.__code__.co_firstlineno
    return TaskError(
        f"task {name_of(task)} must work on every row and answer (only SampleError and MatchingError cost one "
        "sample)",
        got=f"{type(error).__name__}: {error}{occasion} ({_file_of(task)}:{place})",
        remedy="mend the task",
    )


def _last_line(task: Task, error: Exception) -> int | None:
    """The line of the task's file in which it went wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == _file_of(task)), None)


def _file_of(task: Task) -> str | None:
    """The user's file; None of a task that is shipped."""
    if type(task).__module__.startswith("swift_stage2."):
        return None
    return getattr(sys.modules.get(type(task).__module__), "__file__", None)
