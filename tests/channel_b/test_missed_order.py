"""The order of missed objects: drawn orders, and a loss that prefers none, against whole texts and all orders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from detection_task import make_task
from hypothesis import example, given, settings
from hypothesis import strategies as st
from real_model import make_encoder, rollout_of, sample_of

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.targets import AlternativeTokens, order_missed
from swift_stage2.config import MissedOrder
from swift_stage2.records import SampleKey
from swift_stage2.training.losses import cut_aux_targets, loss_with_aux_targets

Object = tuple[str, tuple[int, int, int, int]]
KEY = SampleKey(epoch=0, position=3, index=7)
ROWS: list[Object] = [("b", (5, 9, 6, 9)), ("a", (7, 1, 8, 2)), ("a", (1, 1, 2, 2)), ("c", (0, 9, 3, 9))]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    x1, y1 = draw(st.integers(0, 130)), draw(st.integers(0, 130))
    return x1, y1, x1 + draw(st.integers(0, 130)), y1 + draw(st.integers(0, 130))


OBJECTS = st.lists(
    st.tuples(st.sampled_from(["cat", "cats", "red car", "red cup", "é"]), boxes()), max_size=5
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder(packing_length=600)


def test_orders_that_are_no_draw() -> None:
    for order in (MissedOrder.GIVEN, MissedOrder.ANY):
        assert order_missed((1, 3), ROWS, order, KEY) == (1, 3)
    assert order_missed(range(4), ROWS, MissedOrder.READING, KEY) == [2, 1, 3, 0]


def test_random_is_a_permutation_that_every_attempt_draws_anew_and_a_replay_again() -> None:
    keys = [SampleKey(0, position, 7, attempt) for position in range(20) for attempt in range(5)]
    drawn = [tuple(order_missed(range(4), ROWS, MissedOrder.RANDOM, key)) for key in keys]
    assert drawn == [tuple(order_missed(range(4), ROWS, MissedOrder.RANDOM, key)) for key in keys]
    assert all(sorted(each) == [0, 1, 2, 3] for each in drawn)
    assert len(set(drawn)) > 12  # of 24; all alike with fewer would be chance of 1e-9


@settings(max_examples=60)
@given(objects=OBJECTS, share=st.floats(0, 1), dialect=st.sampled_from(["object_list", "object_map"]))
@example(
    objects=[(label, (0, 0, 0, 0)) for label in ("cat", "cats", "cat")], share=0.0, dialect="object_list"
)
def test_alternatives_are_the_first_tokens_that_differ_when_another_missed_object_is_moved_there(
    encoder: Encoder, objects: list[Object], share: float, dialect: str
) -> None:
    """Against whole answers, each tokenised from its first to its last character."""
    form, num_found = standard_template(DIALECTS[dialect]), int(share * len(objects))
    mine, offsets = encoder.tokenise(form.write(objects))
    expected = set()
    for number in range(num_found, len(objects)):
        for other in range(number + 1, len(objects)):
            moved = [*objects[:number], objects[other], *objects[number:other], *objects[other + 1 :]]
            theirs, _ = encoder.tokenise(form.write(moved))
            if theirs != mine:
                place = next(
                    i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]
                )
                expected.add((place, theirs[place]))
    found = AlternativeTokens(objects, form, offsets, encoder.tokenise).alternatives(num_found)
    assert found == tuple(sorted(expected))


def characters(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    return tuple(map(ord, text)), tuple((i, i + 1) for i in range(len(text)))


def test_alternatives_follow_their_labels_when_unsupervised_places_are_cut() -> None:
    labels = torch.tensor([[-100, -100, 7, -100, 8, 9, -100, 5]])
    pairs = torch.tensor([(2, 1), (5, 2), (5, 3), (7, 4)])
    inputs = {"labels": labels, "alternatives": pairs}

    def cut(both: dict[str, Any]) -> None:  # the rule of ms-swift's prepare_logits_to_keep for one row
        mask = both["labels"][0] != -100
        both["labels"] = torch.nn.functional.pad(both["labels"][:, mask], (1, 0), value=-100)
        both["loss_scale"] = torch.nn.functional.pad(both["loss_scale"][:, mask], (1, 0), value=0)

    cut_aux_targets(inputs, cut)
    places = inputs["alternatives"][:, 0].tolist()
    kept = [-100, 7, 8, 9, 5]
    assert [kept[place] for place in places] == [int(labels[0, place]) for place, _ in pairs]
    assert inputs["alternatives"][:, 1].tolist() == pairs[:, 1].tolist()
    assert pairs.tolist() == [[2, 1], [5, 2], [5, 3], [7, 4]], "the pack's own tensor is another step's, too"


@pytest.mark.parametrize("missed_order", [MissedOrder.GIVEN, MissedOrder.ANY])
def test_an_object_that_the_rollout_listed_twice_must_not_begin_again(missed_order: MissedOrder) -> None:
    """The target's own tokens, and those of objects that may come in its place, are not held against it."""
    truth = [("a", (1, 2, 3, 4)), ("b", (10, 20, 30, 40)), ("c", (10, 50, 30, 90)), ("a", (2, 60, 40, 80))]
    twice = [truth[0], truth[1], truth[0], ("b", (50, 50, 90, 90))]  # the last b is none of the truths
    form = standard_template(DIALECTS["object_list"])
    task = make_task(missed_order=missed_order, weighs_duplicates=True)
    rollout = rollout_of(sample_of({"objects": {"ref": [], "bbox": []}}), form.write(twice), ())
    target = task.correct(rollout, truth, characters)
    text = target.text
    begins = [text.index(form.object_at(0, each)) for each in truth[1:]]
    lead = len('{"bbox_2d": [')
    # The first coordinate of the object listed twice
    expected = [(begin + lead, ord("1")) for begin in begins]
    legal = [
        {text[place]} | {chr(t) for at, t in target.alternatives if at == place} for place, _ in expected
    ]
    # Where another object begins with 1 as well, the two differ a character later: "10" against "1,".
    shared = [
        (place + 1, ord(","))
        for (place, _), tokens in zip(expected, legal, strict=True)
        if text[place] == "1"
    ]
    expected = [pair for pair, tokens in zip(expected, legal, strict=True) if "1" not in tokens]
    assert set(target.duplicates) == {*expected, *shared}
    assert set(target.duplicates).isdisjoint(target.alternatives)
    assert make_task(missed_order=missed_order).correct(rollout, truth, characters).duplicates == ()


