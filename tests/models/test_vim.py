"""Vim as its authors released it, and its sizes."""

import pytest
import torch

import mamba_goldens
from vision_ttt.bench import count_parameters
from vision_ttt.models import Vim, create_model

PARAMETERS = {
    "vim_tiny_patch16_224": 7_148_008,
    "vim_small_patch16_224": 25_796_584,
    "vim_base_patch16_224": 97_598_440,
}


def small(**options):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_classes": 5}
    return Vim(**{**sizes, **options}).eval()


def test_released_model():
    tensors, arguments, tolerance = mamba_goldens.read("vim_model")
    sizes = ("img_size", "patch_size", "stride", "depth", "embed_dim", "num_classes")
    model = Vim(**{key: arguments[key] for key in sizes})
    mamba_goldens.check(model, tensors, tolerance)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_releases(name):
    with torch.device("meta"):
        assert count_parameters(create_model(name)) == PARAMETERS[name]


def test_nano_has_as_many_parameters_as_vittts():
    with torch.device("meta"):
        vim, vittt = (
            count_parameters(create_model(f"{name}_nano_patch4_32", num_classes=10))
            for name in ("vim", "vittt")
        )
    assert (vim, vittt) == (579_946, 571_650)
