"""Whole pictures in bands: equal to the model on the whole picture, in the memory that is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

from tolerances import assert_close
from vision_ttt import for_inference, for_training
from vision_ttt.acceleration.packed_linear import PackedLinear, PackedPatches
from vision_ttt.dense import LinearSegmenter, TokenMap
from vision_ttt.whole import TensorPicture, WholePictures
from vision_ttt.whole import model as whole_model
from whole_models import MODELS, collected, in_bands, make

TOLERANCE = 2e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("size", "band"),
    [
        pytest.param((43, 58), 40, id="bands of odd rows"),
        pytest.param((28, 20), 1000, id="one band", marks=pytest.mark.slow),
        pytest.param((32, 32), 8, id="bands of one row", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_model_on_the_whole_picture(
    name: str, size: tuple[int, int], band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_bands(monkeypatch, band)
    model, picture = make(name), torch.randn(3, *size)
    whole = WholePictures(model)
    with torch.no_grad():
        features = model.forward_features(picture[None])
        logits = model.forward_head(features)[0]
        image, _ = model.split_tokens(features)
    assert_close(collected(whole, picture).flatten(0, 1), image[0], TOLERANCE, name)
    assert_close(whole.logits(picture), logits, TOLERANCE, name)


def test_keys_may_be_too_large_for_an_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest key of all bands is subtracted from those of each."""
    in_bands(monkeypatch, 40)
    model, picture = make("vrwkv"), torch.randn(3, 43, 58)
    with torch.no_grad():
        for block in model.blocks:
            block.spatial_mix.key.weight *= 1000
        wanted, _ = model.split_tokens(model.forward_features(picture[None]))
    assert_close(collected(WholePictures(model), picture).flatten(0, 1), wanted[0], 1e-3)


@pytest.mark.parametrize("name", ["vittt", "mambar"])
def test_a_model_that_trains_by_composite_ops_stays_so(name: str, tmp_path: Path) -> None:
    model, picture = make(name), torch.randn(3, 40, 52)
    plain = WholePictures(model, scratch=tmp_path)
    wanted = collected(plain, picture)
    model = for_training(model.train(), strict=True)
    before = [(type(each), each.training) for each in model.modules()]
    whole = WholePictures(model, scratch=tmp_path)
    assert torch.equal(collected(whole, picture), wanted)
    assert whole._digest == plain._digest  # one goes on where the other was
    assert [(type(each), each.training) for each in model.modules()] == before
    assert all(x.requires_grad for x in model.parameters())


