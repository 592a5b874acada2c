"""A data set that ms-swift has cached holds the rows that its files held, for the trainer, channel B and the doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import config_of
from datasets import Dataset
from real_model import STAGE1, Rows, make_task
from sft_run import our_trainer
from swift.pipelines.export.cached_dataset import ExportCachedDataset

from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.checks.checks import check_data
from swift_stage2.checks.preparation import prepare_learner
from swift_stage2.config import RowsWithoutObjects
from swift_stage2.demo.tiny_template import TINY_VL
from swift_stage2.errors import DatasetError
from swift_stage2.training.stage2_trainer import _rows_of


@pytest.fixture(scope="module")
def cached(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cached") / "set"
    options = {
        "model": STAGE1, "model_type": TINY_VL, "template": TINY_VL, "dataset": rows_file, "output_dir": directory,
        "to_cached_dataset": True, "split_dataset_ratio": 0, "dataset_num_proc": 1,
        "load_from_cache_file": False,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    ExportCachedDataset(words).main()
    return directory / "train"


def test_it_is_trained_and_drawn_as_its_files_would_be(
    cached: Path, rows: Rows, rows_file: Path, tmp_path: Path
) -> None:
    def trainer(name: str, file: Path | None, **swift: Any) -> Any:
        return our_trainer(file, tmp_path / name, **swift)

    ours, files = trainer("ours", None, cached_dataset=cached), trainer("files", rows_file)
    drawn = _rows_of(ours.train_dataset)
    for name in ("messages", "objects"):
        assert [row[name] for row in drawn] == [row[name] for row in _rows_of(files.train_dataset)]
    assert len(usable_rows(drawn, make_task(), RowsWithoutObjects.REFUSE)) == len(rows)
    for name in ("input_ids", "labels"):
        assert ours.train_dataset[0][name] == files.train_dataset[0][name]


def test_the_doctor_reads_it(cached: Path, rows: Rows, rows_file: Path, tmp_path: Path) -> None:
    swift = {
        "model": str(STAGE1),
        "model_type": TINY_VL,
        "template": TINY_VL,
        "cached_dataset": [str(cached)],
    }
    train, validation = prepare_learner({**swift, "use_cpu": True}, tmp_path, with_weights=False).row_sets
    assert (len(train), len(validation)) == (len(rows), 0)
    rest = {"cached_val_dataset": [f"{cached}#2"], "dataset": []}
    found, _ = check_data(config_of({"swift": {**swift, **rest}}))
    assert found == f"{cached}; for validation {cached}#2: no local JSONL, so that no row was checked"
    both = {**swift, "dataset": [str(rows_file)]}
    assert check_data(config_of({"swift": both}))[0].endswith(f"; none of {cached}")
    with pytest.raises(
        DatasetError, match=r"^swift\.cached_dataset must name folders that exist, got .*/gone'"
    ):
        check_data(config_of({"swift": {**swift, "cached_dataset": [f"{cached}/gone"]}}))


def test_token_ids_without_messages_are_refused() -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2]], "lengths": [2]})
    with pytest.raises(
        DatasetError, match=r"^rows of a data set must have messages, got columns input_ids, lengths; "
    ):
        usable_rows(rows, make_task(), RowsWithoutObjects.REFUSE)
