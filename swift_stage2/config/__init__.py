"""YAML text into one frozen, checked ``Stage2Config``. Imports no torch.

yaml_text   file -> plain mapping (YAML 1.2 scalars, duplicate keys refused)
binding     plain mapping -> sections (unknown keys, types, missing keys)
registry    named parts, some from a user's file; an unknown name tells the nearest
inequality  one rule between numbers, refused or shown with the numbers put in
stage2_ab   rollout   launch      the sections with their defaults and their own rules
swift_arguments                   what ``swift:`` may not say, and its argv for ms-swift
root        Stage2Config, the rules between sections, ``load_config``
"""

from __future__ import annotations

from swift_stage2.config.inequality import Inequality
from swift_stage2.config.launch import (
    LaunchConfig,
    LearnerProcess,
    RestartConfig,
    RestartPolicy,
    ServerEngine,
    ServerProcess,
)
from swift_stage2.config.rollout import (
    DecodingConfig,
    OnPending,
    Proof,
    RolloutConfig,
    ServerConfig,
    SyncConfig,
    SyncMode,
)
from swift_stage2.config.root import Stage2Config, TelemetryConfig, load_config
from swift_stage2.config.stage2_ab import (
    ChannelBConfig,
    EvaluationConfig,
    MatchingConfig,
    OnPipelineFailure,
    PackingConfig,
    PrefetchConfig,
    Preprocessing,
    RowsWithoutObjects,
    ScheduleConfig,
    Stage2AbConfig,
    StarvationAction,
    StarvationConfig,
    TargetConfig,
    TargetWeights,
)

__all__ = [
    "ChannelBConfig",
    "DecodingConfig",
    "EvaluationConfig",
    "Inequality",
    "LaunchConfig",
    "LearnerProcess",
    "MatchingConfig",
    "OnPending",
    "OnPipelineFailure",
    "PackingConfig",
    "PrefetchConfig",
    "Preprocessing",
    "Proof",
    "RestartConfig",
    "RestartPolicy",
    "RolloutConfig",
    "RowsWithoutObjects",
    "ScheduleConfig",
    "ServerConfig",
    "ServerEngine",
    "ServerProcess",
    "Stage2AbConfig",
    "Stage2Config",
    "StarvationAction",
    "StarvationConfig",
    "SyncConfig",
    "SyncMode",
    "TargetConfig",
    "TargetWeights",
    "TelemetryConfig",
    "load_config",
]
