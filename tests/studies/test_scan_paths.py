"""Gradient norms by distance along the sequence."""

import pytest
import torch
from torch import nn

from studies.main import main
from studies.scan_paths import scan_paths
from vision_ttt.models import create_model

BASE = 0.8


class Decay(nn.Module):
    """y_s = Σ_t BASE^|s − t| x_t."""

    def forward(self, x, *context):
        places = torch.arange(x.shape[1])
        return BASE ** (places[:, None] - places).abs() @ x


def decaying(blocks=1, **options):
    """Mamba-Reg's tokens and head around such blocks."""
    model = create_model("mambar_nano_patch4_32", num_classes=2, depth=1, **options)
    model.blocks = nn.ModuleList([Decay() for _ in range(blocks)])
    model.norm = nn.Identity()
    return model


def images(count=12):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_norm_of_a_block_is_that_of_its_jacobian():
    """Jacobians are BASE^|s − t| times the identity, which stretch every vector alike."""
    found = scan_paths(decaying(blocks=3), images(), draws=8).block
    assert found.shape == (68,)
    seen = ~found.isnan()
    assert seen[:60].all()
    torch.testing.assert_close(found[seen], BASE ** torch.arange(68)[seen], rtol=1e-4, atol=0)


def test_the_feature_reads_one_token_through_all_blocks():
    """Of a single register that the head reads; J is the square of a block's matrix."""
    model = decaying(blocks=2, num_registers=1, distribution="middle")
    found = scan_paths(model, images(2))
    places = torch.arange(65)
    row = torch.linalg.matrix_power(BASE ** (places[:, None] - places).abs(), 2)[32]
    row = torch.cat([row[:32], row[33:]])
    distances = torch.cat([places[1:33].flip(0), places[1:33]])
    assert torch.equal(found.lengths, distances.expand(2, -1))
    wanted = torch.full((65,), torch.nan)
    for distance in range(1, 33):
        own = row[distances == distance]
        wanted[distance] = (own.square().mean() / row.square().mean()).sqrt()
    torch.testing.assert_close(found.feature, wanted, rtol=1e-4, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 16),  # registers at 12, 25, 38 and 51 of 68 tokens
        ({"distribution": "middle"}, 32),
        ({"global_pool": "first"}, 55),
        ({"global_pool": "avg"}, 0),
        ({"global_pool": "max_norm"}, 60),
    ],
)
def test_the_path_ends_at_the_nearest_token_that_is_read(options, longest):
    found = scan_paths(decaying(**options), images(2))
    assert found.lengths.shape == (2, 64)
    if options.get("global_pool") == "max_norm":  # whichever it is: one token of each image
        assert (found.lengths == 0).sum(1).tolist() == [1, 1]
    else:
        assert found.lengths.max() == longest
    assert found.feature.isnan().logical_not().nonzero().max() == found.lengths.max()
    if longest == 0:
        assert found.feature[0] == 1


def test_a_models_draws_are_a_seeds():
    model = create_model("vim_nano_patch4_32", num_classes=2, depth=1).train()
    first, again, other = (scan_paths(model, images(2), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.feature[1:33], again.feature[1:33])
    assert not torch.equal(first.feature[1:33], other.feature[1:33])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(TypeError, match="got ResNet"):
        scan_paths(create_model("resnet18"), images(1))
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        scan_paths(decaying(), images(1), draws=0)
    model = create_model("vim_nano_patch4_32", depth=1)
    torch.nn.init.zeros_(model.norm.weight)
    with pytest.raises(ValueError, match="has no gradient: it depends on no token"):
        scan_paths(model, images(1))
    with torch.no_grad():
        model.patch_embed.proj.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="gradients are not finite"):
        scan_paths(model, images(1))


def test_the_command(tmp_path, capsys):
    figure = tmp_path / "paths.svg"
    models = ["vittt_nano_patch4_32.digits", "mambar_nano_patch4_32:depth=1"]
    command = ["paths", *models, "sample:digit-0-1", "--draws", "1", "--figure", str(figure)]
    assert main(command) == 0
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert ["mean", "0.0", "5.3"] in cells
    assert ["largest", "0", "16"] in cells
    labels = [row[0] for row in cells if row]
    assert labels[:4] == ["1", "2 to 3", "4 to 7", "8 to 15"]
    assert labels[labels.index("largest") + 1 :] == ["0", "1", *labels[1:4], "16 to 31"]
    assert "mambar_nano" in figure.read_text()
