"""Deletion and insertion curves on a model that is known to look at certain tokens."""

import itertools

import pytest
import torch
from torch import nn

from studies.deletion.curves import (
    area_under,
    black,
    blurred,
    deletion_curve,
    insertion_curve,
    mean_colour,
    whole_token_shares,
)
from tolerances import assert_close

SHARES = [0, 0.25, 0.5, 0.75, 1]
WEIGHTS = torch.tensor([[0.0, 3.0], [1.0, 2.0]])  # of the four tokens
BLACK = torch.zeros(())


class Known(nn.Module):
    """Two classes; the logit of class 1 is the weighted sum of the 2 × 2 patches' means."""

    def forward(self, images):
        means = nn.functional.avg_pool2d(images.float().mean(1, keepdim=True), 4)
        logit = (means.squeeze(1) * WEIGHTS).sum((1, 2))
        return torch.stack([torch.zeros_like(logit), logit], dim=1)


@pytest.fixture
def model():
    return Known().train()


def white(count=1):
    return torch.ones(count, 3, 8, 8)


def ones(count=1):
    return torch.ones(count, dtype=torch.int64)


def test_curves_are_those_of_the_tokens_left(model):
    maps = WEIGHTS[None]  # removes logits of 3, 2, 1, 0 of 6
    deleted = deletion_curve(model, white(), ones(), maps, SHARES, fill=BLACK)
    inserted = insertion_curve(model, white(), ones(), maps, SHARES, fill=BLACK)
    assert (deleted.shape, deleted.dtype) == ((1, 5), torch.float32)
    assert_close(deleted[0], torch.tensor([6.0, 3, 1, 0, 0]).sigmoid(), 1e-6)
    assert_close(inserted[0], torch.tensor([0.0, 3, 5, 6, 6]).sigmoid(), 1e-6)
    of_other_class = deletion_curve(model, white(), ones() - 1, maps, SHARES, fill=BLACK)
    assert_close(of_other_class, 1 - deleted, 1e-6)


def test_no_order_beats_the_true_one_and_none_is_worse_than_its_reverse(model):
    orders = torch.tensor(list(itertools.permutations(range(4))), dtype=torch.float32)
    maps = orders.view(-1, 2, 2)
    images, labels = white(len(maps)), ones(len(maps))
    areas = {}
    for curve in (deletion_curve, insertion_curve):
        heights = curve(model, images, labels, maps, SHARES, fill=BLACK, batch_size=7)
        areas[curve] = area_under(heights, SHARES)
    best = int((maps == WEIGHTS).all((1, 2)).nonzero())
    reverse = int((maps == 3 - WEIGHTS).all((1, 2)).nonzero())
    assert areas[deletion_curve].argmin() == best
    assert areas[deletion_curve].argmax() == reverse
    assert areas[insertion_curve].argmax() == best
    assert areas[insertion_curve].argmin() == reverse


def test_each_image_has_its_own_map_label_and_fill(model):
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 0, 1])
    maps = torch.rand(5, 2, 2, generator=torch.Generator().manual_seed(1))
    fill = mean_colour(images)
    for curve in (deletion_curve, insertion_curve):
        together = curve(model, images, labels, maps, SHARES, fill=fill, batch_size=3)
        for place in range(5):
            one = slice(place, place + 1)
            alone = curve(model, images[one], labels[one], maps[one], SHARES, fill=fill[one])
            assert_close(together[one], alone, 1e-6)
    whole = torch.stack([Known()(images).softmax(1), Known()(fill.expand(images.shape)).softmax(1)])
    whole = whole.gather(2, labels.expand(2, -1)[..., None]).squeeze(2)
    assert_close(together[:, [-1, 0]].T, whole, 1e-6)  # inserted


def test_equal_scores_are_in_a_random_order_of_each_image(model):
    count = 4_000
    maps = torch.zeros(count, 2, 2)

    def removed(seed, maps=maps):
        """The logit [count] that the first removed token had."""
        images, labels = white(len(maps)), ones(len(maps))
        curve = deletion_curve(
            *(model, images, labels, maps, [0, 0.25]), fill=BLACK, seed=seed, batch_size=count
        )
        return (6 - curve[:, 1].logit()).round()

    first = removed(0)
    assert torch.equal(first, removed(0))
    assert torch.equal(first[:9], removed(0, maps[:9]))  # whatever the number of images
    assert not torch.equal(first, removed(1))
    for weight in range(4):  # five standard deviations of 4,000 draws
        assert abs((first == weight).float().mean() - 0.25) < 0.035
    some = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).expand(count, 2, 2)
    assert set(removed(0, some).tolist()) == {2, 3}


def test_model_and_images_stay_as_they_were(model):
    images, maps = white(2), torch.rand(2, 2, 2)
    before = images.clone(), maps.clone()
    model.layer = nn.Dropout(0.5)
    model.layer.eval()
    for curve in (deletion_curve, insertion_curve):
        for fill in (mean_colour(images), blurred(images, 2), black(images, [0.5] * 3, [0.5] * 3)):
            heights = curve(model, images, ones(2), maps, SHARES, fill=fill)
            assert not heights.requires_grad
    assert torch.equal(images, before[0])
    assert torch.equal(maps, before[1])
    assert model.training
    assert not model.layer.training


def test_no_pass_is_larger_than_the_batch(model):
    sizes = []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    deletion_curve(model, white(3), ones(3), torch.rand(3, 2, 2), SHARES, fill=BLACK, batch_size=4)
    assert sizes == [4, 4, 4, 3]


