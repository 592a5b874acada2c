from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import swift_stage2.demo
from swift_stage2.demo.make_stage1 import Detector, load_detector
from swift_stage2.demo.tiny_template import tiny_template

STAGE1 = Path(swift_stage2.demo.__file__).parent / "stage1"


@pytest.fixture(scope="session")
def stage1_directory() -> Path:
    return STAGE1


@pytest.fixture(scope="session")
def stage1() -> Detector:
    return load_detector(STAGE1)


@pytest.fixture
def template(stage1: Detector) -> Any:
    return tiny_template(stage1.model, stage1.processor)
