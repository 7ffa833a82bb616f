"""deformable_attention: by hand, against grid_sample and transformers, beyond the edges."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import deformable_attention, use_backend
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.deformable_attention import cpu
from vision_ttt.ops.deformable_attention.contract import Inputs

pytestmark = pytest.mark.kernels

OP = TABLE["deformable_attention"]
LEVELS = [(9, 13), (5, 7), (3, 2)]
BACKENDS = ("cpu", "dual", "reference")


def problem(levels=LEVELS, batch=2, queries=11, heads=3, dim=32, points=4) -> list[Tensor]:
    """Value, locations, of which some are outside, and weights."""
    torch.manual_seed(0)
    cells = sum(h * w for h, w in levels)
    shape = batch, queries, heads, len(levels), points
    locations = 1.6 * torch.rand(*shape, 2) - 0.3
    return [torch.randn(batch, cells, heads, dim), locations, torch.randn(shape)]


def solve(function, tensors: list[Tensor], backend: str | None = None) -> list[Tensor]:
    """The result, and the gradients of a fixed projection of it, both by the backend."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    projection = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    with use_backend(backend):  # the backward pass selects its own
        return [out.detach(), *torch.autograd.grad((out * projection).sum(), tensors)]


def attention(levels=LEVELS, backend=None):
    def run(*tensors):
        with use_backend(backend):
            return deformable_attention(*tensors, levels)

    return run


def definition(levels=LEVELS):
    sizes = [size for level in levels for size in level]
    return lambda *tensors: OP.definition(Inputs(*tensors, sizes))


def by_grid_sample(value, locations, weights, levels=LEVELS):
    """Head by head and level by level, from the equation."""
    out = 0
    for level, of_level in enumerate(value.split([h * w for h, w in levels], dim=1)):
        heads = []
        for head in range(value.shape[2]):
            image = of_level[:, :, head].unflatten(1, levels[level]).permute(0, 3, 1, 2)
            grid = 2 * locations[:, :, head, level] - 1
            options = {"align_corners": False, "padding_mode": "zeros"}
            samples = F.grid_sample(image, grid, **options)  # [B, d, Q, P]
            heads.append((samples * weights[:, None, :, head, level]).sum(-1).transpose(1, 2))
        out = out + torch.cat(heads, -1)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_map_by_hand(backend):
    """The centre of a cell has its value, half-way to the next their mean, to the outside half."""
    value = torch.arange(1.0, 7).view(1, 6, 1, 1).expand(1, 6, 1, 16)  # 1 2 3 over 4 5 6
    places = {(0.5, 0.25): 2, (0.5, 0.75): 5, (2 / 3, 0.25): 2.5, (0.5, 0.5): 3.5, (0, 0.25): 0.5}
    places |= {(1 / 3, 0.5): 3, (1, 1): 1.5, (7 / 6, 0.25): 0, (0.5, -0.3): 0, (9, 9): 0}
    locations = torch.tensor(list(places)).view(1, -1, 1, 1, 1, 2)
    weights = torch.full(locations.shape[:-1], 2.0)
    with use_backend(backend):
        got = deformable_attention(value, locations, weights, [(2, 3)])
    wanted = 2 * torch.tensor(list(places.values())).float().view(1, -1, 1).expand(got.shape)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_equals_grid_sample(backend):
    tensors = problem()
    wanted = solve(by_grid_sample, [x.double() for x in tensors])
    for got, exact in zip(solve(attention(backend=backend), tensors, backend), wanted, strict=True):
        assert_close(got, exact, GRADIENT[torch.float32])