@pytest.mark.parametrize(
    ("side", "tokens", "step", "first", "last"),
    [
        (36, 3, 16, 16, 4),  # the model pads to 48
        (65, 3, 32, 32, 1),
        (32, 15, 2, 2, 4),  # overlapping patches: the last token has what is left
        (8, 2, None, 4, 4),
    ],
)
def test_tokens_are_as_many_pixels_as_the_step_of_the_model(side, tokens, step, first, last):
    passed, model = [], nn.Module()
    model.forward = lambda images: passed.append(images) or torch.zeros(len(images), 2)
    maps = torch.zeros(2, tokens, 2)
    maps[0, 0, 0] = maps[1, -1, 0] = 1
    patch = None if step is None else (step, 4)
    arguments = (model, torch.ones(2, 3, side, 8), ones(2), maps, [0, 1 / maps[0].numel()])
    for curve, shown in ((deletion_curve, 0), (insertion_curve, 1)):
        curve(*arguments, fill=torch.tensor(0.0), patch=patch)
        own = (passed.pop()[[1, 3], 0] == shown).int()  # of each image, with one token marked
        assert own.sum((1, 2)).tolist() == [4 * first, 4 * last]
        assert own[0, :first, :4].all()
        assert own[1, -last:, :4].all()


def test_area():
    areas = area_under(torch.tensor([[1.0, 0.0], [0.2, 0.6]]), [0, 1])
    assert areas.tolist() == pytest.approx([0.5, 0.4])
    line = torch.tensor([0.9, 0.8, 0.5, 0.4])
    assert area_under(line, [0.1, 0.2, 0.5, 0.6]).item() == pytest.approx(0.65)  # any spacing
    assert area_under(torch.tensor([1.0, 0, 0]), [0, 0.2, 1]).item() == pytest.approx(0.1)


def test_shares_are_of_whole_tokens():
    assert whole_token_shares(36, 11)[:4] == [0, 4 / 36, 7 / 36, 11 / 36]
    assert whole_token_shares(64, 9) == [count / 64 for count in range(0, 65, 8)]
    assert whole_token_shares(2, 11) == [0, 0.5, 1]


def test_fills():
    images = torch.zeros(2, 3, 6, 12)
    images[0, 1, :, :6] = 1
    assert mean_colour(images)[:, :, 0, 0].tolist() == [[0, 0.5, 0], [0, 0, 0]]
    blur = blurred(images, 2)
    assert blur.shape == images.shape
    at_the_edge = blur[0, 1, 0][[0, 5, 6, 11]].tolist()
    assert at_the_edge == pytest.approx([0.996, 0.6, 0.4, 0.004], abs=3e-3)
    assert blur[0, 1].diff(dim=0).abs().max() < 1e-6  # no change along the height
    assert blur[[0, 1], [0, 1]].abs().max() == 0
    normalised = (torch.zeros(1, 3, 1, 1) - 0.4) / 0.2
    assert_close(black(images, [0.4] * 3, [0.2] * 3), normalised, 1e-6)
    for fill in (mean_colour, lambda x: blurred(x, 2), lambda x: black(x, [0] * 3, [1] * 3)):
        assert fill(images.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": torch.ones(3, 8, 8)}, r"images must be \[B, C, H, W\]"),
        ({"images": torch.ones(0, 3, 8, 8)}, r"with B > 0, got \[0, 3, 8, 8\]"),
        ({"labels": torch.tensor([1, -1])}, "at least 0, got .* with least -1"),
        ({"labels": torch.tensor([1])}, r"labels must be 2 numbers of at least 0, got \[1\]"),
        ({"labels": torch.tensor([1, 2])}, r"classes above the largest label, 2; got \[10, 2\]"),
        ({"maps": torch.rand(2, 4)}, r"maps must be \[B, h, w\]"),
        ({"maps": torch.rand(1, 2, 2)}, r"maps must be \[B, h, w\]"),
        ({"maps": torch.rand(2, 3, 2)}, "a whole number of pixels where no patch is given"),
        ({"patch": (8, 4)}, r"got \(8, 4\) for images \[8, 8\] and maps \[2, 2\]"),
        ({"patch": (4, 0)}, r"whole numbers of at least 1 .* got \(4, 0\)"),
        ({"patch": 4}, r"patch must be \(rows, columns\) .* got 4"),
        ({"maps": torch.full((2, 2, 2), torch.nan)}, "must be finite"),
        ({"shares": [0]}, "at least two rising numbers"),
        ({"shares": [0, 0.5, 0.5]}, "at least two rising numbers"),
        ({"shares": [0, 1.5]}, "from 0 to 1"),
        ({"fill": torch.zeros(2, 1, 8, 4)}, "fill must expand"),
        ({"fill": torch.zeros(1, 2, 1, 8, 8)}, "fill must expand"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(model, changes, message):
    arguments = {
        "images": white(2),
        "labels": ones(2),
        "maps": torch.rand(2, 2, 2),
        "shares": SHARES,
        "fill": BLACK,
    }
    with pytest.raises(ValueError, match=message):
        deletion_curve(model, **arguments | changes)


def test_other_refusals(model):
    with pytest.raises(TypeError, match=r"labels must be int64, got torch\.float32"):
        deletion_curve(model, white(), torch.ones(1), WEIGHTS[None], SHARES, fill=BLACK)
    with pytest.raises(ValueError, match="sigma must be above 0"):
        blurred(white(), 0)
    with pytest.raises(ValueError, match="must have 3 numbers each, got 1 and 3"):
        black(white(), [0.5], [0.5] * 3)
    with pytest.raises(ValueError, match=r"curve must be \[..., 3\] for 3 shares, got \[2\]"):
        area_under(torch.ones(2), [0, 0.5, 1])
    with pytest.raises(ValueError, match="points 2, got 4 and 1"):
        whole_token_shares(4, 1)
