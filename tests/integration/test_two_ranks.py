"""Two real gloo ranks on ms-swift's own trainer: plans, weights, windows, rounds, resume."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_disk import SmallDisk
from torchrun_job import LearnerRun, Server, run_learner, write_config

from swift_stage2.cli import main
from swift_stage2.runtime.run_directory import run_lock
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import read_logs

pytestmark = pytest.mark.timeout(1800)


def _plans(run: LearnerRun, rank: int) -> list[tuple[Any, ...]]:
    return [
        (record["step"], record["channel"], record["wants_b"], record["skip_reason"], record["version"])
        for record in run.audit(rank, "step")
    ]


def _weights(run: LearnerRun, rank: int) -> dict[str, str]:
    (last,) = [record["weights"] for record in run.recorded(rank) if "weights" in record]
    return last


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(60, marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param(200, marks=[pytest.mark.slow]),
    ],
)
def num_steps(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def long_run(
    tmp_path_factory: pytest.TempPathFactory, rows_file: Path, server: Server, num_steps: int
) -> LearnerRun:
    """Epochs of 6 windows, the last of which has one micro_step instead of three."""
    directory = tmp_path_factory.mktemp("runs") / "long"
    swift = {"max_steps": num_steps}
    config = write_config(
        directory, rows_file, server, b_ratio=0.3, swift=swift, trace=True, preprocessing="process"
    )
    with _followed(directory):
        # The second short window that wants B has its packs, and from the middle on rounds are not late.
        run = run_learner(config, directory, ranks=2, inject="*:23:await_packs,0:30:await_rounds")
        assert run.status == 0, run.output[-3000:]
    return run


FOLLOWED = "followed.jsonl"


@contextmanager
def _followed(directory: Path) -> Iterator[None]:
    """Around a run that has this process above it, as it has a launch: ``rollouts --follow`` beside it, to its end."""
    command = [sys.executable, "-m", "swift_stage2", "rollouts", "--follow", "--json", str(directory)]
    with run_lock(directory, "launch"), (directory / FOLLOWED).open("wb") as lines:
        follower = subprocess.Popen(command, stdout=lines, stderr=subprocess.PIPE, text=True)
        try:
            yield
        except BaseException:
            follower.kill()
            raise
    _, told = follower.communicate(timeout=180)
    assert follower.returncode == 0, told


def _check_followed(directory: Path) -> list[dict[str, Any]]:
    """The follower's lines: of every rollout that became a segment one, and no other."""
    lines = [json.loads(line) for line in (directory / FOLLOWED).read_text().splitlines()]
    assert len({line["rollout"] for line in lines}) == len(lines)
    for rank in (0, 1):
        matched = LearnerRun(0, "", directory).audit(rank, "matched")
        found = [line for line in lines if line["rank"] == rank]
        keys = [[line[name] for name in ("epoch", "position", "row", "attempt")] for line in found]
        assert keys == [sample for record in matched for sample in record["samples"]]
        for line, record in zip(found, matched, strict=True):
            quality = record["quality"]
            assert (line["version"], line["num_tokens"]) == (record["version"], record["num_rollout_tokens"])
            assert line["pairs"] + line["false"] == quality["num_predictions"]
            assert line["pairs"] + line["missed"] == quality["num_ground_truth"]
    return lines


def test_plans_are_identical_on_all_ranks(long_run: LearnerRun, num_steps: int) -> None:
    assert _plans(long_run, 0) == _plans(long_run, 1)
    assert len(_plans(long_run, 0)) == num_steps


def test_channel_b_runs_only_on_wanted_steps(long_run: LearnerRun, num_steps: int) -> None:
    steps = long_run.audit(0, "step")
    assert sum(record["wants_b"] for record in steps) == 0.3 * num_steps
    ran = [record["wants_b"] for record in steps if record["channel"] == "B"]
    assert ran
    assert all(ran)


def test_ranks_leave_torchs_groups_before_the_interpreter_ends(long_run: LearnerRun) -> None:
    for rank in (0, 1):
        assert long_run.recorded(rank)[-1] == {"left_the_job": True}


def test_weights_are_bit_equal_across_ranks(long_run: LearnerRun) -> None:
    assert _weights(long_run, 0) == _weights(long_run, 1)


def test_each_micro_step_trains_one_batch_and_short_windows_reserve_fewer_packs(long_run: LearnerRun) -> None:
    for rank in (0, 1):
        recorded = [record for record in long_run.recorded(rank) if "batch" in record]
        by_step: dict[int, list[dict[str, Any]]] = {}
        for record in recorded:
            by_step.setdefault(record["step"], []).append(record)
        assert all(len(records) == records[0]["window"] for records in by_step.values())
        assert all(len({record["channel"] for record in records}) == 1 for records in by_step.values())
        short_b = [r for r in by_step.values() if r[0]["window"] == 1 and r[0]["channel"] == "B"]
        assert short_b, "no B step fell on a short window; choose another number of rows"


