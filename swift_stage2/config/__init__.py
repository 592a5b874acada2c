"""YAML text into one frozen, checked ``Stage2Config``. Imports no torch.

yaml_text   file -> plain mapping (YAML 1.2 scalars, duplicate keys refused)
binding     plain mapping -> sections (unknown keys, types, missing keys)
rules       types of numbers, names of variables; named parts, some from a user's file, the nearest is told
stage2_ab   objective   rollout   launch   the sections with their defaults and their own rules
swift_arguments                   what ``swift:`` may not say, and its argv for ms-swift
root        Stage2Config, the rules between sections, ``load_config``
"""

from __future__ import annotations

from swift_stage2.config.launch import LearnerProcess as LearnerProcess
from swift_stage2.config.launch import RestartConfig as RestartConfig
from swift_stage2.config.launch import RestartPolicy as RestartPolicy
from swift_stage2.config.launch import ServerEngine as ServerEngine
from swift_stage2.config.launch import ServerProcess as ServerProcess
from swift_stage2.config.objective import GrpoConfig as GrpoConfig
from swift_stage2.config.objective import Objective as Objective
from swift_stage2.config.objective import Proximal as Proximal
from swift_stage2.config.rollout import ROUND_MARGIN_S as ROUND_MARGIN_S
from swift_stage2.config.rollout import DecodingConfig as DecodingConfig
from swift_stage2.config.rollout import Proof as Proof
from swift_stage2.config.rollout import RolloutConfig as RolloutConfig
from swift_stage2.config.rollout import ServerConfig as ServerConfig
from swift_stage2.config.rollout import Transport as Transport
from swift_stage2.config.root import Stage2Config as Stage2Config
from swift_stage2.config.root import load_config as load_config
from swift_stage2.config.stage2_ab import MatchingConfig as MatchingConfig
from swift_stage2.config.stage2_ab import MissedOrder as MissedOrder
from swift_stage2.config.stage2_ab import Mode as Mode
from swift_stage2.config.stage2_ab import OnPipelineFailure as OnPipelineFailure
from swift_stage2.config.stage2_ab import PackingConfig as PackingConfig
from swift_stage2.config.stage2_ab import Preprocessing as Preprocessing
from swift_stage2.config.stage2_ab import RowsWithoutObjects as RowsWithoutObjects
from swift_stage2.config.stage2_ab import StarvationAction as StarvationAction
