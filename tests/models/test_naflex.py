"""Batches of images of any shapes, as timm's NaFlex loader collates them."""

from functools import partial

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_naflex_loader
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from torch import nn

import vision_ttt
from tolerances import assert_close

NANO = {"depth": 1, "patch_size": 4, "img_size": 32, "num_classes": 5, "dynamic_img_size": True}
LINEAR = {"patch_size": 4, "img_size": 32, "depth": 1, "num_classes": 5}
MODELS = {
    "vittt": partial(timm.create_model, "vittt_nano_patch4_32", **NANO),
    "vit3": partial(timm.create_model, "vit3_nano_patch4_32", **NANO),
    "vim": partial(timm.create_model, "vim_nano_patch4_32", **NANO),
    "mambar": partial(timm.create_model, "mambar_nano_patch4_32", **NANO),
    "vrwkv": partial(timm.create_model, "vrwkv_nano_patch4_32", **NANO),
    "linear": partial(
        timm.create_model, "linear_vit", base="eva02_tiny_patch14_224", class_token="keep", **LINEAR
    ),
}
VARIANTS = {
    "max_norm": ("vittt", {"global_pool": "max_norm"}),
    "head": ("vittt", {"global_pool": "head"}),
    "middle": ("vittt", {"global_pool": "middle", "design": "ttt_layer"}),
    "double": ("vittt", {"global_pool": "double", "design": "one_way"}),
    "post_norm": ("vrwkv", {"post_norm": True, "init_scale": 0.5}),
    "vit3_inner": ("linear", {"inner": "vit3"}),
}
ALIKE = {  # to those
    "mlp": ("vittt", {"inner_model": "mlp"}),
    "end": ("vim", {"global_pool": "end"}),
    "first": ("mambar", {"global_pool": "first"}),
    "no_registers": ("mambar", {"distribution": "none"}),
    "ttt_linear_inner": ("linear", {"inner": "ttt_linear"}),
}
SIZES = [(32, 32), (16, 24), (40, 12), (16, 24), (4, 28)]


def images(dtype=torch.float64):
    torch.manual_seed(1)
    return [torch.randn(3, height, width, dtype=dtype) for height, width in SIZES]


def batch_of(pictures, padding=float("nan")):
    """Pictures as timm patchifies and collates them, with a value where the padding is."""
    batch, _ = NaFlexCollator(80)([(Patchify(4)(picture), 0) for picture in pictures])
    batch["patches"] = batch["patches"].to(pictures[0].dtype)  # the collator's is float32
    for row, picture in zip(batch["patches"], pictures, strict=True):
        patches = Patchify(4)(picture)["patches"]
        row[: len(patches)] = patches
    batch["patches"][~batch["patch_valid"]] = padding
    return batch