def test_checksums_prove_every_round_the_canary_the_first_and_versions_only_grow(
    long_run: LearnerRun, num_steps: int
) -> None:
    rounds = long_run.audit(0, "round")
    assert [record["version"] for record in rounds] == list(range(1, len(rounds) + 1))
    assert len(rounds) >= num_steps // 10
    for index, record in enumerate(rounds):
        asked = index == 0
        proofs = {server["proof"] for server in record["servers"].values()}
        assert proofs == {"checksums+canary" if asked else "checksums"}, index
        assert (record["canary_seconds"] > 0) == asked


def test_no_stale_pack_is_trained(long_run: LearnerRun) -> None:
    for rank in (0, 1):
        lags = [record["version_lag"] for record in long_run.audit(rank, "step") if record["channel"] == "B"]
        assert lags
        assert max(lags) <= 3


def test_the_account_balances_and_holds_every_pack_that_a_step_trained(long_run: LearnerRun) -> None:
    assert main(["report", str(long_run.directory)]) == 0
    for rank in (0, 1):
        trained, sent = long_run.audit(rank, "trained"), long_run.audit(rank, "sent")
        packs = [(each["step"], each["pack_id"]) for each in trained]
        steps = long_run.audit(rank, "step")
        assert packs == [(step["step"], pack_id) for step in steps for pack_id in step["packs"]]
        places = [tuple(sample[:2]) for each in trained for sample in each["samples"]]
        assert len(places) == len(set(places)) > 0
        before = {tuple(sample[:2]) for each in sent for sample in each["samples"]}
        assert set(places) <= before


def test_the_trace_of_every_actor_tiles_its_time_and_sums_to_the_audits(long_run: LearnerRun) -> None:
    for rank in (0, 1):
        trace = json.loads((long_run.directory / "trace" / f"rank{rank}.json").read_text())
        names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        spans = [(names[e["tid"]], e) for e in trace["traceEvents"] if e["ph"] == "X"]
        last = long_run.audit(rank, "metrics")[-1]
        ends = []
        for actor, totals in (("learner", last["activity_ns"]), ("pipeline", last["pipeline_ns"])):
            intervals = [event for track, event in spans if track == actor]
            for one, following in itertools.pairwise(intervals):
                assert one["ts"] + one["dur"] == pytest.approx(following["ts"], abs=1.0)
            ends.append(intervals[-1]["ts"] + intervals[-1]["dur"])
            for activity in ("busy", "syncing", "asking", "preparing"):
                if activity in totals:
                    traced_us = sum(event["dur"] for event in intervals if event["name"] == activity)
                    assert traced_us == pytest.approx(totals[activity] / 1000, rel=1e-6, abs=1.0)
        assert ends[0] == pytest.approx(ends[1], abs=5e6), "both actors are told to the end"
        kinds = {event["name"] for _, event in spans}
        assert {
            "micro_step",
            "plan",
            "POST",
            "prepare",
            "pack",
        } <= kinds
        if rank == 0:
            assert {"canary", "snapshot", "begin", "connect", "push", "acknowledge", "prove"} <= kinds


def test_kept_matches_are_those_that_were_matched(long_run: LearnerRun) -> None:
    for rank in (0, 1):
        matches = long_run.audit(rank, "match")
        matched = long_run.audit(rank, "matched")
        told = {tuple(sample) for each in matched for sample in each["samples"]}
        kept = [tuple(record["sample"]) for record in matches]
        assert set(kept) == told, "the data set has fewer rows than are kept"
        assert all(Path(path).is_file() for record in matches for path in record["images"])
        for record in matches:
            width, height = record["space"]
            assert all(
                0 <= b[0] <= b[2] <= width and 0 <= b[1] <= b[3] <= height
                for b in (box for _, box in record["truth"])
            )
            assert all(
                p < len(record["predicted"]) and t < len(record["truth"]) for p, t, _ in record["pairs"]
            )


