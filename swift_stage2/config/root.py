"""The whole configuration: its sections, the rules between them, and the way in from a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from swift_stage2.config import rules
from swift_stage2.config.best_model import best_metric, refuse_best_model
from swift_stage2.config.binding import bind
from swift_stage2.config.device_shares import Placement, check_devices
from swift_stage2.config.launch import LaunchConfig, ServerEngine
from swift_stage2.config.objective import check_objective
from swift_stage2.config.registry import find
from swift_stage2.config.rollout import ROUND_MARGIN_S, OnPending, RolloutConfig, Transport
from swift_stage2.config.rules import Inequality
from swift_stage2.config.stage2_ab import (
    SHIPPED_DIALECTS,
    SHIPPED_TASKS,
    Stage2AbConfig,
    StarvationAction,
)
from swift_stage2.config.swift_arguments import as_argv, refuse_unsupported, refuse_values
from swift_stage2.config.telemetry import TelemetryConfig
from swift_stage2.config.yaml_text import read_yaml
from swift_stage2.errors import ConfigError
from swift_stage2.runtime.route import is_loopback

_WANTED_STEPS_IN_GRACE = 4
_PARTS_OF_FIRST_ROUND = 3  # canary, copy, pushes: each may take all of a round's time
# A round's own waits (a lost group, a busy server, the last calls) are of seconds; a bucket is copied, summed, sent
# and taken, at this pace or better.
_ROUND_FIXED_S = 10.0
_SLOW_BUCKET_MIB_PER_S = 100.0
# The seconds of a call besides its tokens, and a pace that no server keeps for one conversation among several.
_REQUEST_FIXED_S = 1.0
_FAST_TOKENS_PER_S = 400.0

_SECRET = re.compile(r"_(token|secret|webhook_url|api_key|password)$")  # ms-swift's arguments of these names

# Keys of configurations from before this package, wherever they stand, and what says the same now.
RETIRED_ANYWHERE = {"rollout_buffer": "stage2_ab.channel_b.prefetch"}
RETIRED_AT_TOP = {
    "temperature": "rollout.decoding.temperature",
    "top_p": "rollout.decoding.top_p",
    "top_k": "rollout.decoding.top_k",
    "max_new_tokens": "rollout.decoding.max_new_tokens",
    "repetition_penalty": "rollout.decoding.repetition_penalty",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage2Config:
    swift: Mapping[str, Any] = field(default_factory=dict)
    """ms-swift's own training arguments, passed through unchanged."""
    stage2_ab: Stage2AbConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    control_timeout_s: float = 1800.0
    """Deadline of every decision that the ranks take together: longer than the first round and the longest save."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        refuse_values(self.swift)
        # The servers first: without them every other rule between sections speaks of defaults that nobody wrote.
        if self.b_enabled and not self.rollout.servers:
            raise ConfigError(
                "rollout.servers must name at least one server when b_ratio is above 0, got none and "
                f"b_ratio={self.stage2_ab.schedule.b_ratio:g}; "
                "write rollout: {servers: [{base_url: 'http://127.0.0.1:8000'}]}, or b_ratio: 0"
            )
        rules.deadline(self, "control_timeout_s")
        if self.b_enabled:
            self._control_timeout_inequality().require()
        self._check_launch()
        self._check_resumes()
        if self.telemetry.record and not self.swift.get("model"):
            raise ConfigError(
                "telemetry.record needs ms-swift's arguments in the section swift, for a replay reads them there, got "
                f"model={self.swift.get('model')!r}; write them there and start with swift-stage2 train or launch"
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
    def max_resumes(self) -> int | None:
        """Times that a rollout may be resumed; None where one that was aborted begins anew."""
        if self.rollout.sync.on_pending is not OnPending.RESUME:
            return None
        most = self.rollout.max_resumes
        return self.stage2_ab.channel_b.prefetch.version_window if most is None else most

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """As written under ``swift``; None leaves it to ms-swift, whose default depends on the world size."""
        value = self.swift.get("gradient_accumulation_steps")
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                "swift.gradient_accumulation_steps must be an integer of at least 1, "
                f"got gradient_accumulation_steps={value!r}"
            )
        return value

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that work but waste something, each with the recommended value."""
        if not self.b_enabled:
            unused = (
                "launch.servers are not started, because nobody would ask them: got b_ratio=0; remove them"
            )
            return (unused,) if self.launch.servers else ()
        inequalities = self.inequalities(self.gradient_accumulation_steps)
        return tuple(rule.message for rule in inequalities if rule.is_advice and not rule.holds)

    def inequalities(self, gradient_accumulation_steps: int | None) -> tuple[Inequality, ...]:
        """Every rule between numbers that channel B needs, in the order in which they are checked.

        Without ``gradient_accumulation_steps`` those about the packs of a step are left out.
        """
        steps = gradient_accumulation_steps
        return (
            *self.stage2_ab.channel_b.prefetch.inequalities,
            self._control_timeout_inequality(),
            *(self._accumulation_inequalities(steps) if steps is not None else ()),
            self._starvation_advice(),
            self._round_time_advice(),
            self._request_time_advice(),
        )

    def check_accumulation(self, gradient_accumulation_steps: int) -> None:
        """Raises ConfigError: a queue cannot hold one step's packs. The trainer calls it with ms-swift's own value."""
        if self.b_enabled:
            for inequality in self._accumulation_inequalities(gradient_accumulation_steps):
                if not inequality.is_advice:
                    inequality.require()

    def check_validation_set(self, num_rows: int) -> None:
        """Raises ConfigError: evaluations have no rows. The trainer calls it with ms-swift's own set."""
        every_steps = self.stage2_ab.evaluation.every_steps
        if every_steps and not num_rows:
            raise ConfigError(
                "stage2_ab.evaluation needs ms-swift's validation set, got none and "
                f"every_steps={every_steps}; write swift.val_dataset, or swift.split_dataset_ratio above 0 (which "
                "ms-swift drops where eval_strategy is 'no'), or every_steps: 0"
            )

    def swift_arguments(self) -> list[str]:
        """The section ``swift`` as argv for ms-swift's parser."""
        metric = best_metric(self.swift)
        named = {"metric_for_best_model": f"eval_{metric}"} if metric else {}
        return as_argv({**self.swift, **named})

    def without_secrets(self) -> dict[str, Any]:
        """Every setting that a learner needs, as plain values: no ``launch.servers``, and none of ms-swift's tokens."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # enums become text, tuples lists
        plain["launch"]["servers"] = []
        plain["swift"] = {key: value for key, value in plain["swift"].items() if not _SECRET.search(key)}
        return plain

    def _control_timeout_inequality(self) -> Inequality:
        """A rank that waits for rank 0's first round must not give up first."""
        sync, parts = self.rollout.sync, _PARTS_OF_FIRST_ROUND
        numbers = f"{parts} * ({sync.timeout_s:g} + {ROUND_MARGIN_S:g})"
        needed = parts * (sync.timeout_s + ROUND_MARGIN_S)
        return Inequality(
            name="control timeout",
            statement=f"control_timeout_s >= {parts} * (sync.timeout_s + {ROUND_MARGIN_S:g})",
            numbers=f"{self.control_timeout_s:g} >= {numbers}",
            holds=self.control_timeout_s >= needed,
            refusal=f"control_timeout_s must be at least {parts} * (rollout.sync.timeout_s + {ROUND_MARGIN_S:g}), what "
            "canary, copy and pushes of the first round may take, got "
            f"control_timeout_s={self.control_timeout_s:g} < {numbers}",
            remedy=f"write control_timeout_s: {needed:g} or more, plus the longest save",
        )

    def _accumulation_inequalities(self, gradient_accumulation_steps: int) -> tuple[Inequality, ...]:
        """Whether target and limit hold the packs of a step, and advice against packs that would expire unused."""
        prefetch, schedule = self.stage2_ab.channel_b.prefetch, self.stage2_ab.schedule
        per_step, b_ratio = gradient_accumulation_steps, schedule.exact_b_ratio
        limit = prefetch.limit(per_step, b_ratio)
        holding_a_step = (
            Inequality(
                name=f"{what} holds a step",
                statement=f"{name} >= gradient_accumulation_steps",
                numbers=f"{value} >= {gradient_accumulation_steps}",
                holds=value >= gradient_accumulation_steps,
                refusal="B could never run: a step trains "
                f"gradient_accumulation_steps={gradient_accumulation_steps} packs, got {name}={value}",
                remedy=f"write stage2_ab.channel_b.prefetch.{name}: {gradient_accumulation_steps} or more",
            )
            for what, name, value in (
                ("target", "prefetch_target_packs", prefetch.target(per_step, b_ratio)),
                ("limit", "queue_limit", limit),
            )
        )
        useful = prefetch.packs_in_window(per_step, b_ratio)
        default = " (the default)" if prefetch.queue_limit is None else ""
        advice = Inequality(
            name="useful limit",
            statement="queue_limit <= gradient_accumulation_steps * max(1, ceil((version_window + 1) * b_ratio "
            "* sync_every_steps))",
            numbers=f"{limit} <= {gradient_accumulation_steps} * max(1, ceil("
            f"({prefetch.version_window} + 1) * {schedule.b_ratio:g} * {prefetch.sync_every_steps})) = {useful}",
            holds=limit <= useful,
            refusal=f"queue_limit={limit}{default} is more than the {useful} packs that can be trained "
            "before they expire",
            remedy=f"write stage2_ab.channel_b.prefetch.queue_limit: {useful}",
            is_advice=True,
        )
        # A derived budget follows from the lengths of the rows, and holds.
        is_written = prefetch.max_rollouts_per_version is not None
        budget = (prefetch.budget_inequality(gradient_accumulation_steps),) if is_written else ()
        return (*holding_a_step, *budget, advice)

    def _starvation_advice(self) -> Inequality:
        """Starvation is judged on the B steps that were wanted in the grace: one alone decides nothing."""
        starvation, b_ratio = self.stage2_ab.starvation, self.stage2_ab.schedule.exact_b_ratio
        needed = math.ceil(_WANTED_STEPS_IN_GRACE / b_ratio) if b_ratio else starvation.grace_steps
        return Inequality(
            name="starvation grace",
            statement=f"starvation.grace_steps * b_ratio >= {_WANTED_STEPS_IN_GRACE}",
            numbers=f"{starvation.grace_steps} * {float(b_ratio):g} = {float(starvation.grace_steps * b_ratio):g}",
            holds=starvation.action is StarvationAction.OFF or starvation.grace_steps >= needed,
            refusal=f"grace_steps={starvation.grace_steps} holds so few wanted B steps that one which was skipped "
            "counts as starvation",
            remedy=f"write stage2_ab.starvation.grace_steps: {needed} or more",
            is_advice=True,
        )

    def _round_time_advice(self) -> Inequality:
        """A round with less is given up although nothing is wrong: one bucket is the least it sends."""
        sync = self.rollout.sync
        needed = math.ceil(_ROUND_FIXED_S + sync.bucket_mib / _SLOW_BUCKET_MIB_PER_S)
        return Inequality(
            name="round time",
            statement=f"sync.timeout_s >= {_ROUND_FIXED_S:g} + sync.bucket_mib / {_SLOW_BUCKET_MIB_PER_S:g}",
            numbers=f"{sync.timeout_s:g} >= {_ROUND_FIXED_S:g} + {sync.bucket_mib} / "
            f"{_SLOW_BUCKET_MIB_PER_S:g} = {needed}",
            holds=sync.timeout_s >= needed,
            refusal=f"rollout.sync.timeout_s={sync.timeout_s:g} is so short that a sound round may be given up, and "
            f"its servers with it; got bucket_mib={sync.bucket_mib}",
            remedy=f"write rollout.sync.timeout_s: {needed} or more, plus the seconds that all weights take",
            is_advice=True,
        )

    def _request_time_advice(self) -> Inequality:
        """A rollout that needs all its tokens would be given up on any server, and its sample with it."""
        request_s, tokens = self.rollout.request_timeout_s, self.rollout.decoding.max_new_tokens
        needed = math.ceil(_REQUEST_FIXED_S + tokens / _FAST_TOKENS_PER_S)
        return Inequality(
            name="request time",
            statement=f"request_timeout_s >= {_REQUEST_FIXED_S:g} + max_new_tokens / {_FAST_TOKENS_PER_S:g}",
            numbers=f"{request_s:g} >= {_REQUEST_FIXED_S:g} + {tokens} / {_FAST_TOKENS_PER_S:g} = {needed}",
            holds=request_s >= needed,
            refusal=f"rollout.request_timeout_s={request_s:g} is so short that a long answer is given up while a sound "
            f"server writes it; got max_new_tokens={tokens}",
            remedy=f"write rollout.request_timeout_s: {needed} or more, or a smaller rollout.decoding.max_new_tokens",
            is_advice=True,
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
                "stage2_ab.evaluation asks the rollout servers of channel B, got b_ratio=0 and "
                f"every_steps={every_steps}; write every_steps: 0, or a b_ratio above 0"
            )
        # Without a data set here the arguments come from ms-swift's own command line, and only the trainer knows.
        if self.swift.get("dataset"):
            # Without a strategy of its own ms-swift evaluates as it saves; where it does not, it splits nothing off.
            strategy = self.swift.get("eval_strategy", self.swift.get("save_strategy"))
            splits = self.swift.get("split_dataset_ratio") and strategy not in ("no", False)
            self.check_validation_set(int(bool(self.swift.get("val_dataset") or splits)))

    def _check_resumes(self) -> None:
        window, most = self.stage2_ab.channel_b.prefetch.version_window, self.rollout.max_resumes
        if most is not None and self.rollout.sync.on_pending is not OnPending.RESUME:
            raise ConfigError(
                "rollout.max_resumes needs rollout.sync.on_pending: resume, got "
                f"max_resumes={most} on_pending={str(self.rollout.sync.on_pending)!r}; write on_pending: resume, or "
                "leave max_resumes out"
            )
        if self.rollout.sync.on_pending is OnPending.RESUME and not window:
            raise ConfigError(
                "rollout.sync.on_pending: resume needs version_window of at least 1, because a resumed rollout keeps "
                "tokens of older weights, got version_window=0; write version_window: 1 or more, or on_pending: wait"
            )
        if most is not None and most > window:
            raise ConfigError(
                "rollout.max_resumes must be at most version_window, because a rollout's oldest tokens age with each "
                f"resume, got max_resumes={most} version_window={window}; write max_resumes: {window}, or leave it out"
            )

    def _check_launch(self) -> None:
        started, named = len(self.launch.servers), len(self.rollout.servers)
        if started and started != named:
            raise ConfigError(
                "launch.servers must be empty or have one entry for each of rollout.servers, got "
                f"{started} launch.servers and {named} rollout.servers; add or remove entries"
            )
        on_pending, transport = self.rollout.sync.on_pending, self.rollout.sync.transport
        # Settings that stock servers cannot serve: key, value, who can, and the value for stock ones.
        needs: list[tuple[str, str, str, str]] = []
        if self.b_enabled and on_pending is not OnPending.WAIT:
            needs.append(("on_pending", on_pending, f"servers that can {on_pending}", "wait"))
        if self.b_enabled and transport in (Transport.SHARED_MEMORY, Transport.DISK):
            needs.append(("transport", transport, "servers of ours", "auto"))
        hosts = [server.host for server in self.rollout.servers]
        on_hosts = ["" if is_loopback(host) else host for host in hosts[:started]]
        placements = [
            Placement(index, host, process.devices)
            for index, (process, host) in enumerate(zip(self.launch.servers, on_hosts, strict=True))
        ]
        check_devices(self.launch, [Placement(None, "", self.launch.learner.devices), *placements])
        taken = {port for server in self.rollout.servers for port in (server.port, server.group_port)}
        for index, process in enumerate(self.launch.servers):
            for key, value, such, other in needs if process.engine is ServerEngine.SWIFT else ():
                raise ConfigError(
                    f"rollout.sync.{key}: {value} needs {such}, got a stock one at "
                    f"launch.servers[{index}].engine={str(process.engine)!r}; write {key}: {other}, or engine: vllm"
                )
            if process.upstream_port is None:
                continue
            if process.upstream_port in taken:
                raise ConfigError(
                    "every upstream_port must differ from all other ports, got "
                    f"launch.servers[{index}].upstream_port={process.upstream_port} more than once; write another"
                )
            taken.add(process.upstream_port)


def load_config(path: str | PathLike[str]) -> Stage2Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: one line that names the file, the place, the value and the remedy.
    """
    file = Path(path)
    data = read_yaml(file)
    try:
        _refuse_retired(data)
        return bind(Stage2Config, data)
    except ConfigError as exc:
        raise ConfigError(f"{file}: {exc}") from exc


def _refuse_retired(data: Mapping[str, Any], place: str = "") -> None:
    for key, value in data.items():
        replacement = RETIRED_ANYWHERE.get(key) or (None if place else RETIRED_AT_TOP.get(key))
        if replacement is not None:
            raise ConfigError(f"{place}{key} is retired and no longer read; use {replacement} instead")
        if isinstance(value, Mapping) and f"{place}{key}" != "swift":
            _refuse_retired(value, f"{place}{key}.")
