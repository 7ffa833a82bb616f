"""Checks of constructor arguments: errors are raised before any part is built."""

import math

import pytest
import torch

from vision_ttt.models import create_model
from vision_ttt.models.arguments import check_sides

NANO, VIT3, HVIT3, DIT3 = (
    "vittt_nano_patch4_32",
    "vit3_tiny_patch16_224",
    "hvit3_tiny",
    "dit3_nano_patch4_32",
)
VIM, REGISTERS = "vim_nano_patch4_32", "mambar_nano_patch4_32"
WRONG = [
    *((name, argument, value) for name in (NANO, VIT3, VIM, REGISTERS, DIT3)
      for argument, value in (
        ("patch_size", 0),
        ("patch_size", -1),
        ("patch_size", True),
        ("patch_size", [2]),
        ("img_size", 0),
        ("img_size", [32]),
        ("img_size", 10**9),
        ("depth", 0),
        ("depth", -1),
        ("depth", 10**6),
    )),
    *((name, "num_heads", value) for name in (NANO, VIT3, DIT3) for value in (0, True)),
    *((name, argument, value) for name in (NANO, VIT3, HVIT3, VIM, REGISTERS, DIT3)
      for argument, value in (
        ("in_chans", 0),
        ("in_chans", -1),
        ("num_classes", -1),
        ("num_classes", 1.5),
    )),
    *((name, "mlp_ratio", value) for name in (NANO, VIT3, HVIT3, DIT3)
      for value in (0, -1, math.inf, math.nan, "x")),
    *((name, argument, value) for name in (NANO, VIT3, HVIT3, VIM, REGISTERS)
      for argument, value in (
        ("drop_path_rate", -1),
        ("drop_path_rate", 1.5),
        ("drop_path_rate", math.nan),
        ("drop_rate", math.nan),
        ("dynamic_img_size", "x"),
    )),
    (NANO, "embed_dim", -1),
    (NANO, "mini_batch_size", 0),
    (NANO, "mini_batch_size", 2**20 + 1),
    (NANO, "img_size", 7),
    (VIT3, "embed_dim", 0),
    (VIT3, "img_size", 7),
    (VIT3, "qkv_bias", "x"),
    (HVIT3, "depths", [1, 0, 1, 1]),
    (HVIT3, "dims", [64, 0, 320, 512]),
    (HVIT3, "img_size", -3),
    *((name, argument, value) for name in (VIM, REGISTERS) for argument, value in (
        ("embed_dim", 0),
        ("state", 0),
        ("state", 1.5),
        ("img_size", 7),
        ("global_pool", "x"),
    )),
    *((VIM, "stride", value) for value in (0, 3, 5, True, 1.5)),
    (REGISTERS, "num_registers", 0),
    (REGISTERS, "num_registers", True),
    (REGISTERS, "head_reduction", 0),
    (REGISTERS, "head_reduction", 7),
    (REGISTERS, "head_reduction", math.nan),
    (REGISTERS, "head_reduction", "x"),
    (REGISTERS, "distribution", "head"),
    (DIT3, "hidden_size", 0),
    (DIT3, "img_size", 7),
    (DIT3, "learn_sigma", "no"),
    (DIT3, "class_dropout_prob", math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "value"), WRONG)
def test_a_wrong_argument_is_named(name: str, argument: str, value: object) -> None:
    said = {"depths": "depth", "dims": "embed_dim", "in_chans": "in_chan"}.get(argument, argument)
    said = "size" if said == "img_size" else said
    with torch.device("meta"), pytest.raises((ValueError, TypeError), match=said):
        create_model(name, **{argument: value})


def test_sizes_that_a_model_makes_fit() -> None:
    check_sides(30, 16, pad=True)
    check_sides(7, 16, pad=True)
    check_sides((30, 47), (15, 16), whole_patches=False)
    with pytest.raises(ValueError, match="7 × 7 are not whole patches of 16 × 16"):
        check_sides(7, 16, whole_patches=False)
    with torch.device("meta"):
        model = create_model(NANO, img_size=(30, 50), dynamic_img_size=True)
    assert model.pos_embed.shape[1] == 7 * 12