def test_a_follower_saw_every_rollout_of_the_run_once_with_its_answer(
    long_run: LearnerRun, server: Server
) -> None:
    lines = _check_followed(long_run.directory)
    account = account_of(read_logs([long_run.directory]))
    for rank in account.ranks:
        in_hand = sum(rank.in_hand.get(stage, 0) for stage in ("matched", "packed"))
        dropped = sum(rank.returned.get(reason, 0) for reason in ("stale", "overflow"))
        told = sum(line["rank"] == rank.rank for line in lines)
        known = rank.trained + in_hand + dropped
        # These ended before or after their match.
        others = rank.returned.get("stopped", 0) + sum(rank.quarantined.values())
        assert known <= told <= known + others
    assert {line["server"] for line in lines} == {server.base_url}
    texts = {
        (rank, *record["sample"]): record["rollout"]
        for rank in (0, 1)
        for record in long_run.audit(rank, "match")
    }
    assert texts == {
        (line["rank"], line["epoch"], line["position"], line["row"], line["attempt"]): line["text"]
        for line in lines
    }


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"quant_bits": 4, "quant_method": "bnb"}], ids=["LoRA", "QLoRA"])
def test_lora_weights_leave_merged_and_proven(
    tmp_path: Path, rows_file: Path, server: Server, more: dict[str, Any]
) -> None:
    directory = tmp_path / "lora"
    config = write_config(
        directory,
        rows_file,
        server,
        b_ratio=0.5,
        swift={"max_steps": 14, "tuner_type": "lora", "learning_rate": 1e-2, **more},
    )
    run = run_learner(config, directory, ranks=2, inject="*:1:await_packs,0:1:await_rounds")
    assert run.status == 0, run.output[-3000:]
    rounds = run.audit(0, "round")
    assert len(rounds) >= 2
    assert all(report["proven"] for record in rounds for report in record["servers"].values())
    assert any(record["channel"] == "B" for record in run.audit(0, "step"))
    assert _weights(run, 0) == _weights(run, 1)


