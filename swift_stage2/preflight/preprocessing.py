"""Does a process beside the learner preprocess as the learner itself would? Found on samples, when a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from swift_stage2.channel_b.preprocessing import Prepared, Preprocessor
from swift_stage2.errors import ConfigError
from swift_stage2.records import Rollout


def check_preprocessing(examined: Preprocessor, reference: Preprocessor, rollouts: Sequence[Rollout]) -> None:
    """Both must make the same targets and batches of the same rollouts, and refuse the same ones.

    Raises:
        ConfigError: they do not.
        PreprocessorLost: the process failed, ended or does not answer.
    """
    rollouts = [_answered(reference, rollout) for rollout in rollouts]
    outcomes = zip(rollouts, _outcomes(reference, rollouts), _outcomes(examined, rollouts), strict=True)
    for rollout, expected, found in outcomes:
        different = sorted(
            name for name in expected.keys() | found.keys() if not _equal(expected.get(name), found.get(name))
        )
        if different:
            refusals = [outcome.get("refusal", "no refusal") for outcome in (expected, found)]
            said = f" (learner: {refusals[0]}; process: {refusals[1]})" if "refusal" in different else ""
            raise ConfigError(
                "the preprocessing process must encode as the learner does, got another "
                f"{', '.join(different)} for the data set's row {rollout.sample.key.index}{said}; what changes the "
                "template in the learner alone (a plugin, a variable set by a program) must go, or write "
                "stage2_ab.channel_b.preprocessing: thread"
            )


def _answered(preprocessor: Preprocessor, rollout: Rollout) -> Rollout:
    """With its own target as the answer, so that parsing and matching have something to do."""
    (prepared,) = preprocessor.prepare([rollout])
    if not isinstance(prepared, Prepared):
        return rollout
    preprocessor.forget([prepared.segment])
    return replace(rollout, text=prepared.target.text)


def _outcomes(preprocessor: Preprocessor, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Each rollout's target and batch, alone; or why there is none."""
    return [
        {"target": prepared.target, **preprocessor.pack("check", [prepared.segment]).batch}
        if isinstance(prepared, Prepared)
        else {"refusal": str(prepared)}
        for prepared in list(preprocessor.prepare(rollouts))
    ]


def _equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(_equal(value, right[name]) for name, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)
