"""Every row exactly once per epoch over all ranks, and no sample lost or doubled, also across a resume."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from data.row_files import make_row
from detection_task import make_task
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_stage2.channel_b.sample_source import RowOrigins, SampleSource, usable_rows
from swift_stage2.config import RowsWithoutObjects
from swift_stage2.errors import DatasetError, SampleError
from swift_stage2.records import ReturnReason, SampleKey

NUM_ROWS = 7


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {"id": number, "objects": {"ref": [f"label {number}"], "bbox": [[0, 0, number, number]]}}
        for number in range(count)
    ]


def _source(count: int = NUM_ROWS, *, rank: int = 0, world_size: int = 1, seed: int = 3) -> SampleSource:
    return SampleSource(_rows(count), make_task(), rank=rank, world_size=world_size, seed=seed)


def _settle(source: SampleSource, keys: Sequence[SampleKey]) -> None:
    source.settle_trained(keys, pack_id="p", step=0, version=1)


def _epoch(source: SampleSource, epoch: int) -> list[int]:
    """The row numbers of one epoch, drawn to its end."""
    indices: list[int] = []
    while True:
        state = source.state_dict()
        (key,) = source.draw(1)
        if key.epoch > epoch:
            source.load_state_dict(state)
            return indices
        indices.append(key.index)
        _settle(source, [key])


@given(count=st.integers(1, 40), world_size=st.integers(1, 5), seed=st.integers(0, 2**40))
@settings(max_examples=60)
def test_every_row_comes_exactly_once_per_epoch_over_all_ranks(
    count: int, world_size: int, seed: int
) -> None:
    world_size = min(world_size, count)
    sources = [_source(count, rank=rank, world_size=world_size, seed=seed) for rank in range(world_size)]
    for epoch in range(2):
        shares = [_epoch(source, epoch) for source in sources]
        assert sorted(index for share in shares for index in share) == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    st.lists(st.booleans(), min_size=4, max_size=30).filter(lambda flags: sum(flags) >= 3), st.integers(1, 3)
)
@settings(max_examples=60)
def test_rows_without_objects_are_as_if_they_were_not_there(flags: list[bool], world_size: int) -> None:
    """Positions, shards, epochs and state are those of the data set without them; only rows keep their numbers."""
    rows = [
        row if flag else {"id": row["id"], "objects": None}
        for row, flag in zip(_rows(len(flags)), flags, strict=True)
    ]
    usable = usable_rows(rows, make_task(), RowsWithoutObjects.CHANNEL_A_ONLY)
    assert list(usable) == [number for number, flag in enumerate(flags) if flag]
    for rank in range(world_size):
        source = SampleSource(rows, make_task(), rank=rank, world_size=world_size, seed=5, usable=usable)
        others_left_out = SampleSource(
            [rows[number] for number in usable], make_task(), rank=rank, world_size=world_size, seed=5
        )
        num_draws = 2 * len(usable) + 1
        drawn, expected = source.draw(num_draws), others_left_out.draw(num_draws)
        assert drawn == [key._replace(index=usable[key.index]) for key in expected]
        assert [source.read(key).key for key in drawn] == drawn
        state, expected_state = source.state_dict(), others_left_out.state_dict()
        outstanding = [[*key[:2], usable[key[2]], key[3]] for key in expected_state["outstanding"]]
        assert state == expected_state | {"outstanding": outstanding}
        assert state["num_rows"] == len(usable), "what a report counts positions by"
        resumed = SampleSource(rows, make_task(), rank=rank, world_size=world_size, seed=5, usable=usable)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state


def test_epochs_differ_in_order_and_runs_with_one_seed_do_not() -> None:
    source, again, other = _source(50), _source(50), _source(50, seed=4)
    first, second = _epoch(source, 0), _epoch(source, 1)
    assert first != second
    assert first != sorted(first)
    assert [_epoch(again, 0), _epoch(again, 1)] == [first, second]
    assert _epoch(other, 0) != first


def test_a_settled_sample_cannot_come_back() -> None:
    source = _source()
    keys = source.draw(2)
    _settle(source, keys[:1])
    source.give_back(keys, ReturnReason.FAILED)
    assert len(source.state_dict()["outstanding"]) == 1
    assert [key.position for key in source.draw(2)] == [1, 2]


def test_bad_rows_are_told_with_their_key_and_stay_outstanding() -> None:
    rows = _rows(3)
    rows[1] = {"objects": {"ref": ["x"], "bbox": [[5, 0, 1, 1]]}}
    source = SampleSource(rows, make_task(), rank=0, world_size=1, seed=0)
    drawn = {key.index: key for key in source.draw(3)}
    with pytest.raises(SampleError, match="0 <= x1 <= x2"):
        source.read(drawn[1])
    assert [source.read(drawn[n]).key.index for n in (0, 2)] == [0, 2]
    assert len(source.state_dict()["outstanding"]) == 3


def test_fewer_rows_than_ranks_are_refused() -> None:
    with pytest.raises(DatasetError, match="num_rows=2 world_size=3"):
        _source(2, world_size=3)
    with pytest.raises(DatasetError, match=r"num_rows=2 \(of 7; the others list no objects\) world_size=3"):
        SampleSource(_rows(7), make_task(), rank=0, world_size=3, seed=0, usable=(1, 4))


@pytest.mark.parametrize("name", ["num_rows", "world_size", "seed", "stream", "num_generations"])
def test_a_checkpoint_of_another_stream_is_refused(name: str) -> None:
    state = _source().state_dict()
    for saved in ({**state, name: 4}, {key: value for key, value in state.items() if key != name}):
        wanted = f"the same {name} as the checkpoint, got {name}={state[name]}, checkpoint {name}={saved.get(name)}"
        with pytest.raises(DatasetError, match=wanted):
            _source().load_state_dict(saved)


def _channel_a(count: int, rank: int, world_size: int, seed: int, epoch: int) -> list[int]:
    """One epoch's rows of a rank as ms-swift's own sampler orders them."""
    from swift.dataloader import BatchSamplerShard

    class OfRank(BatchSamplerShard):  # the real one asks torch.distributed
        @property
        def rank(self) -> int:
            return rank

        @property
        def world_size(self) -> int:
            return world_size

    sampler = OfRank(count, batch_size=1, shuffle=True, drop_last=False, data_seed=seed)
    sampler.set_epoch(epoch)
    return [index for batch in sampler for index in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [640, 641, 643, 997])
@pytest.mark.parametrize("seed", [0, 42])
def test_channel_b_draws_another_stream_than_channel_a(count: int, world_size: int, seed: int) -> None:
    """Neither the same row at the same place, nor within a few places, nor the same share of a rank."""
    for rank in range(world_size):
        source = _source(count, rank=rank, world_size=world_size, seed=seed)
        for epoch in range(3):
            b_rows = _epoch(source, epoch)
            for a_epoch in range(4):
                a_rows = _channel_a(count, rank, world_size, seed, a_epoch)
                shared = len(set(a_rows) & set(b_rows)) / len(b_rows)
                assert abs(shared - 1 / world_size) < 0.15
                for shift in range(-3, 4):
                    pairs = zip(a_rows[max(shift, 0) :], b_rows[max(-shift, 0) :], strict=False)
                    # Independent orders: Poisson with mean 1 or less
                    assert sum(a == b for a, b in pairs) <= 12


# --- a row that ms-swift concatenated, sampled and shuffled is still known by its file and line ---------


def _row_of(number: int, image: str) -> dict[str, Any]:
    return make_row(image, boxes=[[number, 2, number + 3, 4.5]])


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files with a blank line behind every row."""
    return [
        _write(tmp_path / f"{name}.jsonl", [_row_of(number, f"/{name}/{number}.png") for number in range(40)])
        for name in "ab"
    ]


