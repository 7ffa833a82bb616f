"""Vittt with its convolutions and one direction."""

import torch

from vision_ttt.models import create_model


def test_the_design_is_the_published_one_but_for_the_second_direction():
    model = create_model("vittt_nano_patch4_32", design="one_way", num_classes=10)
    mixer = model.blocks[0].mixer
    assert mixer.conv2d is not None
    assert mixer.ttt.directions == 1
    assert mixer.ttt.conv_q is not None


def test_it_may_be_fused():
    own, fused = (
        create_model("vittt_nano_patch4_32", design="one_way", num_classes=10, fused=fused).eval()
        for fused in (False, True)
    )
    fused.load_state_dict(own.state_dict())
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(fused(images), own(images), rtol=1e-4, atol=1e-5)
