"""DeiT with Vittt's depth-wise convolution."""

import timm
import torch
import torch.nn.functional as F
from torch import nn

from tolerances import assert_close
from vision_ttt.bench import count_parameters
from vision_ttt.models import create_model


def small(**arguments):
    return create_model("conv_deit_nano_patch4_32", num_classes=10, **arguments)


def test_nano_has_as_many_parameters_as_vittt_nano():
    own = count_parameters(small())
    assert (
        abs(own / count_parameters(create_model("vittt_nano_patch4_32", num_classes=10)) - 1) < 0.03
    )


def test_without_its_convolutions_it_is_timms_deit():
    model = small(depth=2).eval()
    for block in model.blocks:
        nn.init.zeros_(block.cpe.weight)
        nn.init.normal_(block.ttt.qkv.bias)
    deit = timm.create_model(
        "deit_tiny_patch16_224",
        img_size=32,
        patch_size=4,
        embed_dim=96,
        depth=2,
        num_heads=3,
        num_classes=10,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
    ).eval()
    weights = {
        name.replace(".ttt.", ".attn."): x
        for name, x in model.state_dict().items()
        if ".cpe." not in name
    }
    deit.load_state_dict(weights)
    images = torch.randn(2, 3, 32, 32)
    assert_close(model(images), deit(images), 1e-5)


def test_a_block_convolves_first():
    model = small(depth=1).eval()
    (block,) = model.blocks
    nn.init.normal_(block.cpe.bias)
    for projection in (block.ttt.proj, block.mlp.fc2):
        nn.init.zeros_(projection.weight)
        nn.init.zeros_(projection.bias)
    x = torch.randn(2, 20, 96)
    grid = x.transpose(1, 2).unflatten(2, (4, 5))
    wanted = x + F.conv2d(grid, block.cpe.weight, block.cpe.bias, padding=1, groups=96).flatten(
        2
    ).transpose(1, 2)
    assert_close(block(x, (4, 5)), wanted, 1e-5)


def test_the_first_loss_is_that_of_a_guess():
    loss = F.cross_entropy(small()(torch.randn(4, 3, 32, 32)), torch.arange(4))
    assert abs(loss.item() - torch.tensor(10.0).log().item()) < 0.5
