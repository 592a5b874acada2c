"""Decisions of two real gloo ranks: alike on both, whatever only one of them knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from two_rank_learner import SCENARIOS, URL
from two_ranks import run_ranks

Result = dict[str, Any]
Results = list[Result]
"""Of every rank, by scenario."""
_PROGRAM = Path(__file__).with_name("two_rank_learner.py")


@pytest.fixture(scope="module")
def results() -> Results:
    """Every scenario on both ranks, in one job: starting a process costs more than all of them."""
    printed, _ = run_ranks(_PROGRAM, *SCENARIOS)
    return [json.loads(output.splitlines()[-1]) for output in printed]


@pytest.fixture(params=[0, 1])
def result(results: Results, request: pytest.FixtureRequest) -> Result:
    """Of one rank."""
    return results[request.param]


def test_ranks_with_five_and_three_packs_train_a_and_with_four_each_train_b(results: Results) -> None:
    for result in results:
        scenario = result["uneven_queues"]
        assert [step[1:3] for step in scenario["steps"]] == [["A", "not_enough_packs"], ["B", None]]
        assert scenario["packs"] == [0, 4]
    assert results[0]["uneven_queues"]["depths"] == [5, 1]
    assert results[1]["uneven_queues"]["depths"] == [3, 0]


def test_a_pipeline_that_dies_after_the_all_reduce_ends_both_ranks_at_the_next_step(result: Result) -> None:
    error = result["pipeline_dies_raise"]["error"]
    assert error.startswith("PipelineFailed at step 41")
    assert "rank 1: RuntimeError: the disk went away" in error


def test_an_event_log_that_cannot_be_written_ends_both_ranks_before_the_next_step_trains(
    result: Result,
) -> None:
    scenario = result["log_fails"]
    assert scenario["error"].startswith(
        "StorageFull: every event of a run must be written, got rank 1: events/"
    )
    assert scenario["error"].endswith("--resume")
    assert len(scenario["steps"]) == 1
    assert scenario["depth"] in (4, 8), "the packs of the step that is not taken are in the queue again"


def test_or_leaves_channel_a_alone_on_both(result: Result) -> None:
    steps = result["pipeline_dies_continue"]["steps"]
    assert len(steps) == 45
    assert [step[2] for step in steps[39:43]] == [
        "not_enough_packs", "not_enough_packs", "pipeline_failed", "pipeline_failed",
    ]  # fmt: skip


def test_weights_that_rank_zero_cannot_export_raise_the_same_error_on_both(results: Results) -> None:
    errors = {result["export_fails"]["error"] for result in results}
    assert len(errors) == 1
    assert "WeightSyncError: weights must be finite" in errors.pop()
    assert {result["export_fails"]["version"] for result in results} == {0}


def test_all_ranks_gather_every_bucket_of_weights_that_no_rank_holds_whole(results: Results) -> None:
    assert [result["gathered"] for result in results] == [{"error": None, "version": 1, "num_gathers": 4}] * 2


def test_a_bucket_that_rank_zero_alone_cannot_copy_leaves_no_rank_in_a_gather(results: Results) -> None:
    error = "WeightSyncError: rank 0: copying the weights failed: RuntimeError: no memory to merge"
    assert [result["gather_fails"] for result in results] == [
        {"error": error, "version": 0, "num_gathers": 3}
    ] * 2


def test_weights_that_are_not_finite_after_every_gather_raise_on_both(results: Results) -> None:
    first, second = (result["gathered_nan"] for result in results)
    assert first == second
    assert first["error"].startswith("WeightSyncError: weights must be finite")
    assert "tensor=2;" in first["error"]
    assert (first["version"], first["num_gathers"]) == (0, 4)


def test_a_canary_that_fails_on_one_rank_raises_the_same_on_both_before_anything_is_gathered(
    results: Results,
) -> None:
    error = "WeightSyncError: rank 1: the learner's canary failed: RuntimeError: no memory"
    assert [result["canary_fails"] for result in results] == [
        {"error": error, "version": 0, "num_gathers": 0}
    ] * 2


def test_a_server_that_fails_in_a_push_leaves_the_version_and_is_asked_by_no_rank(result: Result) -> None:
    scenario = result["server_dies"]
    assert scenario["rounds"] == [[0, 1, [0]], [3, 2, []]], "no retry before it answers again"
    assert scenario["versions"] == [[1]] * 3 + [[0]] * 7
    assert {step[3] for step in scenario["steps"]} == {1}
    assert [step[1] for step in scenario["steps"]] == ["A"] * 10
    assert scenario["asked"] == []


def test_what_one_rank_suspects_no_rank_asks(result: Result) -> None:
    assert result["one_rank_suspects"]["asked"] == [[URL], [URL], [], []]


def test_a_loss_that_rank_zero_finds_withdraws_the_server_on_both(results: Results) -> None:
    for result in results:
        assert result["a_loss_is_found"]["asked"] == [[URL], [URL], [], []]
    assert results[0]["a_loss_is_found"]["distrusted"] == [0]
    assert results[0]["a_loss_is_found"]["pushed"] == [[0, 1]], "nothing more until it answers again"


def test_a_start_that_fails_on_one_rank_fails_on_both(results: Results) -> None:
    assert [result["start_fails"]["results"] for result in results] == [[0], [1]]
    mine, others = results[1]["start_fails"]["error"], results[0]["start_fails"]["error"]
    assert mine.startswith("ConfigError: a picture cannot be read")
    assert others.startswith("UserError: rank 1: ConfigError: a picture cannot be read: ")


def test_a_rollout_in_flight_delays_the_push_to_a_server_that_must_be_drained_and_never_a_step(
    result: Result,
) -> None:
    """Barrier, sync, barrier, infer: it is asked again once it has proven the weights that it was drained for."""
    scenario = result["busy_rank"]
    assert [step[0] for step in scenario["steps"]] == list(range(9))
    assert scenario["rounds"] == [[0, 1, [0]], [7, 2, [0]]]
    assert scenario["begun"] == 2, "one more would age what is at hand"
    assert scenario["asked"] == [[URL]] * 2 + [[]] * 5 + [[URL]] * 2


def test_both_channels_train_while_weights_are_pushed_and_their_version_counts_from_the_step_after_the_proof(
    result: Result,
) -> None:
    """A server of ours is asked all the while, also where a rollout of rank 1 is in flight."""
    scenario = result["push_beside_training"]
    assert scenario["in_transfer"] == [False, False, True, True, True, True, False, False]
    assert scenario["asked"] == [[URL]] * 6
    assert scenario["versions"] == [1, 1, 1, 2, 2, 2]
    assert [step[3] for step in scenario["steps"]] == [1] * 6 + [2] * 2
    trained = ["A", "A", "B", "B", "B", "B", "A", "A"]
    assert [step[1] for step in scenario["steps"]] == trained, "then what was made before is stale"
    assert scenario["rounds"] == [[0, 1, [0]], [5, 2, [0]]]


def test_servers_that_were_absent_at_the_start_join_on_both_ranks_as_what_rank_zero_finds(
    result: Result,
) -> None:
    """Both take the version that is kept; the plain one, nowhere asked yet, is drained at once."""
    first, ours, plain = (f"http://127.0.0.1:{port}" for port in (9, 8, 7))
    scenario = result["server_joins"]
    assert scenario["versions"] == [[1, 0, 0]] * 3 + [[1, 1, 1]] * 4
    assert scenario["kinds"] == {first: [True, None], ours: [True, None], plain: [False, "tiny"]}
    assert scenario["asked"] == [first, ours, plain]
    assert scenario["rounds"] == [[0, 1, [0]], [3, 1, [1, 2]]]
    assert scenario["watched"] == []


def test_a_stop_asked_on_one_rank_is_taken_by_both_at_the_same_step(result: Result) -> None:
    assert result["stop"]["stops"][:3] == [False, False, True]


# --- evaluation: rank 0 has its four answers at once, rank 1 when the scenario says so -------------------


def test_an_evaluation_holds_the_version_until_every_rank_is_finished(result: Result) -> None:
    scenario = result["evaluation_ends"]
    assert scenario["evaluations"] == [[4, 4, 7, 1, "complete", 7]]
    assert scenario["begun"] == [0, 8], "due at 5, held until rank 1 was finished"
    assert scenario["versions"] == [1, 2], "the one that fell due at 8 has the new version"


def test_an_evaluation_is_cut_short_where_a_version_can_wait_no_longer(result: Result) -> None:
    scenario = result["evaluation_is_cut"]
    assert scenario["evaluations"] == [[4, 4, 7, 1, "round_due", 5]]
    assert scenario["begun"] == [0, 7], "due at 5, two steps later at most"


def test_an_evaluation_ends_with_the_last_server_and_begins_with_none(result: Result) -> None:
    scenario = result["evaluation_without_server"]
    assert scenario["evaluations"] == [[4, 4, 6, 1, "no_server", 4]]
    assert scenario["versions"] == [1]
    assert scenario["unfinished"] == 8


def test_an_evaluation_ends_with_training(result: Result) -> None:
    assert result["evaluation_stopped"]["evaluations"] == [[4, 4, 6, 1, "training_ends", 4]]
    assert result["evaluation_stopped"]["unfinished"] == 4, "the run that resumes begins it again"
    assert result["evaluation_at_the_end"]["evaluations"] == [[4, 4, 8, 1, "training_ends", 4]]
    assert result["evaluation_at_the_end"]["versions"] == [1]


# --- the final evaluation: six steps, an evaluation at 4 and a version at 3; the last one trains at 5 ------


def test_the_final_weights_are_proven_and_evaluated_once_and_nothing_is_produced(result: Result) -> None:
    scenario = result["final"]
    assert scenario["begun"] == [6, 3]
    assert scenario["evaluations"] == [[4, 4, 5, 2, "training_ends", 0], [6, 6, 6, 3, "complete", 8]]
    assert (scenario["demanded"], scenario["warnings"], scenario["was_once"]) == ([0], [], True)


def test_what_runs_when_training_ends_early_is_cut_for_the_final_weights(result: Result) -> None:
    scenario = result["final_after_an_early_end"]
    assert scenario["evaluations"] == [[4, 4, 5, 2, "training_ends", 0], [5, 5, 5, 3, "complete", 8]]
    assert scenario["begun"] == [5, 3]


def test_without_a_server_the_final_weights_are_a_warning(result: Result) -> None:
    scenario = result["final_without_server"]
    assert scenario["begun"] == [6, 3]
    assert scenario["versions"] == [2]
    (warning,) = scenario["warnings"]
    assert "got none began and 0 proven" in warning
    assert "within" not in warning, "nobody has waited"


def test_a_final_evaluation_that_is_too_slow_or_stopped_on_one_rank_ends_on_both(results: Results) -> None:
    for result in results:
        assert result["final_too_slow"]["evaluations"][-1] == [6, 6, 6, 3, "training_ends", 5]
        assert "got training_ends within 0.5 s and 1 proven" in result["final_too_slow"]["warnings"][0]
        assert result["final_stopped"]["versions"][:1] == [2]
        assert result["final_stopped"]["warnings"] == [], "nobody is to blame"


# --- phases ------------------------------------------------------------------------------------------


def together(results: Results, name: str) -> list[str]:
    """What both ranks have noted, in the order in which it happened; ``0`` and ``1`` are the ranks."""
    notes = [(when, f"{rank} {what}") for rank in (0, 1) for when, what in results[rank][name]["notes"]]
    return [what for _, what in sorted(notes)]


def require_turns(story: list[str], num_phases: int) -> None:
    """Nobody pushes before both have released, nobody takes back before all servers sleep, and then only they train."""
    for number in range(num_phases):
        turn = story[: 1 + max(story.index("0 take back"), story.index("1 take back"))]
        story = story[len(turn) :]
        order = [
            max(turn.index("0 release"), turn.index("1 release")),
            turn.index("0 push"),
            min((place for place, what in enumerate(turn) if " fill " in what), default=None),
            turn.index("0 sleep"),
            turn.index("0 asleep"),
            min(turn.index("0 take back"), turn.index("1 take back")),
        ]
        known = [place for place in order if place is not None]
        assert known == sorted(known), (number, turn)
        assert not any("train" in what for what in turn[turn.index("0 push") : order[-1]]), turn
    assert "0 take back" not in story


def test_servers_are_awake_while_nothing_trains_and_asleep_while_nothing_is_asked(results: Results) -> None:
    require_turns(together(results, "phases"), 3)
    for result in results:
        scenario = result["phases"]
        assert [step[1] for step in scenario["steps"]] == ["B"] * 9
        assert scenario["rounds"] == [[0, 1, [0]], [3, 2, [0]], [6, 3, [0]]]
        assert [step[3] for step in scenario["steps"]] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert [what for _, what in scenario["notes"] if "fill" in what] == ["fill 6"] * 3
        assert scenario["open"] == [[]] * 9
        assert scenario["depth"] == 0
        assert scenario["asleep"]


def test_no_server_sleeps_before_the_last_rollout_of_every_rank_has_ended(results: Results) -> None:
    story = together(results, "phases_with_a_late_rollout")
    require_turns(list(story), 2)
    ends = [place for place, what in enumerate(story) if what == "1 rollout ends"]
    sleeps = [place for place, what in enumerate(story) if what == "0 sleep"]
    assert len(ends) == len(sleeps) == 2
    assert all(end < sleep for end, sleep in zip(ends, sleeps, strict=True))


@pytest.mark.parametrize("name", ["phases_without_proof", "phases_without_sleep"])
def test_a_server_that_does_not_wake_or_sleep_is_lost_and_training_goes_on_with_what_is_ready(
    results: Results, name: str
) -> None:
    require_turns(together(results, name), {"phases_without_proof": 2, "phases_without_sleep": 1}[name])
    for result in results:
        scenario = result[name]
        assert [step[1] for step in scenario["steps"]] == ["B"] * 3 + ["A"] * 2
        assert {step[2] for step in scenario["steps"][3:]} == {"servers_suspect"}
    assert ("it said nothing" in str(results[0][name]["warnings"])) is (name == "phases_without_sleep")


def test_a_server_that_is_killed_asleep_is_woken_in_the_phase_after_it_answers(result: Result) -> None:
    scenario = result["phases_lose_a_server"]
    assert [step[1] for step in scenario["steps"]] == ["B"] * 6 + ["A"] + ["B"] * 2
    assert [step for step, _, proven in scenario["rounds"] if proven] == [0, 3, 7]


def test_a_server_that_answers_while_the_others_sleep_wakes_in_the_next_phase_with_time_to_load(
    results: Results,
) -> None:
    require_turns(together(results, "phases_joined"), 2)
    for result in results:
        assert result["phases_joined"]["rounds"] == [[0, 1, [0]], [3, 2, [0, 1]]]


def test_a_stop_in_a_phase_waits_for_no_rollout_and_leaves_the_servers_asleep(results: Results) -> None:
    require_turns(together(results, "phases_stopped"), 2)
    for result in results:
        assert [step[1] for step in result["phases_stopped"]["steps"]] == ["B"] * 4
        assert result["phases_stopped"]["asleep"]


def test_an_evaluation_wakes_the_servers_and_is_over_before_they_sleep(results: Results) -> None:
    require_turns(together(results, "phases_evaluated"), 4)
    for result in results:
        scenario = result["phases_evaluated"]
        assert [each[:2] for each in scenario["evaluations"]] == [[4, 5], [8, 8]]
        assert {each[4] for each in scenario["evaluations"]} == {"complete"}
        assert [step for step, *_ in scenario["rounds"]] == [0, 3, 5, 8]
        assert scenario["asleep"]
