"""Where the tokens of a backbone's maps are in the image."""

import timm
import torch
from torch import nn

from vision_ttt.explain.feature_maps import token_grid, token_step
from vision_ttt.models import HViT3


def test_maps_of_every_stage_have_their_step():
    model = HViT3(32, 3, dims=(16, 16), depths=(1, 1), num_heads=(1, 1))
    images = torch.zeros(1, 3, 36, 36)
    assert token_step(model, images, (9, 9)) == (4, 4)
    assert token_step(model, images, (5, 5)) == (8, 8)
    assert token_grid(model, images) == ((5, 5), (8, 8))
    assert token_step(model, images, (5, 9)) is None
    assert token_step(nn.Linear(1, 1), images, (5, 5)) is None


def test_padded_images_have_the_models_step():
    options = {"patch_size": 16, "dynamic_img_size": True, "dynamic_img_pad": True}
    model = timm.create_model("vittt_nano_patch4_32", depth=1, **options)
    assert token_step(model, torch.zeros(1, 3, 36, 36), (3, 3)) == (16, 16)
    assert token_grid(model, torch.zeros(1, 3, 36, 20)) == ((3, 2), (16, 16))
