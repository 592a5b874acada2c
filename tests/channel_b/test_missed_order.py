"""The order of missed objects: drawn orders, and a loss that prefers none, against whole texts and all orders."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from detection_task import make_task
from hypothesis import example, given, settings
from hypothesis import strategies as st
from real_model import make_encoder, rollout_of, sample_of

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_pack
from swift_stage2.channel_b.targets import AlternativeTokens, order_missed
from swift_stage2.config import MissedOrder
from swift_stage2.records import MatchQuality, SampleKey, Target
from swift_stage2.training.losses import cut_beside_labels, loss_beside_labels

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


def test_given_and_any_keep_the_rows_order() -> None:
    assert all(order_missed(ROWS, order, KEY) == ROWS for order in (MissedOrder.GIVEN, MissedOrder.ANY))


def test_reading_goes_down_and_then_right() -> None:
    boxes = [box for _, box in order_missed(ROWS, MissedOrder.READING, KEY)]
    assert boxes == [(1, 1, 2, 2), (7, 1, 8, 2), (0, 9, 3, 9), (5, 9, 6, 9)]


def test_random_is_a_permutation_that_every_attempt_draws_anew_and_a_replay_again() -> None:
    keys = [SampleKey(0, position, 7, attempt) for position in range(20) for attempt in range(5)]
    drawn = [tuple(order_missed(ROWS, MissedOrder.RANDOM, key)) for key in keys]
    assert drawn == [tuple(order_missed(ROWS, MissedOrder.RANDOM, key)) for key in keys]
    assert all(sorted(each) == sorted(ROWS) for each in drawn)
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


def model(prefix: Sequence[int]) -> torch.Tensor:
    """Logits over characters that depend on everything written so far."""
    generator = np.random.default_rng(list(prefix) or [1])
    return torch.from_numpy(generator.normal(size=128) * 3)


def log_prob_of_answer(ids: Sequence[int]) -> float:
    return math.fsum(float(torch.log_softmax(model(ids[:i]), 0)[ids[i]]) for i in range(1, len(ids)))


def losses_of_answer(ids: Sequence[int], alternatives: Sequence[tuple[int, int]]) -> float:
    logits = torch.stack([model(ids[: i + 1]) for i in range(len(ids))])
    labels = torch.tensor([[-100, *ids[1:]]])
    following = torch.tensor([*ids[1:], 0])
    scale = torch.tensor([1.0] * (len(ids) - 1) + [0.0], dtype=torch.float64)
    plain = torch.nn.functional.cross_entropy(logits, following, reduction="none") * scale
    loss = loss_beside_labels(
        SimpleNamespace(loss=plain, logits=logits[None]),
        labels,
        alternatives=torch.tensor(alternatives).reshape(-1, 2),
        num_items_in_batch=1,
        loss_scale=scale,
    )
    return float(loss)


@pytest.mark.parametrize("num_found", [0, 1])
def test_the_loss_bounds_the_probability_of_the_set_over_all_orders(num_found: int) -> None:
    """Drawn as the model itself chooses among what is left, exp(-loss) averages to the probability of the set.

    So the mean loss is at least -log of it (Jensen), and equal where no order's loss differs.
    """
    objects: list[Object] = [
        ("a", (1, 2, 3, 4)),
        ("ab", (1, 2, 3, 5)),
        ("a", (1, 2, 4, 4)),
        ("b", (2, 2, 3, 4)),
    ]
    form = standard_template(DIALECTS["object_list"])
    chosen, losses, log_probs = [], [], []
    for order in permutations(objects[num_found:]):
        listed = [*objects[:num_found], *order]
        ids, offsets = characters(form.write(listed))
        alternatives = AlternativeTokens(listed, form, offsets, characters).alternatives(num_found)
        losses.append(losses_of_answer(ids, alternatives))
        log_probs.append(log_prob_of_answer(ids))
        chosen.append(math.exp(log_probs[-1] + losses[-1]))
    assert math.fsum(chosen) == pytest.approx(1, abs=1e-4)  # the loss gathers gaps in float32
    of_set = -float(np.logaddexp.reduce(log_probs))
    mean_loss = math.fsum(p * loss for p, loss in zip(chosen, losses, strict=True))
    assert of_set <= mean_loss
    assert min(losses) < of_set < max(losses)


def test_the_gradient_is_that_of_the_summed_probability() -> None:
    logits = torch.randn(1, 4, 9, dtype=torch.float64, requires_grad=True)
    labels, scale = torch.tensor([[-100, 3, 1, 4]]), torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    pairs = torch.tensor([(1, 5), (1, 8), (3, 0)])
    following = torch.tensor([3, 1, 4, 0])
    plain = torch.nn.functional.cross_entropy(logits[0], following, reduction="none") * scale
    loss = loss_beside_labels(
        SimpleNamespace(loss=plain, logits=logits),
        labels,
        alternatives=pairs,
        num_items_in_batch=2,
        loss_scale=scale,
    )
    probabilities = logits[0].softmax(-1)
    sums = probabilities[0, [3, 5, 8]].sum(), probabilities[1, 1], probabilities[2, [4, 0]].sum()
    expected = -sum(w * torch.log(p) for w, p in zip(scale, sums, strict=False)) / 2
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    (mine,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_alternatives_stay_with_their_tokens_in_a_pack(encoder: Encoder, rows: list[dict[str, Any]]) -> None:
    drawn = random.Random(0)
    segments, expected, start = [], [], 0
    for number, row in enumerate(rows[:3]):
        prompt = encoder.encode_prompt(sample := sample_of(row, number))
        ids, weights = tuple(drawn.choices(range(270, 400), k=9)), (0.0, *[1.0] * 8)
        pairs = () if number == 1 else ((0, 401), (2, 402 + number), (7, 410))
        target = Target("", ids, weights, MatchQuality(0, 0, 0, 0.0, 0, 0), alternatives=pairs)
        rollout = rollout_of(sample, "", prompt.token_ids)
        segments.append(encoder.encode_segment(rollout, prompt, [(target, 1.0)]))
        begin = start + len(prompt.token_ids)
        expected += [[begin + place, token] for place, token in pairs if weights[place]]
        start += segments[-1].num_tokens
    batch = make_pack("p", segments, encoder, 600).batch
    assert batch["alternatives"].tolist() == expected
    assert all(batch["labels"][0, place] != -100 for place, _ in expected)
    assert "alternatives" not in make_pack("q", segments[1:2], encoder, 600).batch


def test_alternatives_follow_their_labels_when_unsupervised_places_are_cut() -> None:
    labels = torch.tensor([[-100, -100, 7, -100, 8, 9, -100, 5]])
    pairs = torch.tensor([(2, 1), (5, 2), (5, 3), (7, 4)])
    inputs = {"labels": labels, "alternatives": pairs}

    def cut(both: dict[str, Any]) -> None:  # the rule of ms-swift's prepare_logits_to_keep for one row
        mask = both["labels"][0] != -100
        both["labels"] = torch.nn.functional.pad(both["labels"][:, mask], (1, 0), value=-100)
        both["loss_scale"] = torch.nn.functional.pad(both["loss_scale"][:, mask], (1, 0), value=0)

    cut_beside_labels(inputs, cut)
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


def test_a_duplicate_costs_the_log_of_what_is_left_beside_it() -> None:
    logits = torch.randn(1, 3, 6, dtype=torch.float64)
    labels, scale = torch.tensor([[-100, 3, 1]]), torch.tensor([2.0, 0.5, 0.0], dtype=torch.float64)
    plain = torch.nn.functional.cross_entropy(logits[0], torch.tensor([3, 1, 0]), reduction="none") * scale
    probabilities = logits[0].softmax(-1)
    loss = loss_beside_labels(
        SimpleNamespace(loss=plain, logits=logits),
        labels,
        loss_scale=scale,
        num_items_in_batch=2,
        duplicates=torch.tensor([(1, 5), (2, 0)]),
        duplicate_weight=0.5,
    )
    unlikelihood = math.log(1 - probabilities[0, 5]) + math.log(1 - probabilities[1, 0])
    expected = (float(plain.sum()) - 0.5 * unlikelihood) / 2
    assert float(loss) == pytest.approx(expected, abs=1e-6)