@pytest.mark.parametrize("name", ["vittt-middle", "mambar", "linear-vit3"])
def test_the_default_dtype_does_not_matter(name: str) -> None:
    model, picture = make(name), torch.randn(3, 40, 52)
    wanted = collected(WholePictures(model), picture)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(collected(WholePictures(model), picture), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_tokens_may_be_stored_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    in_bands(monkeypatch, 40)
    model, picture = make("vittt"), torch.randn(3, 40, 52)
    whole = WholePictures(model, storage=torch.bfloat16)
    exact = WholePictures(model)
    rounded, wanted = collected(whole, picture), collected(exact, picture)
    assert not torch.equal(rounded, wanted)
    assert_close(rounded, wanted, 1.5e-2)
    stored = exact.plan((40, 52)).scratch
    assert whole.plan((40, 52)).scratch == stored / 2


@pytest.mark.parametrize("name", ["vittt", "vit3", "mambar"])
def test_weights_may_be_packed_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ from those in float32 by 4e-3. The picture has the model's own positions."""
    in_bands(monkeypatch, 24)
    model, picture = make(name), torch.randn(3, 32, 32)
    fast = for_inference(model, dtype=torch.bfloat16, strict=True)
    wanted, _ = model.split_tokens(fast.forward_features(picture[None]))
    whole = WholePictures(model, dtype=torch.bfloat16)
    assert_close(collected(whole, picture).flatten(0, 1), wanted[0], 1e-3)


@pytest.mark.parametrize(
    "name", ["vrwkv", "vrwkv-post", "linear-vit", "linear-vit3", "linear-registers"]
)
def test_states_are_float32_where_weights_are_bfloat16(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the model in float32 with the same packed layers.

    In other summation orders a factor of a product is rounded to its other neighbour now and then,
    which changes few tokens. A state that is rounded to bfloat16 after each band changes half of
    the tokens by more than 3e-4. The picture has the model's own positions.
    """
    in_bands(monkeypatch, 24)
    model, picture = make(name), torch.randn(3, 32, 32)
    found = collected(WholePictures(model, dtype=torch.bfloat16), picture).flatten(0, 1)
    model.patch_embed.proj = PackedPatches(model.patch_embed.proj, torch.bfloat16)
    for place, layer in list(model.blocks.named_modules()):
        if isinstance(layer, nn.Linear):
            model.blocks.set_submodule(place, PackedLinear(layer, torch.bfloat16))
    with torch.no_grad():
        wanted, _ = model.split_tokens(model.forward_features(picture[None]))
    errors = (found - wanted[0]).abs().amax(-1) / wanted.abs().max()
    assert errors.median() < 1e-4


@pytest.mark.parametrize(("classes", "dtype"), [(6, torch.uint8), (300, torch.int32)])
def test_it_segments_as_the_segmenter_does(
    classes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_bands(monkeypatch, 40)
    monkeypatch.setattr(whole_model, "_WINDOW", 4000)
    monkeypatch.setattr(whole_model, "_WINDOW_ROWS", 2)
    segmenter = LinearSegmenter(TokenMap(make("vittt", dynamic_img_pad=False)), classes).eval()
    nn.init.normal_(segmenter.head.weight)
    picture = torch.randn(3, 43, 58)
    with torch.no_grad():
        wanted = segmenter(picture[None])[0].argmax(0)
    labels = torch.zeros(43, 58, dtype=dtype)
    for rows, part in WholePictures(segmenter).labels(picture):
        assert part.dtype == dtype
        labels[rows] = part
    assert wanted.max() > 0.9 * (classes - 1)
    assert (labels == wanted).float().mean() > 0.999


class _Gaps(TensorPicture):
    """A picture whose first ten columns have no data, read by a library that takes memory."""

    has_gaps, memory = True, 2**30

    def has_data(self, first: int, last: int) -> torch.Tensor:
        return (torch.arange(self.width) >= 10).expand(last - first, -1)


def test_pixels_without_data_have_a_label_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    in_bands(monkeypatch, 40)
    segmenter = LinearSegmenter(TokenMap(make("vittt")), 6)
    whole, picture = WholePictures(segmenter), _Gaps(torch.randn(3, 43, 58))
    plain = torch.cat([labels for _, labels in whole.labels(picture.pixels)])
    labels = torch.cat([labels for _, labels in whole.labels(picture)])
    assert (labels[:, :10] == 255).all()
    assert torch.equal(labels[:, 10:], plain[:, 10:])
    assert whole.plan(picture).memory == whole.plan((43, 58)).memory + 2**30
    whole = WholePictures(LinearSegmenter(TokenMap(make("vittt")), 256))
    with pytest.raises(ValueError, match=r"the model has 256 classes; .* support at most 255"):
        next(whole.labels(picture))


def test_its_arguments_are_checked() -> None:
    model = make("vittt")
    with pytest.raises(TypeError, match="must be a plain backbone"):
        WholePictures(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="accepted: a number of bytes, or of B, KiB"):
        WholePictures(model, memory="2 pounds")
    with pytest.raises(TypeError, match=r"memory is 2\.5"):
        WholePictures(model, memory=2.5)
    with pytest.raises(ValueError, match=r"storage is torch\.float16"):
        WholePictures(model, storage=torch.float16)
    sizes = [WholePictures(model, memory=size).memory for size in ("1.5 GB", "2GiB", 4096)]
    assert sizes == [1_500_000_000, 2**31, 4096]
    other = make("vittt")
    other.blocks[0] = nn.Identity()
    with pytest.raises(ValueError, match=r"blocks.0 is a Identity; in bands there are VitttBlock"):
        WholePictures(other)
    with pytest.raises(ValueError, match=r"attn\.inner is a TTTLinearInner; in bands"):
        WholePictures(make("linear-vit", inner="ttt_linear"))
    with pytest.raises(ValueError, match="rotary positions have no form in bands"):
        WholePictures(make("linear-vit", base="vit_small_patch16_rope_224"))
    model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"blocks.1 has no form in bands: mlp has a hook"):
        WholePictures(model)


def test_pictures_are_checked() -> None:
    whole = WholePictures(make("vittt", dynamic_img_pad=False))
    with pytest.raises(ValueError, match="not whole patches"):
        whole.plan((43, 58))
    with pytest.raises(ValueError, match="the picture has 1 channels, the model 3"):
        whole.logits(torch.zeros(1, 40, 40))
    with pytest.raises(ValueError, match=r"must be \[C, H, W\], got \[1, 3, 40, 40\]"):
        whole.logits(torch.zeros(1, 3, 40, 40))
    with pytest.raises(TypeError, match=r"is a NumPy array; give ArrayPicture"):
        whole.logits(np.zeros((40, 40, 3), np.uint8))
    with pytest.raises(TypeError, match=r"is a str; give .* open_picture"):
        whole.logits("scene.tif")
    with pytest.raises(TypeError, match=r"size .* \(40.5, 40\); accepted: \(height, width\)"):
        whole.plan((40.5, 40))
    with pytest.raises(TypeError, match=r"size is 'scene.tif'; accepted: \(height, width\)"):
        whole.plan("scene.tif")
    with pytest.raises(TypeError, match=r"labels\(\) is for a LinearSegmenter"):
        next(whole.labels(torch.zeros(3, 40, 40)))


def test_nan_is_told_before_any_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    in_bands(monkeypatch, 16)
    picture, steps = torch.zeros(3, 32, 64), []
    picture[1, 21, 40] = torch.nan
    whole = WholePictures(make("vittt"))
    with pytest.raises(ValueError, match="NaN or infinite pixels in its rows 20 to 23"):
        next(whole.tokens(picture, report=lambda *done: steps.append(done)))
    assert len(steps) == 5  # bands of the patches


def test_the_memory_decides_on_the_bands() -> None:
    size = 16384, 16384
    model = make("vittt", dynamic_img_pad=False)
    plenty = WholePictures(model, memory="8GiB", scratch="unused").plan(size)
    little = WholePictures(model, memory="960MiB", scratch="unused").plan(size)
    assert little.memory <= 960 * 2**20 < plenty.memory <= 2**33
    assert little.rows < plenty.rows
    assert plenty.scratch > 2 * 4 * 96 * 4096**2
    with pytest.raises(ValueError, match=r"needs at least .* beside the scratch folder"):
        WholePictures(model, memory="900MiB", scratch="unused").plan(size)
    with pytest.raises(ValueError, match="with a scratch folder less is enough"):
        WholePictures(model, memory="1GiB").plan(size)


def test_a_plan_may_be_of_a_tensor_and_logits_without_a_pool_are_refused_at_once() -> None:
    model = timm.create_model(
        "vittt_nano_patch4_32", depth=1, dynamic_img_size=True, global_pool="", num_classes=3
    )
    whole, picture, steps = WholePictures(model), torch.zeros(3, 32, 64), []
    assert whole.plan(picture) == whole.plan((32, 64)) == whole.plan([32, 64])
    with pytest.raises(ValueError, match="a picture of 32 × 0 pixels has no tokens"):
        whole.plan((32, 0))
    with pytest.raises(ValueError, match="the picture is on meta; give it on the CPU"):
        whole.plan(picture.to("meta"))
    with pytest.raises(ValueError, match="pools nothing"):
        whole.logits(picture, report=lambda *done: steps.append(done))
    assert not steps