def moved(model):
    """No parameter is at its initial value: a zero would hide what multiplies it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def make(name, **arguments):
    torch.manual_seed(0)
    return moved(MODELS[name](**arguments)).double()


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs, allow_unused=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(pytest.param(name, {}, id=name) for name in MODELS),
        *(pytest.param(*given, id=name) for name, given in VARIANTS.items()),
        *(pytest.param(*given, id=name, marks=pytest.mark.slow) for name, given in ALIKE.items()),
    ],
)
def test_a_batch_equals_the_loop_over_its_images_though_its_padding_is_nan(name, arguments):
    model, pictures = make(name, **arguments), images()
    parameters = list(model.parameters())
    weights = torch.randn(len(SIZES), 5, dtype=torch.float64)
    batch = batch_of(pictures)
    batch["patches"].requires_grad_()
    logits = model(batch)
    singles = [picture[None].requires_grad_() for picture in pictures]
    expected = torch.cat([model(single) for single in singles])
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
    *of_batch, of_patches = gradients((logits * weights).mean(), *parameters, batch["patches"])
    of_loop = gradients((expected * weights).mean(), *parameters, *singles)
    of_images = of_loop[len(parameters) :]
    torch.testing.assert_close(of_batch, list(of_loop[: len(parameters)]), rtol=1e-7, atol=1e-11)
    expected = batch_of([each[0] for each in of_images], padding=0.0)["patches"]
    torch.testing.assert_close(of_patches, expected, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_features_are_where_their_patches_are_and_zero_at_the_padding(name):
    model, pictures = make(name), images()
    batch = batch_of(pictures)
    features = model.forward_features(batch)
    valid = features["patch_valid"]
    assert torch.equal(valid, batch["patch_valid"])
    assert torch.equal(features["patch_coord"], batch["patch_coord"])
    assert not features["patches"][~valid].any()
    for index, picture in enumerate(pictures):
        tokens, others = model.split_tokens(model.forward_features(picture[None]))
        torch.testing.assert_close(features["patches"][index][valid[index]], tokens[0])
        if others is not None:
            torch.testing.assert_close(features["class_tokens"][index], others[0])
    torch.testing.assert_close(model.forward_head(features), model(batch))
    final, taken = model.forward_intermediates(batch, indices=[0], norm=True, output_fmt="NLC")
    torch.testing.assert_close(final["patches"], features["patches"])
    expected = model.forward_intermediates(pictures[1][None], [0], norm=True, output_fmt="NLC")
    torch.testing.assert_close(taken[0][1][valid[1]], expected[1][0][0])
    if others is not None:
        _, taken = model.forward_intermediates(
            batch, indices=[0], output_fmt="NLC", return_prefix_tokens=True
        )
        assert taken[0][1].shape == features["class_tokens"].shape
    with pytest.raises(ValueError, match="'NLC'"):
        model.forward_intermediates(batch)


def test_a_head_of_tokens():
    model, pictures = make("mambar", global_pool=""), images()
    model.reset_classifier(5, "")
    model = moved(model)
    batch = batch_of(pictures)
    logits = model(batch)
    tokens, others = model.split_tokens(model(pictures[2][None]))
    torch.testing.assert_close(logits["patches"][2][batch["patch_valid"][2]], tokens[0])
    torch.testing.assert_close(logits["class_tokens"][2], others[0])
    assert not logits["patches"][~batch["patch_valid"]].any()


def test_patches_may_be_in_any_order_and_not_flattened():
    model, batch = make("vittt"), batch_of(images())
    order = torch.randperm(80)
    shuffled = {key: batch[key][:, order] for key in ("patches", "patch_coord", "patch_valid")}
    shuffled["patches"] = shuffled["patches"].unflatten(-1, (4, 4, 3))
    torch.testing.assert_close(model(shuffled), model(batch))
    features, expected = model.forward_features(shuffled), model.forward_features(batch)
    torch.testing.assert_close(features["patches"], expected["patches"][:, order])


class Pictures(torch.utils.data.Dataset):
    """24 pictures of six shapes."""

    transform = None

    def __len__(self):
        return 24

    def __getitem__(self, index):
        shape = (8 + 4 * (index % 3), 8 + 4 * (index % 2), 3)
        pixels = np.random.default_rng(index).integers(0, 256, shape, dtype=np.uint8)
        image = Image.fromarray(pixels)
        return image if self.transform is None else self.transform(image), index % 10


def timms_loader(training):
    return create_naflex_loader(
        Pictures(),
        patch_size=4,
        train_seq_lens=(4, 9, 16),
        max_seq_len=16,
        batch_size=8,
        is_training=training,
        num_workers=0,
        device=torch.device("cpu"),
        pin_memory=False,
    )


@pytest.mark.parametrize("training", [True, False])
def test_timms_loader_transforms_and_collation_unchanged(training):
    model = MODELS["vittt"](num_classes=10).train(training)
    count = 0
    for batch, labels in timms_loader(training):
        logits = model(batch)
        count += len(labels)
        assert logits.shape == (len(labels), 10)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert count == 24


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "for_inference") for name in ("vittt", "vit3", "vim", "mambar")),
        *((name, "for_training") for name in ("vittt", "vim")),
        ("vittt", "checkpointing"),
        pytest.param("vittt", "compile", marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_run_a_model_give_the_same(name, how):
    model = MODELS[name]()
    batch = batch_of(images(torch.float32))
    expected = model(batch)
    if how == "for_inference":
        other = vision_ttt.for_inference(model)
    elif how == "for_training":
        other = vision_ttt.for_training(model)
    elif how == "compile":
        other = torch.compile(model, backend="eager")
    else:
        other = model
        other.set_grad_checkpointing()
    logits = other(batch)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    if how != "for_inference":
        parameters = list(model.parameters())
        torch.testing.assert_close(
            gradients(logits.square().sum(), *parameters),
            gradients(expected.square().sum(), *parameters),
            rtol=1e-3,
            atol=1e-3,
        )


def test_bfloat16_under_autocast():
    model, batch = MODELS["vittt"](), batch_of(images(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    assert logits.isfinite().all()
    assert_close(logits, model(batch), 1e-2)


def changed(**others):
    return {**batch_of(images(torch.float32)), **others}


def displaced(rows, widths):
    """Coordinates whose last one of image 0 is some rows, or widths of the grid, further on."""
    batch = batch_of(images(torch.float32))
    coord, last = batch["patch_coord"].clone(), batch["patch_valid"][0].sum() - 1
    width = coord[0, : last + 1, 1].max() + 1
    coord[0, last] += torch.stack([torch.tensor(rows), width * widths])
    return coord


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({}, ValueError, "lacks patches, patch_coord, patch_valid"),
        (changed(patches=None), TypeError, "patches must be a tensor of floating point"),
        (changed(patches=torch.zeros(5, 80, 47)), ValueError, r"\[5, 80, 48\].*\[5, 80, 47\]"),
        (changed(patches=torch.zeros(5, 79, 48)), ValueError, r"got \[5, 79, 48\]"),
        (changed(patch_valid=torch.ones(5, 80)), TypeError, "bool, got torch.float32"),
        (changed(patch_coord=torch.zeros(5, 80, 2)), TypeError, "int64 or int32"),
        (changed(patch_coord=torch.zeros(5, 80, 3, dtype=torch.long)), ValueError, r"\[B, N, 2\]"),
        (changed(patch_coord=torch.zeros(5, 80, 2, dtype=torch.long)), ValueError, "image 0 of"),
        (changed(patch_coord=displaced(1, -1)), ValueError, "image 0 of"),  # one place
        (changed(patch_coord=displaced(2**62, 0)), ValueError, "image 0 of"),
        (changed(patch_valid=torch.ones(5, 0, dtype=torch.bool)), ValueError, "at least one patch"),
        (changed(patch_valid=torch.zeros(5, 80, dtype=torch.bool)), ValueError, "has 0 valid"),
        (changed(patch_valid=torch.ones(5, 80, dtype=torch.bool)), ValueError, "80 valid patches"),
    ],
)
def test_what_is_no_batch_is_refused(batch, error, message):
    with pytest.raises(error, match=message):
        MODELS["vittt"]()(batch)


def test_models_that_take_no_patches_say_so():
    batch = batch_of(images(torch.float32))
    fixed = MODELS["vittt"](dynamic_img_size=False)
    with pytest.raises(ValueError, match=r"4 × 6 patches.*8 × 8.*dynamic_img_size"):
        fixed(batch)
    with pytest.raises(ValueError, match="overlap"):
        MODELS["vim"](stride=2)(batch)
    with pytest.raises(ValueError, match="takes no mask"):
        MODELS["vittt"]().forward_features(batch, torch.zeros(5, 80, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"patch_drop_rate is 0\.5"):
        MODELS["vittt"](patch_drop_rate=0.5)(batch)
    with pytest.raises(ValueError, match="cannot be exported"):
        torch.export.export(MODELS["vittt"](), (batch,))


@pytest.mark.parametrize("name", ["vim", "mambar"])
def test_a_head_needs_the_class_tokens_of_each_image(name):
    model = MODELS[name]()
    features = model.forward_features(batch_of(images(torch.float32)))
    tokens = features.pop("class_tokens")
    with pytest.raises(ValueError, match="class_tokens are missing"):
        model.forward_head(features)
    with pytest.raises(ValueError, match="10 images are not those of the batch, 5"):
        model.forward_head({**features, "class_tokens": tokens.repeat(2, 1, 1)})
