"""Configurations that are wrong: as text, by unknown keys, by types, by ranges, and between sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, get_args, get_type_hints

from benchmarks.wrong_inputs.case import CONFIG_FILE, DOCTOR, TRAIN, Case, holding, placed
from swift_stage2.config import Stage2Config
from swift_stage2.config.swift_arguments import UNSUPPORTED

_PREFETCH = "stage2_ab.channel_b.prefetch"
_SERVER = "rollout.servers.0"
_MINIMAL = "stage2_ab: {schedule: {b_ratio: 0}}\n"
_BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))

_TEXTS: tuple[tuple[str, str | bytes, str], ...] = (
    ("an empty file", "", "an empty file"),
    ("only a comment", "# nothing\n", "an empty file"),
    ("a list at the top", "- 1\n- 2\n", "must hold a mapping"),
    ("a word at the top", "hello\n", "must hold a mapping"),
    ("a number at the top", "7\n", "must hold a mapping"),
    ("JSON that is cut off", '{"stage2_ab": {"schedule": ', "valid YAML"),
    ("a bracket that is not closed", "stage2_ab: [1,\nb: 2\n", "valid YAML"),
    ("a quote that is not closed", 'swift: {model: "m}\n', "valid YAML"),
    ("a tab as indentation", "swift:\n\tmodel: m\n", "indent by spaces"),
    ("no space after a colon", "stage2_ab:{schedule: 1}\n", "unknown key 'stage2_ab:{schedule'"),
    ("uneven indentation", "swift:\n  a: 1\n c: 2\n", "valid YAML"),
    ("a control character", "swift: {model: m\x07}\n", "special characters"),
    ("a NUL byte", b"swift: {model: m\x00}\n", "special characters"),
    ("Latin-1 text", "swift: {model: m\xe9}\n".encode("latin-1"), "readable UTF-8"),
    ("UTF-16 with its BOM", "swift: {model: m}\n".encode("utf-16"), "readable UTF-8"),
    ("a picture instead of YAML", b"\x89PNG\r\n\x1a\n\x00\x00", "readable UTF-8"),
    ("a lone surrogate", b"swift: {model: \xed\xa0\x80}\n", "readable UTF-8"),
    ("a section written twice", _MINIMAL * 2, "also on line 1"),
    ("a key written twice", "stage2_ab: {schedule: {b_ratio: 0, b_ratio: 1}}\n", "may be written once"),
    ("a number as key", "1: 2\n", "a key must be text"),
    ("a list as key", "? [1]\n: 2\n", "a key must be text"),
    ("null as key", "~: 2\n", "a key must be text"),
    ("brackets 5,000 deep", "a: " + "[" * 5000 + "]" * 5000, "at most 32 deep"),
    ("mappings 1,500 deep", "a: " + "{b: " * 1500 + "1" + "}" * 1500, "at most 32 deep"),
    ("an alias inside itself", "a: &a [*a]\n", "inside what it names"),
    ("aliases that grow without end", _BOMB, "at most 100000 values"),
    ("an alias to nothing", "a: *b\n", "undefined alias"),
    ("a Python object", "swift: !!python/object/apply:os.getcwd []\n", "without a YAML tag"),
    ("a tag on a number", "swift: {a: !!int abc}\n", "without a YAML tag"),
    ("a merge key", "a: &a {b: 1}\nstage2_ab:\n  <<: *a\n  schedule: {b_ratio: 0}\n", "unknown key"),
    ("two documents", f"{_MINIMAL}---\n{_MINIMAL}", "valid YAML"),
    ("a directive of another version", f"%YAML 9.9\n---\n{_MINIMAL}", "valid YAML"),
    ("a number of 401 digits", f"control_timeout_s: {'1' * 401}\n{_MINIMAL}", "at most 18 digits"),
    ("a number of 5,000 digits", f"control_timeout_s: {'1' * 5000}\n{_MINIMAL}", "at most 18 digits"),
    ("no section stage2_ab", "swift: {model: m}\n", "stage2_ab is required"),
    ("no b_ratio", "stage2_ab: {schedule: {}}\n", "b_ratio is required"),
    ("no schedule", "stage2_ab: {}\n", "schedule is required"),
    ("a retired section", f"rollout_buffer: {{}}\n{_MINIMAL}", "is retired"),
    ("a retired key at the top", f"temperature: 1\n{_MINIMAL}", "is retired"),
    ("a retired key deep inside", "stage2_ab: {rollout_buffer: {}, schedule: {b_ratio: 0}}\n", "is retired"),
    ("a section that is a list", "stage2_ab: [1]\n", "must be a mapping"),
    ("a section that is empty", "stage2_ab:\n", "must be a mapping"),
    ("swift as text", f"swift: hello\n{_MINIMAL}", "must be a mapping"),
)

_MISSPELT: tuple[tuple[str, Any, str], ...] = (
    ("stage2_ba", {}, "did you mean 'stage2_ab'"),
    ("stage2_ab.scheduule", {}, "did you mean 'schedule'"),
    ("stage2_ab.schedule.b_ratoi", 0.5, "did you mean 'b_ratio'"),
    ("b_ratio", 0.5, "belongs at 'stage2_ab.schedule.b_ratio'"),
    ("queue_limit", 8, "belongs at 'stage2_ab.channel_b.prefetch.queue_limit'"),
    (f"{_PREFETCH}.version_windw", 2, "did you mean 'version_window'"),
    (f"{_SERVER}.base_ulr", "http://h:1", "did you mean 'base_url'"),
    ("rollout.api_key", "hush", "did you mean 'api_key_env'"),
    ("rollout.decoding.temprature", 1, "did you mean 'temperature'"),
    ("rollout.sync.time_out_s", 1, "did you mean 'timeout_s'"),
    ("launch.servers.0.devicees", [1], "did you mean 'devices'"),
    ("launch.learner.nproc", 2, "unknown key 'nproc'"),
    ("telemetry.tensorbord", True, "did you mean 'tensorboard'"),
    ("zzz", 1, "its keys are swift, stage2_ab"),
)

_RANGES: tuple[tuple[str, Any, str], ...] = (
    ("stage2_ab.schedule.b_ratio", -0.1, "0..1"),
    ("stage2_ab.schedule.b_ratio", 1.5, "0..1"),
    ("stage2_ab.schedule.b_ratio", float("nan"), "0..1"),
    ("stage2_ab.starvation.grace_steps", 0, "at least 1"),
    ("stage2_ab.starvation.action", "wran", "did you mean 'warn'"),
    ("stage2_ab.channel_b.on_pipeline_failure", "ignore", "raise or continue_a"),
    ("stage2_ab.channel_b.max_truncated_ratio", 2, "0..1"),
    (f"{_PREFETCH}.queue_limit", 0, "at least 1"),
    (f"{_PREFETCH}.queue_limit", 3, "prefetch_target_packs must be at most queue_limit"),
    (f"{_PREFETCH}.version_window", -1, "at least 0"),
    (f"{_PREFETCH}.sync_every_steps", 0, "at least 1"),
    (f"{_PREFETCH}.prefetch_target_packs", 1, "B could never run"),
    (f"{_PREFETCH}.min_ready_tokens", -5, "at least 0"),
    (f"{_PREFETCH}.max_attempts", 0, "at least 1"),
    ("stage2_ab.channel_b.packing.packing_length", 0, "at least 1"),
    ("stage2_ab.channel_b.packing.packing_min_fill_ratio", 1.1, "0..1"),
    ("stage2_ab.channel_b.matching.iou_threshold", -1, "0..1"),
    ("stage2_ab.channel_b.matching.top_k", 0, "at least 1"),
    ("stage2_ab.channel_b.matching.unmatched_prediction_cost", -1, "at least 0"),
    ("stage2_ab.channel_b.target.dialect", "json", "object_list or object_map"),
    ("stage2_ab.channel_b.target.weights.structure", -1, "at least 0"),
    ("stage2_ab.evaluation.every_steps", -1, "at least 0"),
    ("stage2_ab.evaluation.every_steps", 5, "needs ms-swift's validation set"),
    ("stage2_ab.evaluation.num_samples", 0, "at least 1"),
    ("rollout.servers", [], "must name at least one server"),
    (f"{_SERVER}.base_url", "127.0.0.1:8000", "write it like http://"),
    (f"{_SERVER}.base_url", "ftp://h:1", "http or https"),
    (f"{_SERVER}.base_url", "http://h", "must hold the server's port"),
    (f"{_SERVER}.base_url", "http://h:99999", "must be a URL"),
    (f"{_SERVER}.base_url", "http://h:port", "must be a URL"),
    (f"{_SERVER}.base_url", "http://h:0", "with a host"),
    (f"{_SERVER}.base_url", "http://:8000", "with a host"),
    (f"{_SERVER}.base_url", "http://h:8000/v1", "scheme, host and port only"),
    (f"{_SERVER}.base_url", "http://h:8000?a=1", "scheme, host and port only"),
    (f"{_SERVER}.base_url", "", "http or https"),
    (f"{_SERVER}.group_port", 0, "1024..65535"),
    (f"{_SERVER}.group_port", 4, "at least 1024"),
    (f"{_SERVER}.group_port", 70000, "1024..65535"),
    ("rollout.api_key_env", "", "name of an environment variable"),
    ("rollout.decoding.temperature", -1, "at least 0"),
    ("rollout.decoding.temperature", float("inf"), "at least 0"),
    ("rollout.decoding.top_p", 0, "above 0"),
    ("rollout.decoding.top_p", 1.2, "at most 1"),
    ("rollout.decoding.top_k", 0, "-1 (all tokens)"),
    ("rollout.decoding.max_new_tokens", 0, "at least 1"),
    ("rollout.decoding.repetition_penalty", 0, "above 0"),
    ("rollout.max_inflight_per_server", 0, "at least 1"),
    ("rollout.max_inflight_per_server", 5000, "at most 4096"),
    ("rollout.request_timeout_s", 0, "above 0"),
    ("rollout.request_timeout_s", float("inf"), "every wait needs a deadline"),
    ("rollout.start_timeout_s", -3, "above 0"),
    ("rollout.sync.mode", "delta", "must be full"),
    ("rollout.sync.timeout_s", 0, "above 0"),
    ("rollout.sync.bucket_mib", 0, "at least 1"),
    ("rollout.sync.backoff_steps", 0, "at least 1"),
    ("rollout.sync.proof", "trust", "auto or checksum or canary"),
    ("control_timeout_s", 0, "above 0"),
    ("control_timeout_s", 80, "rollout.sync.timeout_s + rollout.request_timeout_s"),
    ("telemetry.gallery_rows", -1, "0 or more"),
    ("launch.learner.nproc_per_node", 0, "at least 1"),
    ("launch.learner.devices", [-1], "at least 0"),
    ("launch.learner.devices", [0, 0], "different numbers"),
    ("launch.learner.shutdown_timeout_s", 0, "above 0"),
    ("launch.server_shutdown_timeout_s", 0, "above 0"),
    ("launch.restart.max_restarts", 0, "policy: never"),
    ("launch.restart.backoff_s", -1, "at least 0"),
    ("launch.restart.policy", "always", "never or on_failure"),
    ("launch.servers.0.engine", "tensorrt", "transformers or vllm or swift"),
    ("launch.servers.0.args", {"port": 1}, "args must not set port"),
    ("launch.servers.0.env", {"CUDA_VISIBLE_DEVICES": "1"}, "write devices"),
    ("launch.servers.0.env", {"A": [1]}, "quote it"),
    ("launch.servers.0.merge", True, "merge is for stock servers"),
    ("launch.servers.0.upstream_port", 9, "merge and upstream_port go together"),
    ("launch.servers", [{}, {}], "2 launch.servers and 1 rollout.servers"),
    ("swift.gradient_accumulation_steps", 0, "at least 1"),
    ("swift.gradient_accumulation_steps", "4", "must be an integer"),
    ("swift.output_dir", "", "must name the run directory"),
    ("swift.output_dir", 7, "must name the run directory"),
    ("swift.split_dataset_ratio", 2, "at least 0 and below 1"),
    ("swift.dataset", 7, "must be a path or a list of paths"),
    ("swift.dataset", [1], "must be a path or a list of paths"),
    ("swift.model", ["a", "b"], "must be a path"),
)
_REFUSED_VALUES = {
    "task_type": "seq_cls",
    "tuner_type": "adalora",
    "truncation_strategy": "right",
    "sequence_parallel_size": 2,
    "deepspeed_autotp_size": 2,
    "average_tokens_across_devices": False,
}


def setting_cases() -> Iterator[Case]:
    """Told by ``launch`` before anything is started, except where ms-swift has to be asked."""
    for wrong, content, told in _TEXTS:
        yield Case("YAML text", wrong, told, spoil=holding(**{CONFIG_FILE: content}))
    for place, value, told in _MISSPELT:
        yield Case("keys", f"{place} instead of a key", told, spoil=placed(place, value), never="hush")
    for place in _leaves(Stage2Config):
        yield Case("types", f"{place}: a mapping with a list", "must be", spoil=placed(place, {"x": [1]}))
    for place, value, told in _RANGES:
        yield Case("ranges", f"{place}: {str(value)[:40] or 'nothing'}", told, spoil=placed(place, value))
    for rule in UNSUPPORTED:
        place, refused = f"swift.{rule.key}", _REFUSED_VALUES.get(rule.key, True)
        wrong = f"{place}: {refused} beside B"
        yield Case("combinations", wrong, "not supported", spoil=placed(place, refused))
    yield from _between()
    yield from _by_swift()


def _between() -> Iterator[Case]:
    case = partial(Case, "between settings")
    key = "sk-proj-Ab12Cd34Ef56Gh78"
    pasted = placed("rollout.api_key_env", key)
    yield case("a key pasted as api_key_env", "never the key", spoil=pasted, never=key)
    for wrong, url in (
        ("credentials in base_url", "http://me:hush@h:1"),
        ("credentials and no scheme", "me:hush@h:1"),
        ("credentials with a slash", "http://me:hu/sh@h:1"),
    ):
        yield case(wrong, "credentials", spoil=placed(f"{_SERVER}.base_url", url), never="sh@")
    for wrong, servers in (
        ("a URL's port is another's group port", [("h:7001", 7002), ("h:7002", 7003)]),
        ("the same server twice", [("h:7001", None), ("h:7001", None)]),
        ("one server under two names", [("localhost:7001", None), ("127.0.0.1:7001", None)]),
        ("one group port for two servers", [("h:7001", None), ("h:7002", None)]),
    ):
        value = [
            {"base_url": f"http://{host}"} | ({} if port is None else {"group_port": port})
            for host, port in servers
        ]
        yield case(wrong, "of its own", spoil=placed("rollout.servers", value))
    devices = {"learner": {"devices": [0]}, "servers": [{"devices": [0]}]}
    ranks = {"devices": [0], "nproc_per_node": 2}
    window = {"version_window": 0, "sync_every_steps": 1}
    for wrong, place, setting, told in (
        ("one device for learner and server", "launch", devices, "need devices of their own"),
        ("more ranks than devices", "launch.learner", ranks, "at most the number of devices"),
        ("record without audit", "telemetry", {"record": True, "audit": False}, "telemetry.audit: true"),
        ("every target weight 0", _WEIGHTS, dict.fromkeys(_WEIGHT_NAMES, 0), "at least one target weight"),
        ("version_window 0 and a round before every step", _PREFETCH, window, "version_window"),
    ):
        yield case(wrong, told, spoil=placed(place, setting))
    url, timeout = f"{_SERVER}.base_url", "rollout.request_timeout_s"
    for wrong, place, number, told in (
        ("a request too short for its answer", timeout, 0.5, f"write {timeout}: 2"),
        (
            "a round too short for one bucket",
            "rollout.sync.timeout_s",
            2,
            "rollout.sync.timeout_s: 16 or more",
        ),
        ("servers although b_ratio is 0", "stage2_ab.schedule.b_ratio", 0, "are not started"),
        ("a server on another machine in launch", url, "http://192.0.2.1:8000", _MACHINES),
        ("devices that do not exist", "launch.servers.0.devices", [901], "but this machine has"),
    ):
        yield case(wrong, told, DOCTOR, placed(place, number), (0, 1))


_WEIGHTS = "stage2_ab.channel_b.target.weights"
_WEIGHT_NAMES = (
    *("structure", "matched_label", "missed_label", "matched_coordinates", "missed_coordinates", "closure"),
)
_MACHINES = "on several machines: launch --servers-only"


def _by_swift() -> Iterator[Case]:
    case = partial(Case, "ms-swift's settings")
    length = "packing_length shorter than prompt and answer"
    for wrong, place, value, told in (
        ("an argument of swift rlhf", "swift.rlhf_type", "dpo", "unknown key 'rlhf_type'"),
        ("a misspelt argument", "swift.lerning_rate", 1, "did you mean 'learning_rate'"),
        ("a text as learning rate", "swift.learning_rate", "fast", "learning_rate"),
        ("a model type that ms-swift does not know", "swift.model_type", "qwen9", "qwen9"),
        ("a template that ms-swift does not know", "swift.template", "none_such", "none_such"),
        ("a plugin that is not there", "swift.external_plugins", ["absent.py"], "absent.py"),
        (length, "stage2_ab.channel_b.packing.packing_length", 64, "packing_length"),
        ("an unknown dtype", "swift.torch_dtype", "float7", "torch_dtype"),
    ):
        yield case(wrong, told, DOCTOR, placed(place, value), (1,))
    misspelt = placed("swift.lerning_rate", 1)
    yield case("a misspelt argument, met by train", "did you mean", TRAIN, misspelt)


def _leaves(section: type, place: str = "") -> Iterator[str]:
    """Every key that is no section."""
    hints = get_type_hints(section)
    for item in fields(section):
        hint, path = hints[item.name], f"{place}{item.name}"
        entry = next((part for part in get_args(hint) if isinstance(part, type) and is_dataclass(part)), None)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _leaves(hint, f"{path}.")
        elif entry is not None:
            yield from _leaves(entry, f"{path}.0.")
        elif path not in ("swift", "launch.servers.0.args", "launch.servers.0.env"):
            yield path