@pytest.mark.usefixtures("template")  # declares what ms-swift imports on a machine without a GPU
def test_rows_of_ms_swift_are_found(files: list[Path]) -> None:
    from swift.dataset import load_dataset

    places = [f"{files[0]}#30", str(files[1])]
    train, validation = load_dataset(
        places, split_dataset_ratio=0.2, shuffle=True, seed=3, load_from_cache_file=False, num_proc=1
    )
    origins = RowOrigins(files)
    found = [(row, origins.find(row)) for rows in (train, validation) for row in rows]
    assert len(found) == 70
    for row, origin in found:
        path = Path(row["images"][0]["path"])
        assert origin.file == str(files["ab".index(path.parent.name)])
        assert origin.line == 2 * int(path.stem) + 1
        assert origin.images == (str(path),)
    assert [origin.line for _, origin in found] != sorted(origin.line or 0 for _, origin in found)


def test_the_same_row_twice_is_told_by_its_first_line(tmp_path: Path) -> None:
    rows = [_row_of(number % 3, "/a.png") for number in range(9)]
    origins = RowOrigins([_write(tmp_path / "a.jsonl", rows)])
    assert [origins.find(row).line for row in rows] == [1, 3, 5] * 3


def test_what_is_in_no_file_is_told_without_a_line(files: list[Path]) -> None:
    origin = RowOrigins(files).find(_row_of(99, "/c.png"))
    assert (origin.file, origin.line, origin.images) == (None, None, ("/c.png",))
    assert str(origin) == "a row of no local JSONL, image /c.png"
    assert str(RowOrigins(files).find(_row_of(7, "/a/7.png"))) == f"{files[0]}:15, image /a/7.png"
    assert RowOrigins([files[0].with_name("absent.jsonl")]).find({}).line is None


def test_lines_that_are_no_rows_move_no_number(tmp_path: Path) -> None:
    rows = [json.dumps(_row_of(number, "/a.png")) for number in range(3)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["{", rows[0], "", "[1]", rows[1], "\xff", rows[2]]), encoding="latin-1")
    origins = RowOrigins([path])
    lines = [origins.find(json.loads(row)).line for row in random.Random(1).sample(rows, 3)]
    assert sorted(line or 0 for line in lines) == [2, 5, 7]
