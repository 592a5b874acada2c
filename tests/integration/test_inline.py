"""Mode inline on two ranks with the real trainer and server: nothing is out while a step trains, no B step is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from torchrun_job import LearnerRun, Server, run_learner, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_NUM_STEPS = 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, server: Server) -> LearnerRun:
    directory = tmp_path_factory.mktemp("runs") / "inline"
    path = write_config(directory, rows_file, server, b_ratio=0.5, swift={"max_steps": _NUM_STEPS})
    config = yaml.safe_load(path.read_text())
    config["stage2_ab"]["mode"] = "inline"
    path.write_text(yaml.safe_dump(config))
    run = run_learner(path, directory, ranks=2)
    assert run.status == 0, run.output[-3000:]
    return run


@pytest.mark.parametrize("rank", [0, 1])
def test_every_wanted_step_waits_for_its_packs_and_none_for_what_it_does_not_train(
    run: LearnerRun, rank: int
) -> None:
    steps = run.audit(rank, "step")
    assert [step["channel"] for step in steps] == ["A", "B"] * (_NUM_STEPS // 2)
    assert {step["infer_in_flight"] for step in steps} == {0}
    assert not any(step["version_in_transfer"] or step["version_pending"] for step in steps)
    assert {step["version_lag"] for step in steps if step["channel"] == "B"} <= {0, 1}


def test_rounds_are_proven_before_the_step_that_begins_them_trains(run: LearnerRun) -> None:
    rounds = run.audit(0, "round")
    assert [record["step"] for record in rounds] == [0, 4, 8]
    assert all(report["proven"] for record in rounds for report in record["servers"].values())
