"""The whole configuration: its sections, the rules between them, and the way in from a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from swift_stage2.config.binding import bind
from swift_stage2.config.launch import DeviceAssignment, LaunchConfig, ServerEngine, check_devices
from swift_stage2.config.objective import check_objective
from swift_stage2.config.rollout import ROUND_MARGIN_S, RolloutConfig, Transport
from swift_stage2.config.rules import Positive, Whole, find
from swift_stage2.config.stage2_ab import (
    DEFAULT_PHASE_STEPS,
    SHIPPED_DIALECTS,
    SHIPPED_TASKS,
    Mode,
    Stage2AbConfig,
)
from swift_stage2.config.swift_arguments import (
    as_argv,
    best_metric,
    is_on,
    refuse_best_model,
    refuse_unsupported,
    refuse_values,
)
from swift_stage2.config.yaml_text import read_yaml
from swift_stage2.errors import ConfigError
from swift_stage2.runtime.network import is_loopback

_PARTS_OF_FIRST_ROUND = 3  # canary, copy, pushes: each may take all of a round's time
SECRET = re.compile(r"_(token|secret|webhook_url|api_key|password)$")  # ms-swift's arguments of these names


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    tensorboard: bool = True
    """Metrics as TensorBoard tags, through ms-swift's own logging steps."""
    audit: bool = True
    """Per-rank events as JSON lines in the run directory."""
    trace: bool = False
    """Spans of every stage as a trace file; for finding out where time goes."""
    gallery_rows: Whole = 256
    """Rows of the data set, chosen by the seed, whose matches are kept whole for the report's gallery and its match
    drift; 0 keeps none."""
    record: bool = False
    """Completions, plans and losses as JSON lines in the run directory, so that ``replay`` can run it again."""
    log_probs: bool = False
    """Log-probabilities of the sampled tokens, asked of every server and recorded with the completions."""

    def __post_init__(self) -> None:
        if self.record and not self.audit:
            raise ConfigError(
                "record needs the event log that audit keeps",
                got="record=true audit=false",
                remedy="write telemetry.audit: true",
            )
        if self.log_probs and not self.record:
            raise ConfigError(
                "log_probs needs record: true",
                got="log_probs=true record=false",
                remedy="write telemetry.record: true",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage2Config:
    swift: Mapping[str, Any] = field(default_factory=dict)
    """ms-swift's own training arguments, passed through unchanged."""
    stage2_ab: Stage2AbConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    control_timeout_s: Positive = 1800.0
    """Deadline of every decision that the ranks take together: longer than the first round and the longest save."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        refuse_values(self.swift)
        # The servers first: without them every other rule between sections speaks of defaults that nobody wrote.
        if self.b_enabled and not self.rollout.servers:
            raise ConfigError(
                "rollout.servers must name at least one server when b_ratio is above 0",
                got=f"none and b_ratio={self.stage2_ab.schedule.b_ratio:g}",
                remedy="write rollout: {servers: [{base_url: 'http://127.0.0.1:8000'}]}, or b_ratio: 0",
            )
        self._check_control_timeout()
        self._check_launch()
        if self.telemetry.record and not self.swift.get("model"):
            raise ConfigError(
                "telemetry.record needs ms-swift's arguments in the section swift, where a replay reads them",
                got=f"model={self.swift.get('model')!r}",
                remedy="write them there and start with swift-stage2 train or launch",
            )
        if self.b_enabled:
            refuse_unsupported(self.swift, has_own_loss=self.stage2_ab.has_own_loss)
            stage2_ab = self.stage2_ab
            check_objective(stage2_ab.objective, stage2_ab.channel_b, self.rollout, self.swift)
        self._check_names()
        self._check_evaluation()
        refuse_best_model(self.swift, self.stage2_ab.evaluation.every_steps)
        if self.gradient_accumulation_steps is not None:
            self.check_accumulation(self.gradient_accumulation_steps)

    @property
    def b_enabled(self) -> bool:
        """Whether channel B exists at all."""
        return self.stage2_ab.schedule.b_ratio > 0

    @property
    def alternates(self) -> bool:
        """True if servers and learner use the same devices in turn: servers sleep while the learner trains."""
        return self.b_enabled and self.launch.share_devices and self.stage2_ab.mode is Mode.INLINE

    def queue_limit(self, packs_per_step: int) -> int:
        """Packs that are kept ready at most; a whole phase's and one that is left over where servers sleep between."""
        limit = self.stage2_ab.channel_b.prefetch.limit(packs_per_step, self.stage2_ab.schedule.exact_b_ratio)
        return max(limit, self.stage2_ab.phase_steps * packs_per_step + 1) if self.alternates else limit

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """As written under ``swift``; None leaves it to ms-swift, whose default depends on the world size."""
        value = self.swift.get("gradient_accumulation_steps")
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                "swift.gradient_accumulation_steps must be an integer of at least 1",
                got=f"gradient_accumulation_steps={value!r}",
            )
        return value

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that work but waste something, each with the recommended value."""
        prefetch, b_ratio = self.stage2_ab.channel_b.prefetch, self.stage2_ab.schedule.exact_b_ratio
        if not self.b_enabled or (per_step := self.gradient_accumulation_steps) is None:
            return ()
        limit, useful = prefetch.limit(per_step, b_ratio), prefetch.packs_in_window(per_step, b_ratio)
        if limit <= useful:
            return ()
        return (
            "queue_limit above gradient_accumulation_steps * max(1, ceil((version_window + 1) * b_ratio * "
            f"sync_every_steps)) = {useful} keeps packs that are old before they are trained, got "
            f"queue_limit={limit}; write stage2_ab.channel_b.prefetch.queue_limit: {useful}",
        )

    def check_accumulation(self, per_step: int) -> None:
        """Raises ConfigError: a queue cannot hold one step's packs. The trainer calls it with ms-swift's own value."""
        prefetch, b_ratio = self.stage2_ab.channel_b.prefetch, self.stage2_ab.schedule.exact_b_ratio
        queue = {"prefetch_target_packs": prefetch.target, "queue_limit": prefetch.limit}
        for name, derive in queue.items() if self.b_enabled else ():
            if (value := derive(per_step, b_ratio)) < per_step:
                raise ConfigError(
                    f"{name} >= gradient_accumulation_steps must hold (otherwise B could never run)",
                    got=f"{value} >= {per_step}",
                    remedy=f"write stage2_ab.channel_b.prefetch.{name}: {per_step} or more",
                )

    def check_validation_set(self, num_rows: int) -> None:
        """Raises ConfigError: evaluations have no rows. The trainer calls it with ms-swift's own set."""
        every_steps = self.stage2_ab.evaluation.every_steps
        if every_steps and not num_rows:
            raise ConfigError(
                "stage2_ab.evaluation needs ms-swift's validation set",
                got=f"none and every_steps={every_steps}",
                remedy="write swift.val_dataset, or swift.split_dataset_ratio above 0 (which ms-swift drops "
                "where eval_strategy is 'no'), or every_steps: 0",
            )

    def swift_arguments(self) -> list[str]:
        """The section ``swift`` as argv for ms-swift's parser."""
        metric = best_metric(self.swift)
        named: dict[str, Any] = {"metric_for_best_model": f"eval_{metric}"} if metric else {}
        if metric == "truncated_ratio":  # which alone is better when it is lower
            named["greater_is_better"] = False
        return as_argv({**self.swift, **named})

    def without_secrets(self) -> dict[str, Any]:
        """Every setting that a learner needs, as plain values: no ``launch.servers``, and none of ms-swift's tokens."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # enums become text, tuples lists
        plain["launch"]["servers"] = []
        plain["swift"] = {key: value for key, value in plain["swift"].items() if not SECRET.search(key)}
        return plain

    def _check_control_timeout(self) -> None:
        """A rank that waits for rank 0's first round must not give up first."""
        parts, round_s = _PARTS_OF_FIRST_ROUND, self.rollout.sync.timeout_s + ROUND_MARGIN_S
        if self.b_enabled and self.control_timeout_s < parts * round_s:
            raise ConfigError(
                f"control_timeout_s >= {parts} * (rollout.sync.timeout_s + {ROUND_MARGIN_S:g}) must hold (otherwise a "
                "rank gives up while canary, copy and pushes of the first round go on)",
                got=f"{self.control_timeout_s:g} >= {parts} * {round_s:g}",
                remedy=f"write control_timeout_s: {parts * round_s:g} or more, plus the longest save",
            )

    def _check_names(self) -> None:
        """Names that only a user's file could register are left to the start, when it has been loaded."""
        if self.swift.get("external_plugins") or not self.swift.get("model"):
            return
        find(SHIPPED_TASKS, "stage2_ab.task", self.stage2_ab.task)
        find(SHIPPED_DIALECTS, "stage2_ab.channel_b.target.dialect", self.stage2_ab.dialect or "")

    def _check_evaluation(self) -> None:
        every_steps = self.stage2_ab.evaluation.every_steps
        if every_steps and not self.b_enabled:
            raise ConfigError(
                "stage2_ab.evaluation asks the rollout servers of channel B",
                got=f"b_ratio=0 and every_steps={every_steps}",
                remedy="write every_steps: 0, or a b_ratio above 0",
            )
        # Without a data set here the arguments come from ms-swift's own command line, and only the trainer knows.
        if self.swift.get("dataset"):
            # Without a strategy of its own ms-swift evaluates as it saves; where it does not, it splits nothing off.
            strategy = self.swift.get("eval_strategy", self.swift.get("save_strategy"))
            splits = self.swift.get("split_dataset_ratio") and strategy not in ("no", False)
            given = self.swift.get("val_dataset") or self.swift.get("cached_val_dataset")
            self.check_validation_set(int(bool(given or splits)))

    def _check_launch(self) -> None:
        started, named = len(self.launch.servers), len(self.rollout.servers)
        if started and started != named:
            raise ConfigError(
                "launch.servers must be empty or have one entry for each of rollout.servers",
                got=f"{started} launch.servers and {named} rollout.servers",
                remedy="add or remove entries",
            )
        sharded = [name for name in ("deepspeed", "fsdp") if is_on(self.swift.get(name))]
        if self.launch.offload_optimizer and (sharded or not self.alternates):
            raise ConfigError(
                "launch.offload_optimizer moves torch's own optimizer states, in phases of shared devices",
                got=f"swift.{sharded[0]}"
                if sharded
                else f"mode={self.stage2_ab.mode} share_devices={self.launch.share_devices}",
                remedy="remove it, or write what it needs (DeepSpeed's own configuration has offload_optimizer)",
            )
        phase_steps = self.stage2_ab.phase_steps
        if self.b_enabled and phase_steps != DEFAULT_PHASE_STEPS and not self.alternates:
            raise ConfigError(
                "stage2_ab.phase_steps needs stage2_ab.mode: inline and launch.share_devices: true",
                got=f"phase_steps={phase_steps} mode={self.stage2_ab.mode} share_devices={self.launch.share_devices}",
                remedy="write both, so that servers sleep while the learner trains, or remove it",
            )
        uses_disk = self.b_enabled and self.rollout.sync.transport is Transport.DISK
        hosts = [server.host for server in self.rollout.servers]
        on_hosts = ["" if is_loopback(host) else host for host in hosts[:started]]
        placements = [
            DeviceAssignment(index, host, process.devices)
            for index, (process, host) in enumerate(zip(self.launch.servers, on_hosts, strict=True))
        ]
        check_devices(self.launch, [DeviceAssignment(None, "", self.launch.learner.devices), *placements])
        for index, process in enumerate(self.launch.servers):
            args = {name.lstrip("-").replace("-", "_"): value for name, value in process.args.items()}
            stays_awake = process.engine is ServerEngine.SWIFT or str(args.get("sleep_level")) == "0"
            if self.alternates and (stays_awake or on_hosts[index]):
                raise ConfigError(
                    "mode: inline with launch.share_devices needs servers of ours on the learner's host, which sleep",
                    got=f"launch.servers[{index}] of engine {process.engine} at {hosts[index]} with sleep-level "
                    f"{args.get('sleep_level', 2)}",
                    remedy="write engine: vllm or transformers, a base_url of 127.0.0.1 and no sleep-level, or mode: "
                    "async",
                )
            if uses_disk and process.engine is ServerEngine.SWIFT:
                raise ConfigError(
                    "rollout.sync.transport: disk needs servers of ours",
                    got=f"a stock one at launch.servers[{index}].engine={str(process.engine)!r}",
                    remedy="write transport: auto, or engine: vllm",
                )
            has_scheduler = "multi_turn_scheduler" in args and process.engine is not ServerEngine.TRANSFORMERS
            if has_scheduler != (self.rollout.max_turns > 1):
                raise ConfigError(
                    "rollout.max_turns above 1 goes with servers on vLLM that run one of ms-swift's schedulers",
                    got=f"max_turns={self.rollout.max_turns} and launch.servers[{index}] of engine {process.engine} "
                    f"with{'' if 'multi_turn_scheduler' in args else 'out'} multi_turn_scheduler",
                    remedy="write engine: vllm or swift with args: {multi_turn_scheduler: NAME, max_turns: N}, or "
                    "neither",
                )


def load_config(path: str | PathLike[str]) -> Stage2Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: one line that names the file, the place, the value and the remedy.
    """
    file = Path(path)
    data = read_yaml(file)
    try:
        return bind(Stage2Config, data)
    except ConfigError as exc:
        raise exc.at(str(file)) from exc
