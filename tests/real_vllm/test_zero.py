"""DeepSpeed on two real CPU ranks: ZeRO-2 and ZeRO-3, full and LoRA, with a real server and proven rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_model import make_encoder
from sharded_export import exports_of
from torchrun_job import ENVIRONMENT, LearnerRun, Server, run_learner, start_server, write_config

pytest.importorskip("deepspeed")

_PROGRAM = Path(__file__).with_name("two_rank_zero3.py")
_REFERENCE_PROGRAM = Path(__file__).with_name("two_rank_reference.py")
_NOTHING = hashlib.sha256(b"").hexdigest()[:16]  # a partitioned tensor that was not gathered
_NUM_STEPS = 10


@pytest.fixture(scope="module", autouse=True)
def _extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DeepSpeed compiles an operator; a build that was killed leaves a lock that later ones wait for, for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


@pytest.fixture(scope="module")
def half_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Holds the learner's own dtype, so that the canary counts beside the checksums."""
    started = start_server(tmp_path_factory.mktemp("server"), torch_dtype="bfloat16")
    yield started
    started.kill()


@pytest.fixture(
    scope="module",
    params=[
        ("zero2", "lora"),
        ("zero3", "full"),
        pytest.param(("zero2", "full"), marks=pytest.mark.slow),
        pytest.param(("zero3", "lora"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows: Path, half_server: Server
) -> LearnerRun:
    stage, tuner = request.param
    directory = tmp_path_factory.mktemp("runs") / f"{stage}-{tuner}"
    swift = {
        "max_steps": _NUM_STEPS,
        "tuner_type": tuner,
        "learning_rate": {"full": 1e-4, "lora": 1e-2}[tuner],
        "torch_dtype": "bfloat16",
        "bf16": True,
        "deepspeed": stage,
    }
    config = write_config(directory, rows, half_server, b_ratio=0.5, swift=swift)
    run = run_learner(config, directory, ranks=2, inject="*:1:await_packs,0:1:await_rounds")
    assert run.status == 0, run.output[-3000:]
    return run


def test_both_channels_train_every_round_is_proven_and_ranks_end_alike(run: LearnerRun) -> None:
    plans = [[(step["channel"], step["version"]) for step in run.audit(rank, "step")] for rank in (0, 1)]
    assert plans[0] == plans[1]
    assert len(plans[0]) == _NUM_STEPS
    assert {channel for channel, _ in plans[0]} == {"A", "B"}
    rounds = run.audit(0, "round")
    assert len(rounds) >= 2
    reports = [report for record in rounds for report in record["servers"].values()]
    proofs = ["checksums+canary", *["checksums"] * (len(rounds) - 1)]
    assert [(report["proof"], report["error"]) for report in reports] == [(proof, None) for proof in proofs]
    weights = [[r["weights"] for r in run.recorded(rank) if "weights" in r] for rank in (0, 1)]
    assert len(weights[0]) == 1
    assert weights[0] == weights[1]
    assert _NOTHING not in weights[0][0].values()


@pytest.fixture(scope="module")
def exports() -> list[dict[str, Any]]:
    return exports_of(_PROGRAM, ENVIRONMENT)


def test_partitioned_weights_leave_whole_and_merged_and_the_parts_stay(exports: list[dict[str, Any]]) -> None:
    for result in exports:
        assert result["partitioned"]
        assert result["num_buckets"] == 3
        assert result["announced_as_whole"]
        assert result["parts_stay"]
        assert result["still_partitioned"]
    assert exports[0]["as_merged"]


def test_gathered_weights_that_are_not_finite_are_found_in_rank_zeros_snapshot(
    exports: list[dict[str, Any]],
) -> None:
    assert "got a NaN or infinity in tensor=second.weight" in exports[0]["error"]
    assert exports[1]["error"] is None


def test_an_adapter_that_is_held_by_the_model_under_it_has_the_gradients_of_whole_weights(
    rows: Path, tmp_path: Path
) -> None:
    """Both ranks ask the reference, the one without sampled tokens too; both train with gradient checkpointing."""
    from two_rank_reference import make_trainer, pack, take_step

    environment = ENVIRONMENT | {"ROWS": str(rows), "OUTPUT": str(tmp_path / "partitioned")}
    partitioned = exports_of(_REFERENCE_PROGRAM, environment)
    trainer, encoder = make_trainer(rows, tmp_path / "whole"), make_encoder()
    whole = [take_step(trainer, pack(number, rows, encoder)) for number in (0, 1)]
    expected = {
        name: torch.tensor(gradient) + torch.tensor(whole[1]["gradients"][name])
        for name, gradient in whole[0]["gradients"].items()
    }
    assert whole[0]["divergence"] > 0 == whole[1]["divergence"]
    for result, alone in zip(partitioned, whole, strict=True):
        assert result["loss"] / 2 == pytest.approx(alone["loss"], rel=1e-5), "ms-swift counts the ranks in"
        assert result["divergence"] == pytest.approx(alone["divergence"], rel=1e-4)
        assert result["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            found, scale = torch.tensor(result["gradients"][name]), float(gradient.abs().max())
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5 * scale)
