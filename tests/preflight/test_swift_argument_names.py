"""Arguments for ms-swift, in section ``swift`` and among servers' ``args``, looked at before anything slow starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_stage2.preflight.swift_parsing import main


def test_every_example_writes_only_what_ms_swift_can_read() -> None:
    for file in (Path(__file__).parents[2] / "configs").glob("*.yaml"):
        assert main(str(file)) == 0


@pytest.mark.parametrize(
    ("swift", "server", "told"),
    [
        ("{learnin_rate: 1}", "{}", "unknown key 'learnin_rate' in section swift; did you mean 'learning_rate'?"),
        ("{learning_rate: much}", "{}", "section swift: argument --learning_rate/--learning-rate: invalid float"),
        (
            "{}",
            "{engine: vllm, args: {vllm_gpu_memory_utilizaton: 0.5}}",
            "launch.servers[0].args, got 'vllm_gpu_memory_utilizaton'; did you mean 'vllm_gpu_memory_utilization'?",
        ),
        ("{}", "{engine: swift, args: {vllm-max-model-lens: 9}}", "did you mean 'vllm_max_model_len'?"),
        ("{}", "{args: {vllm_max_model_len: long}}", "ms-swift refuses launch.servers[0].args: argument --vllm_max"),
    ],
)  # fmt: skip
def test_the_program_says_it_in_one_line(
    swift: str, server: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"swift: {swift}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
        f"rollout: {{servers: [{{base_url: 'http://h:1'}}]}}\nlaunch: {{servers: [{server}]}}\n"
    )
    assert main(str(file)) == 2
    out = capsys.readouterr().out
    assert told in out
    assert out.count("\n") == 1


def test_options_of_our_own_transformers_server_are_not_ms_swifts_to_know(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "stage2_ab: {schedule: {b_ratio: 0}}\nrollout: {servers: [{base_url: 'http://h:1'}]}\n"
        "launch: {servers: [{engine: transformers, args: {max-batch-size: 64}}]}\n"
    )
    assert main(str(file)) == 0