def test_the_gradient_is_that_of_the_probabilities_that_are_wanted_or_not() -> None:
    """Summed over what is as right as the label, less that of what was listed already."""
    logits = torch.randn(1, 4, 9, dtype=torch.float64, requires_grad=True)
    labels, scale = torch.tensor([[-100, 3, 1, 4]]), torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    following = torch.tensor([3, 1, 4, 0])
    loss = loss_with_aux_targets(
        SimpleNamespace(
            loss=torch.nn.functional.cross_entropy(logits[0], following, reduction="none") * scale,
            logits=logits,
        ),
        labels,
        alternatives=torch.tensor([(1, 5), (1, 8), (3, 0)]),
        duplicates=torch.tensor([(2, 6), (3, 7)]),
        duplicate_weight=0.5,
        num_items_in_batch=2,
        loss_scale=scale,
    )
    p = logits[0].softmax(-1)
    sums = p[0, [3, 5, 8]].sum(), p[1, 1], p[2, [4, 0]].sum()
    unlikelihood = torch.log(1 - p[1, 6]) + torch.log(1 - p[2, 7])
    expected = -sum(w * torch.log(each) for w, each in zip(scale, sums, strict=False)) - 0.5 * unlikelihood
    assert loss.item() == pytest.approx(expected.item() / 2, abs=1e-6)
    (own,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected / 2, logits)
    assert torch.allclose(own, wanted, atol=1e-6)