def test_it_equals_transformers():
    name = "transformers.models.deformable_detr.modeling_deformable_detr"
    core = pytest.importorskip(name).MultiScaleDeformableAttention()

    def run(value, locations, weights):
        return core.forward(value, None, LEVELS, None, locations, weights, 64)

    tensors = problem()
    wanted = solve(run, [x.double() for x in tensors])
    for got, exact in zip(solve(attention(backend="cpu"), tensors, "cpu"), wanted, strict=True):
        assert_close(got, exact, GRADIENT[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_edges_of_the_padding(backend):
    """Places on the border of what counts, where a derivative is one-sided."""
    steps = torch.tensor([-0.51, -0.5, -0.49, 0, 0.5, 1, 3.5, 4, 4.49, 4.5, 4.51]) / 4
    x, y = torch.meshgrid(steps, steps, indexing="ij")
    locations = torch.stack([x, y], -1).view(1, -1, 1, 1, 1, 2)
    torch.manual_seed(0)
    tensors = [torch.randn(1, 16, 1, 16), locations, torch.ones(locations.shape[:-1])]
    got = solve(attention([(4, 4)], backend), tensors, backend)
    wanted = solve(lambda *a: by_grid_sample(*a, [(4, 4)]), tensors)
    for x, exact in zip(got, wanted, strict=True):
        assert_close(x, exact, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("far", [math.inf, -math.inf, 3e38, -3e38, 2.0**31, -(2.0**40)])
def test_a_point_far_outside_counts_as_zeros(backend, far):
    value, locations, weights = problem()
    locations[0, 3, 1, 2, 0, 0] = far
    locations[1, 4, 2, 0, 3] = far
    elsewhere = locations.clamp(-9, 9)
    got = solve(attention(backend=backend), [value, locations, weights], backend)
    wanted = solve(definition(), [x.double() for x in (value, elsewhere, weights)])
    for x, exact in zip(got, wanted, strict=True):
        assert_close(x, exact, GRADIENT[torch.float32])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_nan_location_shows_in_its_head_alone(backend):
    value, locations, weights = problem()
    locations[0, 3, 1, 2, 0, 1] = math.nan
    out = attention(backend=backend)(value, locations, weights).unflatten(-1, (3, 32))
    assert out[0, 3, 1].isnan().all()
    assert out.isnan().sum() == 32
    _, dvalue, dlocations, dweights = solve(
        attention(backend=backend), [value, locations, weights], backend
    )
    assert dvalue[1].isfinite().all()
    assert dlocations.isnan().sum() <= 2
    assert dweights.isnan().sum() == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kinds", ["value", "all"])
def test_bfloat16(kinds, backend):
    """Sums are float32, and the value's gradient is rounded once; what is float32 is that exact."""
    tensors = problem(queries=200)
    rounded = [x.bfloat16() if kinds == "all" or i == 0 else x for i, x in enumerate(tensors)]
    got = solve(attention(backend=backend), rounded, backend)
    assert [x.dtype for x in got] == [torch.bfloat16, *(x.dtype for x in rounded)]
    # The projection is exact in neither; both round it the same way.
    exact = solve(lambda *a: definition()(*a).bfloat16(), [x.double() for x in rounded])
    for i, (x, wanted) in enumerate(zip(got, exact, strict=True)):
        assert_close(x, wanted, (FORWARD if i == 0 else GRADIENT)[x.dtype], str(i))


@pytest.mark.parametrize(
    ("heads", "points", "dim"), [(3, 100, 16), (2, 256, 48), (1, 1, 80), (12, 4, 112)]
)
def test_any_number_of_points_and_channels(heads, points, dim):
    """More points than the kernel locates at once, as many as it supports, and all vector loops."""
    levels = LEVELS[:2]
    tensors = problem(levels, 1, 5, heads, dim, points)
    wanted = solve(definition(levels), [x.double() for x in tensors])
    for got, exact in zip(solve(attention(levels, "cpu"), tensors, "cpu"), wanted, strict=True):
        assert_close(got, exact, GRADIENT[torch.float32])


def test_views_of_one_projection():
    """The heads' axis before the tokens', and two values side by side."""
    value, locations, weights = problem()
    wanted = attention(backend="cpu")(value, locations, weights)
    turned = value.transpose(1, 2).contiguous().transpose(1, 2)
    pair = torch.stack([value, value], 2)
    for view in (turned, pair[:, :, 1]):
        assert not view.is_contiguous()
        assert torch.equal(attention(backend="cpu")(view, locations, weights), wanted)


@pytest.mark.parametrize("backend", ["dual", "reference"])
def test_finite_differences(backend):
    levels = [(3, 2), (1, 2)]
    value, locations, weights = problem(levels, 1, 2, 2, 3, 2)
    tensors = [x.double().requires_grad_() for x in (value, locations, weights)]
    with use_backend(backend):
        assert torch.autograd.gradcheck(attention(levels, backend), tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(attention(levels, backend), tensors, fast_mode=True)


def test_an_empty_batch():
    value, locations, weights = (x[:0].requires_grad_() for x in problem())
    out = deformable_attention(value, locations, weights, LEVELS)
    assert out.shape == (0, 11, 96)
    assert torch.autograd.grad(out.sum(), locations)[0].shape == locations.shape


REFUSED_BY_THE_KERNELS = {
    "points": ((257, [(1, 2)] * 2, torch.float32), "514 points per head are over 512"),
    "side": ((4, [(1, 2**24)], torch.float32), r"cells in maps of \[1, 16777216\] are too many"),
    "cells": ((4, [(2**16, 2**15)], torch.float32), "2147483648 cells .* are too many"),
    "dtype": ((4, LEVELS, torch.float16), "dtype torch.float16 is not one of"),
}


@pytest.mark.parametrize(("call", "reason"), REFUSED_BY_THE_KERNELS.values(), ids=str)
def test_what_the_kernels_refuse(call, reason):
    points, levels, dtype = call
    cells = sum(h * w for h, w in levels)
    value = torch.zeros(1, 1, 1, 16, dtype=dtype).expand(1, cells, 1, 16)
    weights = torch.zeros(1, 1, 1, len(levels), points)
    locations = torch.zeros(*weights.shape, 2)
    with use_backend("cpu"), pytest.raises(ValueError, match=reason):
        deformable_attention(value, locations, weights, levels)
    inputs = Inputs(value[:, :0], locations, weights, [size for level in levels for size in level])
    if dtype == torch.float32:
        assert cpu.refusal(inputs) == "a tensor is empty"


WRONG = {
    "too few cells": (lambda v, a, w: (v[:, 1:], a, w, LEVELS), ValueError, "157 tokens"),
    "a level less": (lambda v, a, w: (v, a, w, LEVELS[1:]), ValueError, "of 3 levels of 158"),
    "swapped": (lambda v, a, w: (v, a.flip(1)[:, 1:], w, LEVELS), ValueError, "weights must have"),
    "no pairs": (lambda v, a, w: (v, a, w, [9, 13]), TypeError, r"pairs \(h, w\)"),
    "a tensor": (lambda v, a, w: (v, a, w, torch.tensor(LEVELS)), TypeError, r"pairs \(h, w\)"),
    "a float": (lambda v, a, w: (v, a, w, [(9.0, 13), *LEVELS[1:]]), TypeError, "of ints, got"),
    "below 0": (lambda v, a, w: (v, a, w, [(-9, -13), *LEVELS[1:]]), ValueError, "at least 1"),
    "triples": (lambda v, a, w: (v, a[..., :1], w, LEVELS), ValueError, "locations must have"),
    "float64": (lambda v, a, w: (v, a.double(), w, LEVELS), TypeError, "locations is float64"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=message):
        deformable_attention(*change(*problem()))
