"""Distances to class tokens and registers, and the figures of artefacts."""

from functools import partial

import pytest
import timm
import torch

from explained_models import small_vit
from tolerances import assert_close
from vision_ttt import for_inference
from vision_ttt.explain import token_distances, token_norms
from vision_ttt.explain.artefact_figures import distance_sheet, norm_histograms
from vision_ttt.explain.norm_figures import norm_map_sheet


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def nano(name, **options):
    torch.manual_seed(0)
    return timm.create_model(f"{name}_nano_patch4_32", num_classes=4, depth=2, **options).eval()


@pytest.mark.parametrize(("name", "count"), [("mambar", 4), ("vim", 1), ("vittt", 1), ("vrwkv", 1)])
def test_distances_are_to_each_global_token(images, name, count):
    model = nano(name)
    found = token_distances(model.train(), images)
    assert model.training
    assert found.shape == (2, count, 8, 8)
    with torch.no_grad():
        tokens, others = model.eval().split_tokens(model.forward_features(images))
    last = tokens.mean(1) if others is None else others[:, -1]
    assert_close(found[:, -1, 1, 3], (tokens[:, 11] - last).norm(dim=-1), 1e-4)


def test_distances_of_timms_transformer(images):
    images = images[..., :16, :16]
    model = small_vit(reg_tokens=2).eval()
    found = token_distances(model, images)
    with torch.no_grad():
        x = model.forward_features(images)
    assert found.shape == (2, 3, 4, 4)
    assert_close(found[:, 0, 0, 0], (x[:, 3] - x[:, 0]).norm(dim=-1), 1e-4)
    with pytest.raises(TypeError, match="need a plain backbone"):
        token_distances(timm.create_model("resnet18"), images)
    with pytest.raises(ValueError, match="the images do not fit the model: Input height"):
        token_distances(model, images[..., 1:, :])


def test_small_distances_are_exact():
    """Tokens of an even picture differ by their positions alone, here by very little."""
    model = small_vit(img_size=32, class_token=False, global_pool="").eval()
    model.pos_embed.data *= 1e-4
    images = torch.zeros(1, 3, 32, 32)
    with torch.no_grad():
        tokens = model.forward_features(images)
    wanted = (tokens - tokens.mean(1, keepdim=True)).norm(dim=-1).view(1, 1, 8, 8)
    assert_close(token_distances(model, images), wanted, 1e-4)


@pytest.mark.parametrize("name", ["mambar", "vim", "vittt"])
@pytest.mark.parametrize("wrap", [for_inference, partial(torch.compile, backend="eager")])
def test_a_packed_or_compiled_model_has_the_same_distances(images, name, wrap):
    model = nano(name)
    wanted = token_distances(model, images)
    assert_close(token_distances(wrap(model), images), wanted, 1e-4)


def test_figures(images):
    model = nano("mambar")
    distances, norms = token_distances(model, images), token_norms(model, images)
    sheet = distance_sheet(images.sigmoid(), distances)
    assert len(sheet.axes) == 2 * 5
    assert [axis.get_title() for axis in sheet.axes[:5]] == ["image", "1", "2", "3", "4"]
    mean = distance_sheet(images.sigmoid(), distances[:, :1])
    assert [axis.get_title() for axis in mean.axes[:2]] == ["image", "distance"]
    assert (sheet.axes[2].images[0].get_array() == distances[0, 1].numpy()).all()
    with pytest.raises(ValueError, match="equally many"):
        distance_sheet(images, distances[:1])
    norms[0, -1, 0, 0] = 1e4
    shares, means = norm_histograms({"a": norms, "b": 2 * norms}).axes
    heights = [patch.get_data().values.sum() for patch in shares.patches]
    assert heights == pytest.approx([100, 100])
    assert all(line.get_marker() == "." for line in means.lines)  # one layer has no line
    outliers, every, largest = (line.get_ydata() for line in means.lines[:3])
    assert outliers[-1] == largest[-1] == 1e4
    assert every[-1] == pytest.approx(norms[:, -1].mean().item())
    shown = norm_map_sheet(images.sigmoid(), norms, absolute=True).axes[2].images[0]
    assert (shown.get_array() == norms[0, 1].numpy()).all()