@pytest.mark.slow
def test_resume_in_the_middle_of_an_epoch_repeats_and_skips_no_batch_of_channel_a(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    plain = tmp_path / "plain"
    reference = run_learner(
        write_config(plain, rows_file, None, b_ratio=0, swift={"max_steps": 24}), plain, ranks=2
    )
    assert reference.status == 0, reference.output[-3000:]
    first = tmp_path / "first"
    config = write_config(
        first,
        rows_file,
        server,
        b_ratio=0.5,
        swift={"max_steps": 24, "save_strategy": "steps", "save_steps": 4},
    )
    stopped = run_learner(config, first, ranks=2, inject="*:7:await_packs,1:8:SIGTERM/6")
    assert stopped.status == 0, stopped.output[-3000:]
    num_steps = len(stopped.audit(0, "step"))
    assert 9 <= num_steps < 24, "not stopped after a step of channel B"
    checkpoint = first / f"checkpoint-{num_steps}"
    assert checkpoint.is_dir(), sorted(path.name for path in first.iterdir())
    second = tmp_path / "second"
    config = write_config(
        second,
        rows_file,
        server,
        b_ratio=0.5,
        swift={"max_steps": 24, "resume_from_checkpoint": str(checkpoint)},
    )
    resumed = run_learner(config, second, ranks=2, inject="*:11:await_packs")
    assert resumed.status == 0, resumed.output[-3000:]

    steps = [record for run in (stopped, resumed) for record in run.audit(0, "step")]
    assert [record["step"] for record in steps] == list(range(24))
    for rank in (0, 1):
        read = [
            (record["step"], record["batch"])
            for run in (stopped, resumed)
            for record in run.recorded(rank)
            if record.get("channel") == "A"
        ]
        for epoch in range(4):
            order = [r["batch"] for r in reference.recorded(rank) if "batch" in r and r["step"] // 6 == epoch]
            mine = [batch for step, batch in read if step // 6 == epoch]
            assert mine == order[: len(mine)]
    versions = [record["version"] for record in steps]
    assert versions == sorted(versions)
    assert _weights(resumed, 0) == _weights(resumed, 1)
    _check_accounts(first, second)


@pytest.mark.slow
def test_after_a_kill_and_a_resume_in_the_same_directory_nothing_is_lost_or_trained_twice(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    directory = tmp_path / "run"
    swift = {"max_steps": 40, "save_strategy": "steps", "save_steps": 5}
    config = write_config(directory, rows_file, server, b_ratio=0.5, swift=swift, preprocessing="process")
    with _followed(directory):
        _kill_and_resume(config, directory, swift, rows_file, server)
    lines = _check_followed(directory)
    assert len({line["run_id"] for line in lines}) == 2


def _kill_and_resume(
    config: Path, directory: Path, swift: dict[str, Any], rows_file: Path, server: Server
) -> None:
    killed = run_learner(config, directory, ranks=2, inject="*:7:await_packs,1:8:SIGKILL/5")
    assert killed.status != 0
    latest = max(directory.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    before = account_of(read_logs([directory]))
    assert before.is_balanced
    again = swift | {"resume_from_checkpoint": str(latest)}
    config = write_config(directory, rows_file, server, b_ratio=0.5, swift=again, preprocessing="process")
    refused = run_learner(config, directory, ranks=1)
    assert refused.status != 0
    assert "a checkpoint resumes with its own world_size, got world_size=1" in refused.output
    # What was refused has spoilt nothing.
    resumed = run_learner(config, directory, ranks=2, inject="*:7:await_packs")
    assert resumed.status == 0, resumed.output[-3000:]
    assert main(["report", str(directory)]) == 0
    account = account_of(read_logs([directory]))
    assert [rank.num_resumes for rank in account.ranks] == [1, 1]
    assert all(rank.num_void > 0 for rank in account.ranks), "no B step fell between checkpoint and kill"
    assert all(rank.trained > 0 for rank in account.ranks)
    assert all(each["num_rollout_tokens"] > 0 for each in resumed.audit(0, "matched"))


def _check_accounts(first: Path, second: Path) -> None:
    """One balanced account of both runs; each on its own balances as well."""
    assert main(["report", str(first), str(second)]) == 0
    apart = [account_of(read_logs([directory])) for directory in (first, second)]
    joined = account_of(read_logs([first, second]))
    assert [account.is_balanced for account in apart] == [True, True]
    assert [rank.num_resumes for rank in joined.ranks] == [1, 1]
    assert [rank.num_void for rank in joined.ranks] == [0, 0], "the stop was agreed and saved"
    assert [rank.trained for rank in joined.ranks] == [
        before.trained + after.trained for before, after in zip(apart[0].ranks, apart[1].ranks, strict=True)
    ]


@pytest.mark.slow
def test_weights_that_cannot_be_exported_end_all_ranks_with_the_same_cause(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    directory = tmp_path / "nan"
    config = write_config(directory, rows_file, server, b_ratio=0.5, swift={"max_steps": 12})
    run = run_learner(config, directory, ranks=2, inject="0:3:nan,0:3:await_rounds")
    assert run.status != 0
    assert run.output.count("weights must be finite to be pushed") >= 2


@pytest.mark.slow
def test_an_error_that_one_rank_meets_in_its_step_ends_the_other_and_loses_no_sample(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    directory = tmp_path / "raises"
    config = write_config(directory, rows_file, server, b_ratio=0.5, swift={"max_steps": 400})
    run = run_learner(config, directory, ranks=2, inject="1:8:raise")
    assert run.status == 1
    assert "ValueError: what only rank 1 meets" in run.output
    steps = [len(run.audit(rank, "step")) for rank in (0, 1)]
    assert steps == [8, 8]  # rank 0 did not get past the decision that rank 1 never came to
    assert account_of(read_logs([directory])).is_balanced


@pytest.mark.slow
def test_a_preprocessing_process_that_is_killed_is_replaced_and_loses_no_sample(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    directory = tmp_path / "killed_preprocessing"
    config = write_config(
        directory, rows_file, server, b_ratio=0.5, swift={"max_steps": 36}, preprocessing="process"
    )
    run = run_learner(config, directory, ranks=2, inject="1:8:kill_preprocessing,*:12:await_packs/6")
    assert run.status == 0, run.output[-3000:]
    assert "was killed by SIGKILL, mostly for lack of main memory" in run.output
    assert "another one goes on" in run.output
    channels = [{step["step"]: step["channel"] for step in run.audit(rank, "step")} for rank in (0, 1)]
    assert channels[0] == channels[1]
    assert "B" in [channels[1][step] for step in range(30, 36)]
    assert account_of(read_logs([directory])).is_balanced


@pytest.mark.slow
def test_a_full_disk_under_the_event_log_ends_all_ranks_in_order_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, rows_file: Path, server: Server, small_disk: SmallDisk
) -> None:
    directory = tmp_path / "full"
    directory.mkdir()
    (directory / "events").symlink_to(small_disk.path)
    small_disk.fill(leaving_bytes=40 * 4096)
    swift: dict[str, Any] = {"max_steps": 400, "save_strategy": "steps", "save_steps": 4}
    run = run_learner(
        write_config(directory, rows_file, server, b_ratio=0.5, swift=swift), directory, ranks=2
    )
    assert run.status == 1
    # Of all ranks at a step, or of each at a checkpoint, where the log must be on the disk first.
    assert "error: every event of a run must be written, got " in run.output
    assert "No space left on device; make room there, then go on from the last checkpoint" in run.output
    before = account_of(read_logs([directory]))
    assert before.is_balanced
    assert not any(rank.has_ended for rank in before.ranks)
    latest = max(directory.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    small_disk.make_room()
    swift |= {"resume_from_checkpoint": str(latest), "max_steps": int(latest.name.split("-")[1]) + 4}
    resumed = run_learner(
        write_config(directory, rows_file, server, b_ratio=0.5, swift=swift), directory, ranks=2
    )
    assert resumed.status == 0, resumed.output[-3000:]
    account = account_of(read_logs([directory]))
    assert account.is_balanced
    assert [(rank.num_resumes, rank.has_ended) for rank in account.ranks] == [(1, True)] * 2
