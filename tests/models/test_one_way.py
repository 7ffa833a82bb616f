"""Vittt with its convolutions and one direction."""

from vision_ttt.models import create_model


def test_the_design_is_the_published_one_but_for_the_second_direction():
    model = create_model("vittt_nano_patch4_32", design="one_way", num_classes=10)
    mixer = model.blocks[0].mixer
    assert mixer.conv2d is not None
    assert mixer.ttt.directions == 1
    assert mixer.ttt.conv_q is not None
