"""Writes the two data sets of a training job: scenes to train on, and held-out ones to score on.

Held-out scenes are the same for every seed, so that scores of different jobs compare. Called by the demo and
the benches.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.demo.demo_config import DemoJob
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.errors import UserError

_HELD_OUT_STREAM = 0
_MAX_TRAIN_SAMPLES = 2048


@dataclass(frozen=True, slots=True)
class SceneFiles:
    """Paths of the two JSONL files."""

    train: Path
    held_out: Path


def num_train_samples(job: DemoJob) -> int:
    """As many as channel A reads when it runs alone, so that no scene comes twice, up to a limit."""
    return min(_MAX_TRAIN_SAMPLES, job.num_steps * job.samples_per_step)


def write_scenes(
    directory: Path, kind: SceneKind, *, num_train: int, num_held_out: int, seed: int
) -> SceneFiles:
    """Writes ``directory/train`` and ``directory/held_out``.

    Raises:
        UserError: the scenes need a package that is not installed, or cannot be written.
    """
    if kind is SceneKind.DIGITS and importlib.util.find_spec("sklearn") is None:
        raise UserError(
            "--kind digits needs scikit-learn, which is not installed; install swift-stage2[demo]"
        )
    try:
        return SceneFiles(
            train=write_dataset(directory / "train", kind, num_train, Split.TRAIN, seed),
            held_out=write_dataset(
                directory / "held_out", kind, num_held_out, Split.HELD_OUT, _HELD_OUT_STREAM
            ),
        )
    except OSError as error:
        raise UserError(f"scenes cannot be written to {directory}: {error}") from error
