"""Position embeddings of other grids than the model's own."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.export import Dim

from tolerances import assert_close
from vision_ttt.models.image_size import positions_for

CHANNELS = 5


def interpolated(positions, own_grid, grid):
    maps = positions.view(1, *own_grid, CHANNELS).permute(0, 3, 1, 2)
    maps = F.interpolate(maps, size=grid, mode="bicubic", antialias=True)
    return maps.flatten(2).mT


@pytest.mark.parametrize("grid", [(14, 14), (3, 5), (28, 29), (1, 1), (50, 7), (13, 15)])
@pytest.mark.parametrize("own_grid", [(14, 14), (4, 6), (1, 1), (2, 7)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_pytorchs_interpolation(own_grid, grid, dtype, tolerance):
    positions = torch.randn(1, own_grid[0] * own_grid[1], CHANNELS, dtype=dtype)
    got = positions_for(grid, positions, own_grid)
    assert got.dtype == dtype
    assert_close(got, interpolated(positions, own_grid, grid), tolerance)


def test_half_precision_is_computed_in_float32():
    positions = torch.randn(1, 24, CHANNELS)
    wanted = positions_for((5, 9), positions, (4, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(positions_for((5, 9), positions, (4, 6)), wanted)
    half = positions.bfloat16()
    wanted = positions_for((5, 9), half.float(), (4, 6)).bfloat16()
    assert torch.equal(positions_for((5, 9), half, (4, 6)), wanted)


def test_compiled_training_at_changing_grids():
    """PyTorch's own interpolation has no backward pass there."""

    def loss(positions, images):
        return (positions_for(images.shape[1:3], positions, (4, 6)) * images.flatten(1, 2)).sum()

    positions = torch.randn(1, 24, CHANNELS, requires_grad=True)
    compiled = torch.compile(loss, dynamic=True, fullgraph=True, backend="aot_eager")
    for grid in ((5, 9), (6, 7), (12, 3)):
        images = torch.randn(2, *grid, CHANNELS)
        (got,) = torch.autograd.grad(compiled(positions, images), positions)
        (wanted,) = torch.autograd.grad(loss(positions, images), positions)
        assert_close(got, wanted, 1e-5)


@pytest.mark.parametrize("name", ["vittt_nano_patch4_32", "vit3_nano_patch4_32"])
def test_a_program_for_any_size_may_be_traced_at_the_models_own(name):
    """It has no branches: the positions of the own grid would be those of all sizes."""
    model = timm.create_model(name, num_classes=5, dynamic_img_size=True).eval()
    any_size = {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}
    with torch.no_grad():
        traced = torch.export.export(
            model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=(any_size,)
        )
        for size in ((16, 64), (32, 32), (40, 48)):
            images = torch.randn(3, 3, *size)
            assert_close(traced.module()(images), model(images), 1e-5)
