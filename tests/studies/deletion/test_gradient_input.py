"""Gradient × input: exact for linear models, a finite difference for others."""

import pytest
import timm
import torch
from torch import nn

from explained_models import small_vit
from studies.deletion.gradient_input import gradient_times_input
from tolerances import assert_close
from vision_ttt import for_inference


class LinearClassifier(nn.Module):
    """A linear classifier of images of 10 × 6 pixels that counts as one of 3 × 2 tokens."""

    feature_info = ({"reduction": 4},)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2 * 10 * 6, 4)

    def forward(self, x):
        return self.linear(x.flatten(1))


def test_a_linear_models_logit_is_shared_out_among_tokens():
    model, images = LinearClassifier(), torch.randn(3, 2, 10, 6)
    classes = torch.tensor([2, 0, 2])
    maps = gradient_times_input(model, images, classes)
    products = model.linear.weight[classes].view(3, 2, 10, 6) * images
    assert maps.shape == (3, 3, 2)
    assert_close(maps[:, 0, 0], products[:, :, :4, :4].sum((1, 2, 3)), 1e-5)
    assert_close(maps[:, 2, 1], products[:, :, 8:, 4:].sum((1, 2, 3)), 1e-5)
    logits = model(images).gather(1, classes[:, None])[:, 0]
    assert_close(maps.sum((1, 2)), logits - model.linear.bias[classes], 1e-5)


def test_a_map_is_the_slope_along_a_tokens_pixels():
    torch.manual_seed(0)
    model = timm.create_model(
        "vittt_nano_patch4_32", num_classes=3, embed_dim=32, num_heads=2, depth=1
    )
    model = model.double().eval()
    images, classes = torch.randn(1, 3, 32, 32, dtype=torch.float64), torch.tensor([1])
    maps = gradient_times_input(model, images, classes)
    assert (maps.shape, maps.dtype) == ((1, 8, 8), torch.float32)
    for row, column in ((0, 0), (2, 5)):
        scale = torch.zeros_like(images)
        scale[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1e-4
        with torch.no_grad():
            above, below = (model(images * (1 + sign * scale))[0, 1] for sign in (1, -1))
        assert_close(maps[0, row, column], (above - below) / 2e-4, 1e-4)


def test_the_model_stays_as_it_was():
    model = small_vit(drop_path_rate=0.5).train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        maps = gradient_times_input(model, images, torch.tensor([0, 4]))
    assert model.training
    assert not maps.requires_grad
    assert not images.requires_grad
    assert (model.head.weight.grad == 1).all()
    assert model.head.bias.grad is None
    assert torch.equal(maps, gradient_times_input(model, images, torch.tensor([0, 4])))


def test_gradient_times_input_refuses():
    model, images = small_vit(), torch.randn(2, 3, 16, 16)
    with pytest.raises(TypeError, match=r"token grid is known of .*, got Linear"):
        gradient_times_input(nn.Linear(1, 1), images, torch.tensor([0, 0]))
    for classes in ([0], [0, 5], [-1, 0], [0.0, 1.0], [True, False]):
        with pytest.raises(ValueError, match="classes must be 2 whole numbers from 0 to 4"):
            gradient_times_input(model, images, torch.tensor(classes))
    with pytest.raises(ValueError, match="do not fit the model"):
        gradient_times_input(model, images[..., :12, :12], torch.tensor([0, 0]))
    features = small_vit(global_pool="", num_classes=0)
    with pytest.raises(TypeError, match=r"logits \[B, classes\] is needed"):
        gradient_times_input(features, images, torch.tensor([0, 0]))
    with pytest.raises(TypeError, match="a model of for_inference cannot be explained"):
        gradient_times_input(for_inference(model), images, torch.tensor([0, 0]))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"within torch\.inference_mode"):
        gradient_times_input(model, images, torch.tensor([0, 0]))
