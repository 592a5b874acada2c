"""A configuration of the tiny model for the doctor, and its JSON with rows by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import changed
from live_server import MODEL, free_port

from swift_stage2.checks import doctor
from swift_stage2.demo.demo_config import MODEL_TYPE, TEMPLATE_FILE


@dataclass(frozen=True)
class Report:
    """The doctor's words and its exit status."""

    status: int
    findings: list[dict[str, Any]]
    text: str

    def row(self, check: str, section: str = "") -> dict[str, Any]:
        found = [row for row in self.findings if row["check"] == check and section in row["section"]]
        assert len(found) == 1, (check, [row["check"] for row in self.findings])
        return found[0]

    def verdict(self, check: str) -> str:
        return str(self.row(check)["verdict"])

    @property
    def failed(self) -> list[str]:
        return [row["check"] for row in self.findings if row["verdict"] == "failed"]


def write_config(
    file: Path, rows: Path, output: Path, base_urls: Sequence[str], changes: Mapping[str, Any]
) -> Path:
    data: dict[str, Any] = {
        "swift": {
            "model": str(MODEL),
            "model_type": MODEL_TYPE,
            "template": MODEL_TYPE,
            "external_plugins": [str(TEMPLATE_FILE)],
            "dataset": [str(rows)],
            "output_dir": str(output),
            "split_dataset_ratio": 0.0,
            "lazy_tokenize": True,
            "load_from_cache_file": False,
            "dataset_num_proc": 1,
            "tuner_type": "full",
            "torch_dtype": "float32",
            "attn_impl": "sdpa",
            "check_model": False,
            "use_cpu": True,
            "ddp_backend": "gloo",
            "gradient_accumulation_steps": 2,
        },
        "stage2_ab": {
            "schedule": {"b_ratio": 0.25},
            "channel_b": {
                "prefetch": {"queue_limit": 6, "prefetch_target_packs": 4},
                "packing": {"packing_length": 256},
            },
        },
        "rollout": {
            "servers": [{"base_url": url, "group_port": free_port()} for url in base_urls],
            "decoding": {"temperature": 0.0, "max_new_tokens": 100},
            "max_inflight_per_server": 8,
            "request_timeout_s": 30.0,
            "sync": {"timeout_s": 30.0},
        },
    }
    data = changed({dotted.replace("__", "."): value for dotted, value in changes.items()}, base=data)
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    return file


def run_doctor(config: Path, options: Sequence[str], output: Callable[[], str]) -> Report:
    status = doctor.main([str(config), "--json", *options])
    text = output()
    report = json.loads(text)
    assert report["exit_status"] == status
    return Report(status, report["findings"], text)


def not_ok(report: Report) -> set[str]:
    """Rows that are not ok. None of them may be a fault or a warning: the rest could not be told."""
    assert [row for row in report.findings if row["verdict"] in ("failed", "warning")] == []
    return {row["check"] for row in report.findings if row["verdict"] != "ok"}


def check_live_twice(config: Path, capsys: pytest.CaptureFixture[str], texts: Mapping[str, str]) -> None:
    """Every row is ok twice in a row, on a server with vLLM's own transfer; ``texts`` are its own, by row.

    But for coordinates: the tiny model finds too little in these images, and such servers tell no sizes.

    The first doctor must leave no communicator that the second would stumble over.
    """
    texts = {
        "dry sync round": "proven by canary",
        "timed rollouts": "rollouts/s with all slots in use",
        "parsed and matched": "8 rollout(s): ",
    } | dict(texts)
    for _ in range(2):
        capsys.readouterr()
        report = run_doctor(config, ["--live", "--step-seconds", "5"], lambda: capsys.readouterr().out)
        assert report.status == 0, report.text
        assert not_ok(report) <= {"coordinates"}
        for check, text in texts.items():
            assert text in report.row(check)["found"]
        assert "nothing is grossly wrong" in report.row("dry sync round")["found"]
