"""A report becomes a page; nothing else is read."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.stage import page


def _stage(name: str, status: str = "passed", why: str = "", **figures: Any) -> dict[str, Any]:
    return {"name": name, "proves": f"what {name} shows", "status": status, "why": why, "seconds": 1.2,
            "figures": figures}  # fmt: skip


def _report(*stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"rehearsal": False, "finished": True, "seconds": 12.3, "stages": list(stages), **changes}


def test_every_stage_has_a_row_with_what_it_shows_or_why_not() -> None:
    text = page(_report(_stage("a"), _stage("b", "failed", "it broke"), _stage("c", "skipped", "needs d")))
    assert "1 passed, 1 failed, 1 skipped; 12 s in all." in text
    assert "| a | passed | 1 | what a shows |" in text
    assert "| b | failed | 1 | it broke |" in text
    assert "| c | skipped | 1 | needs d |" in text


def test_every_figure_stands_under_the_name_of_the_device() -> None:
    text = page(_report(_stage("machine", device="NVIDIA X"), _stage("a", speed_gib_per_s=12.34567)))
    assert text.startswith("# GPU check: NVIDIA X\n")
    assert "## a, on NVIDIA X\n" in text
    assert "| speed_gib_per_s | 12.35 |" in text


def test_a_rehearsal_and_an_interruption_are_said() -> None:
    text = page(_report(_stage("a"), rehearsal=True, finished=False))
    assert "No figure on this page says anything about a GPU." in text
    assert "The check was interrupted; later stages are missing." in text


def test_a_word_that_would_end_a_cell_does_not() -> None:
    assert "| a | failed | 1 | x \\| y |" in page(_report(_stage("a", "failed", "x | y")))
