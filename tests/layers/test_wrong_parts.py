"""Parts of unequal shapes raise an error before a kernel reads them."""

import pytest
import torch
from torch import nn

from vision_ttt import for_training
from vision_ttt.layers import LinearLearner, TTTLinear, VitttBlock, VitttMixer

VITTT = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}


def other_learner(layer):
    layer.learner = LinearLearner(4, 16, directions=layer.learner.directions)


def learner_of_one_direction(layer):
    layer.learner = LinearLearner(2, 32, directions=3 - layer.learner.directions)


def one_rate(layer):
    layer.rate_proj = nn.Linear(64, 1)


def parameter(path, *shape):
    def change(layer):
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, nn.Parameter(torch.randn(shape)))

    change.__name__ = f"{path} {list(shape)}"
    return change


CHANGES = [
    other_learner,
    learner_of_one_direction,
    one_rate,
    parameter("merge.bias", 1, 32),
    parameter("merge.bias", 64),
    parameter("merge.weight", 1, 32),
    parameter("conv_q.bias", 7),
    parameter("conv_k.bias", 1),
    parameter("conv_q.weight", 32, 1, 4),
    parameter("conv_k.weight", 64, 2, 4),
    parameter("learner.norm_weight", 2, 16),
    parameter("learner.norm_bias", 32),
    parameter("learner.position_offset", 1, 15),
    parameter("learner.position_offset", 3, 16),
    parameter("learner.w0", 2, 32, 16),
    parameter("learner.w0", 1, 32, 32),
    parameter("learner.b0", 2, 31),
]
REFUSED = r"must have shape \[.+\], got \[.*\]"


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("layout", [{"conv_kernel_size": 4}, VITTT], ids=["one", "vittt"])
@pytest.mark.parametrize("composite", [False, True], ids=["plain", "composite"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_layer_refuses_parts_that_do_not_fit(change, composite, layout, mode):
    layer = TTTLinear(64, 2, **layout)
    if composite:
        for_training(layer, strict=True)
    x = torch.randn(2, 40, 64, requires_grad=mode == "training")

    def call_changed():
        change(layer)
        layer(x)

    with torch.set_grad_enabled(mode == "training"), pytest.raises(ValueError, match=REFUSED):
        call_changed()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_block_refuses_parts_that_do_not_fit(change):
    block = VitttBlock(VitttMixer(64, ttt=TTTLinear(64, 2, **VITTT)), 64, 48)
    change(block.mixer.ttt)
    with torch.no_grad(), pytest.raises(ValueError, match=REFUSED):
        block(torch.randn(2, 35, 64), (5, 7))
