from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import swift_stage2.demo
from scripts.make_stage1 import Stage1
from swift_stage2.demo.tiny_template import load_tiny_model, tiny_template

STAGE1 = Path(swift_stage2.demo.__file__).parent / "stage1"


@pytest.fixture(scope="session")
def stage1_directory() -> Path:
    return STAGE1


@pytest.fixture(scope="session")
def stage1() -> Stage1:
    return Stage1(*load_tiny_model(STAGE1))


@pytest.fixture
def template(stage1: Stage1) -> Any:
    return tiny_template(stage1.model, stage1.processor)
