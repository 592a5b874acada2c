"""Pictures of evaluations for W&B and trackio: who gets them, and what becomes of one that fails.

Stand-ins have the two calls of the real ones, which no environment of the tests has.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from swift_stage2.training.picture_reports import PictureReports

PICTURES = {"row0": b"one", "row16": b"two"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """A module of that name; what is logged to it: pictures as the content of their files while ``log`` runs."""

    def make(name: str, error: Exception | None = None) -> list[dict[str, Any]]:
        logged: list[dict[str, Any]] = []

        def log(values: dict[str, Any]) -> None:
            if error is not None:
                raise error
            logged.append({key: v.read_bytes() if isinstance(v, Path) else v for key, v in values.items()})

        stand_in: Any = ModuleType(name)
        stand_in.Image, stand_in.log = Path, log
        monkeypatch.setitem(sys.modules, name, stand_in)
        return logged

    return make


def reports(*kinds: type) -> PictureReports | None:
    return PictureReports.of([kind.__new__(kind) for kind in kinds])


def test_a_run_that_reports_to_both_shows_pictures_in_both(module: Callable[..., Any]) -> None:
    wandb, trackio = module("wandb"), module("trackio")
    found = reports(TensorBoardCallback, TrackioCallback, WandbCallback)
    assert found is not None
    found(12, PICTURES)
    expected = {"eval/pictures/row0": b"one", "eval/pictures/row16": b"two", "train/global_step": 12}
    assert wandb == trackio == [expected]


def test_what_takes_no_picture_is_told_once_and_the_other_goes_on(
    module: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    module("wandb", RuntimeError("no network"))
    trackio = module("trackio")
    found = reports(WandbCallback, TrackioCallback)
    assert found is not None
    with caplog.at_level(logging.WARNING):
        found(12, PICTURES)
        found(24, PICTURES)
    assert [record.getMessage() for record in caplog.records] == [
        "wandb takes no pictures of evaluations: RuntimeError: no network"
    ]
    assert [each["train/global_step"] for each in trackio] == [12, 24]
