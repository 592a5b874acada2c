"""Events written by hand, as a learner writes them while a bench commits faults."""

from __future__ import annotations

from typing import Any


def step(number: int, time: float, channel: str = "A", **fields: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "time": time,
        "channel": channel,
        "version": 1,
        "skip_reason": None,
        "activity_ns": {"busy": 1},
    } | fields


def sync_round(
    time: float, *, version: int = 1, proven: bool = True, error: str = "it died", seconds: float = 0.5
) -> dict[str, Any]:
    server = {"proven": proven, "error": None if proven else error, "proof": "canary"}
    return {
        "kind": "round",
        "version": version,
        "time": time,
        "committed": proven,
        "seconds": seconds,
        "servers": {"0": server},
    }


def failures(time: float, *ends: str) -> dict[str, Any]:
    return {"kind": "failures", "time": time, "failures": [{"end": end, "reason": "because"} for end in ends]}


def taken(time: float, num_rollouts: int, version: int = 1) -> dict[str, Any]:
    return {"kind": "taken", "time": time, "version": version, "num_rollouts": num_rollouts}
