"""YAML text into one frozen, checked ``Stage2Config``. Imports no torch.

yaml_text   file -> plain mapping (YAML 1.2 scalars, duplicate keys refused)
binding     plain mapping -> sections (unknown keys, types, missing keys)
registry    named parts, some from a user's file; an unknown name tells the nearest
rules       rules about one setting, and between numbers: refused or shown with the numbers put in
stage2_ab   objective   rollout   launch   telemetry   the sections with their defaults and their own rules
swift_arguments                   what ``swift:`` may not say, and its argv for ms-swift
root        Stage2Config, the rules between sections, ``load_config``
"""

from __future__ import annotations

from swift_stage2.config.launch import (
    LearnerProcess,
    RestartConfig,
    RestartPolicy,
    ServerEngine,
    ServerProcess,
)
from swift_stage2.config.objective import GrpoConfig, Objective, Proximal
from swift_stage2.config.rollout import (
    ROUND_MARGIN_S,
    DecodingConfig,
    Fenced,
    OnPending,
    Proof,
    RolloutConfig,
    ServerConfig,
    Transport,
)
from swift_stage2.config.root import Stage2Config, load_config
from swift_stage2.config.stage2_ab import (
    MatchingConfig,
    MissedOrder,
    Mode,
    OnPipelineFailure,
    Preprocessing,
    RowsWithoutObjects,
    StarvationAction,
)

__all__ = [
    "ROUND_MARGIN_S",
    "DecodingConfig",
    "Fenced",
    "GrpoConfig",
    "LearnerProcess",
    "MatchingConfig",
    "MissedOrder",
    "Mode",
    "Objective",
    "OnPending",
    "OnPipelineFailure",
    "Preprocessing",
    "Proof",
    "Proximal",
    "RestartConfig",
    "RestartPolicy",
    "RolloutConfig",
    "RowsWithoutObjects",
    "ServerConfig",
    "ServerEngine",
    "ServerProcess",
    "Stage2Config",
    "StarvationAction",
    "Transport",
    "load_config",
]
