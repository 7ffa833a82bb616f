"""Mamba-Reg as its authors released it, its registers and its sizes."""

import pytest
import torch

import mamba_goldens
from vision_ttt.bench import count_parameters
from vision_ttt.models import MambaReg, create_model

PARAMETERS = {
    "mambar_tiny_patch16_224": 9_264_232,
    "mambar_small_patch16_224": 27_801_064,
    "mambar_base_patch16_224": 99_301_096,
    "mambar_large_patch16_224": 341_222_376,
}


def small(**options):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_classes": 5}
    return MambaReg(**{**sizes, "num_registers": 3, **options}).eval()


@pytest.mark.parametrize("name", ["mambar_model_cls3_reduce1", "mambar_model_cls3_reduce3"])
def test_released_model(name):
    tensors, arguments, tolerance = mamba_goldens.read(name)
    sizes = ("img_size", "patch_size", "depth", "embed_dim", "num_classes")
    model = MambaReg(
        **{key: arguments[key] for key in sizes},
        num_registers=arguments["num_cls_tokens"],
        head_reduction=arguments["cls_reduce"],
    )
    mamba_goldens.check(model, tensors, tolerance)
    _, (_, positions) = model.embed(tensors["input.image"])
    assert positions == tuple(tensors["output.cls_positions"].tolist())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_releases(name):
    with torch.device("meta"):
        assert count_parameters(create_model(name)) == PARAMETERS[name]
