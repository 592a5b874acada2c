"""What tests of many folders build alike: a configuration with a few keys changed, events of a rollout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from swift_stage2.columns import given_by
from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.records import EvaluationCounts, MatchQuality, Rollout
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd, RunningEvaluation
from swift_stage2.telemetry.events import Evaluation, Matched, RecordedCompletion

BASE: dict[str, Any] = {
    "swift": {"model": "m", "dataset": ["d.jsonl"], "output_dir": "out", "gradient_accumulation_steps": 4},
    "stage2_ab": {"schedule": {"b_ratio": 0.25}},
    "rollout": {"servers": [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]},
}
ODD_VALUES: tuple[object, ...] = (
    10**400, -1, 1.5, 2**63, True, "abc", None, [], {}, "\0", "a\nb", [[[]]], "x" * 10_000,
)  # fmt: skip
"""Values of JSON that no member of a message has, or only one of many."""


def changed(*changes: Mapping[str, Any], base: Mapping[str, Any] = BASE) -> dict[str, Any]:
    """The content of a file: ``base`` with the values at dotted paths replaced, or removed by ``...``."""
    data = copy.deepcopy(dict(base))
    for path, value in [item for each in changes for item in each.items()]:
        section = data
        *sections, key = path.split(".")
        for name in sections:
            section = section.setdefault(name, {})
        if value is ...:
            del section[key]
        else:
            section[key] = copy.deepcopy(value)
    return data


def config_of(*changes: Mapping[str, Any]) -> Stage2Config:
    """The configuration that such a file would be read as."""
    return bind(Stage2Config, changed(*changes))


def servers_at(*base_urls: str, **keys: Any) -> dict[str, Any]:
    """The change by which a run has these servers."""
    return {"rollout.servers": [{"base_url": base_url, **keys} for base_url in base_urls]}


def sharing(*entries: dict[str, Any], **launch: Any) -> dict[str, Any]:
    """The change by which the learner and servers of ``launch`` are on device 0, or on those that they name."""
    return {
        "rollout.servers": [
            {"base_url": f"http://127.0.0.1:{8000 + index}", "group_port": 29600 + index}
            for index in range(len(entries))
        ],
        "launch": {
            "share_devices": True,
            "learner": {"devices": [0]},
            "servers": [{"devices": [0]} | entry for entry in entries],
        }
        | launch,
    }


def on_vllm(share: Any, key: str = "vllm_gpu_memory_utilization", **server: Any) -> dict[str, Any]:
    """A server that ``launch`` starts, with its part of a device."""
    return {"engine": "vllm", "args": {key: share}} | server


def matched_of(rollout: Rollout, quality: MatchQuality) -> Matched:
    num_tokens = len(rollout.token_ids)
    return Matched.of(rollout, samples=(rollout.sample.key,), num_rollout_tokens=num_tokens, quality=quality)


def completion_of(rollout: Rollout) -> RecordedCompletion:
    return RecordedCompletion.of(rollout, sample=rollout.sample.key, columns=given_by(rollout))


def ended_evaluation(
    run: RunningEvaluation, step: int, end: EvaluationEnd, counts: EvaluationCounts
) -> Evaluation:
    return Evaluation.of(run, step=step, end=end, counts=counts, ratios=counts.ratios)
