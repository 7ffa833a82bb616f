"""The study of ragged batches measures every way, of evaluation and of training."""

import pytest
import timm

from studies.ragged_batches import WAYS, measure


@pytest.mark.parametrize("training", [False, True])
def test_each_way_is_measured(training):
    arguments = {"depth": 1, "patch_size": 16, "img_size": 32, "dynamic_img_size": True}
    model = timm.create_model("vittt_nano_patch4_32", **arguments).train(training)
    seconds = measure(model, [(16, 48), (32, 32)], (32, 32), repeats=1)
    assert tuple(seconds) == WAYS
    assert all(value > 0 for value in seconds.values())
    assert (model.head.weight.grad is not None) == training
