"""DiT³: the released model, construction by timm, and initialisation."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.models import group_parameters

from tolerances import assert_close
from vision_ttt import convert
from vision_ttt.bench import count_macs, count_parameters
from vision_ttt.convert.dit3 import DIT3
from vision_ttt.layers import AdaptiveNorm
from vision_ttt.layers.sincos2d import sincos_table
from vision_ttt.models import DiT3, create_model

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = {"input_size": 8, "hidden_size": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def small(**options):
    """A DiT³ in which every parameter affects the output."""
    torch.manual_seed(0)
    model = DiT3(**{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs(batch=2, channels=4, size=(8, 8), classes=5):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, channels, *size, generator=generator)
    t = 1000 * torch.rand(batch, generator=generator)
    return x, t, torch.randint(classes, (batch,), generator=generator)


def test_released_model():
    tensors = load_file(GOLDEN / "dit3_model.safetensors")
    description = json.loads((GOLDEN / "dit3_model.json").read_text())
    tolerance = description["tolerance"]
    model = DiT3(**description["config"]["kwargs"]).eval()
    released = {key[8:]: x for key, x in tensors.items() if key.startswith("weights.")}
    model.load_state_dict(convert.remap(released, model))

    x, t, y = (tensors[f"input.{name}"] for name in "xty")
    twice = torch.cat((x[:1], x[:1]))
    scale = description["config"]["cfg_scale"]
    with torch.no_grad():
        outputs = {"out_cfg": model.forward_with_cfg(twice, t, tensors["input.y_cfg"], scale)}
    for name, part in [
        ("t_emb", model.time_embed),
        *((f"block{index}", block) for index, block in enumerate(model.blocks)),
    ]:
        part.register_forward_hook(lambda *a, name=name: outputs.update({name: a[2]}))
    outputs["out"] = model(x.requires_grad_(), t, y)
    (outputs["out"] * tensors["input.proj_out"]).sum().backward()
    for key, got in outputs.items():
        assert_close(got, tensors[f"output.{key}"], tolerance["forward"], key)

    names = DIT3.released_name
    gradients = {names(key): p.grad for key, p in model.named_parameters()}
    gradients["input.x"] = x.grad
    wanted = [key for key in tensors if key.startswith("output.grad.")]
    assert len(wanted) == 24
    for key in wanted:
        gradient = gradients[key.removeprefix("output.grad.")]
        assert_close(gradient, tensors[key].view_as(gradient), tolerance["gradients"], key)


@pytest.mark.parametrize("patch", [8, 4, 2])
@pytest.mark.parametrize(("size", "dim"), [("small", 384), ("base", 768)])
def test_sizes_are_the_supplements(size, dim, patch):
    """Table 3 gives width, heads, depth and patch; the parameters follow from them."""
    with torch.device("meta"):
        model = create_model(f"dit3_{size}_patch{patch}_32")
    assert isinstance(model, DiT3)
    heads = {384: 6, 768: 12}[dim]
    d = dim // heads
    assert (len(model.blocks), model.blocks[0].ttt.num_heads) == (12, heads)
    ttt = (dim + 1) * 3 * (dim + d) + (dim + d + 1) * dim + 2 * dim * d + 9 * d
    mlp = 8 * dim**2 + 5 * dim
    block = 10 * dim + ttt + mlp + 6 * dim * (dim + 1)
    embeddings = (4 * patch**2 + 1) * dim + 257 * dim + (dim + 1) * dim + 1001 * dim
    head = 2 * dim * (dim + 1) + (dim + 1) * 8 * patch**2
    assert count_parameters(model) == 12 * block + embeddings + head


def test_macs_grow_linearly_with_the_tokens():
    with torch.device("meta"):
        model = create_model("dit3_small_patch2_32", depth=1)
    sizes = (16, 32, 64)
    first, second, third = (count_macs(model, (4, size, size)) for size in sizes)
    assert third - second == 4 * (second - first) > 0  # but for the conditions, of no token


def test_timms_words_and_ours_build_the_same():
    theirs = create_model("dit3_nano_patch4_32", in_chans=1, img_size=(16, 24), num_classes=7)
    ours = create_model("dit3_nano_patch4_32", in_channels=1, input_size=(16, 24), num_classes=7)
    for model in (theirs, ours):
        assert (model.in_channels, model.input_size, model.num_classes) == (1, (16, 24), 7)
        assert model.pretrained_cfg["input_size"] == (1, 16, 24)
        assert model.pretrained_cfg["mean"] == (0.5,)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    # timm's defaults of other models of the family stay what they were
    assert create_model("dit3_nano_patch4_32").pretrained_cfg["input_size"] == (3, 32, 32)
    with pytest.raises(TypeError, match="hidden"):
        create_model("dit3_nano_patch4_32", hidden=3)


def test_it_starts_from_zero():
    torch.manual_seed(0)
    model = DiT3(**SMALL)
    assert model(*inputs()).abs().max() == 0
    x, c = torch.randn(2, 16, 32), torch.randn(2, 32)
    block = model.blocks[0]
    assert torch.equal(block(x, c, (4, 4)), block.cpe(x, (4, 4)))
    for name, weight in model.named_parameters():
        if name.startswith("head.linear") or ".modulation." in name or name.endswith("bias"):
            assert weight.abs().max() == 0, name
    bound = math.sqrt(6 / (32 + 3 * (32 + 16)))  # of Xavier's uniform
    qkv = block.ttt.qkv.weight
    assert 0.9 * bound < qkv.abs().max() <= bound
    bound = math.sqrt(6 / (32 + 4 * 2 * 2))
    assert 0.9 * bound < model.patch_embed.weight.abs().max() <= bound
    large = DiT3(hidden_size=384, depth=1)
    for weight in (large.label_embed.table.weight, large.time_embed.mlp[2].weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_adaptive_norm():
    x, shift, scale = torch.randn(2, 3, 8), torch.randn(2, 8), torch.randn(2, 8)
    x = 1e-3 * x  # where ε counts
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = normal * (1 + scale[:, None]) + shift[:, None]
    assert_close(AdaptiveNorm(8)(x, shift, scale), wanted, 1e-5)


def test_everything_learns():
    """One step after initialisation, where gates are zero, every parameter has a gradient."""
    model = small()
    (model(*inputs()) * torch.randn(2, 8, 8, 8)).sum().backward()
    assert [name for name, p in model.named_parameters() if not p.grad.abs().max() > 0] == []


@pytest.mark.parametrize("size", [(8, 8), (4, 12), (14, 6)])
def test_any_size_of_whole_patches(size):
    model = small(learn_sigma=False)
    x, t, y = inputs(size=size)
    assert model(x, t, y).shape == x.shape
    # Rows and columns differ: transposing the image does not transpose the output.
    turned = model(x.mT.contiguous(), t, y).mT
    assert not torch.allclose(turned, model(x, t, y), atol=1e-2)


def test_position_table_tells_columns_then_rows():
    table = sincos_table((2, 3), 8).unflatten(0, (2, 3))
    assert torch.equal(table[0, :, :4], table[1, :, :4])
    assert torch.equal(table[:, 0, 4:], table[:, 2, 4:])
    expected = [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]
    assert table[0, 2, :4].tolist() == pytest.approx(expected)
    assert sincos_table((1, 60_000), 4)[-1, 0].item() == pytest.approx(math.sin(59_999), abs=1e-6)
    with pytest.raises(ValueError, match="multiple of 4 channels, got 6"):
        sincos_table((2, 2), 6)


def test_each_patch_is_put_back_where_it_was():
    model = small(learn_sigma=False, in_channels=3, input_size=(8, 12), patch_size=4)
    with torch.no_grad():
        tokens = torch.arange(6 * 48.0).view(1, 6, 48)
        out = model._unpatchify(tokens, (2, 3))
    assert out.shape == (1, 3, 8, 12)
    # token (1, 2), pixel (3, 1), channel 2
    assert out[0, 2, 4 + 3, 8 + 1] == tokens[0, 1 * 3 + 2, (3 * 4 + 1) * 3 + 2]


@pytest.mark.parametrize("channels", [4, 3])
def test_guidance(channels):
    model = small(in_channels=channels)
    x, t, y = inputs(batch=2, channels=channels)
    none = torch.full_like(y, 5)
    with torch.no_grad():
        with_class, without = model(x, t, y), model(x, t, none)
        doubled = (torch.cat((x, x + 1)), torch.cat((t, t + 1)), torch.cat((y, none)))
        out = model.forward_with_cfg(*doubled, 3.0)
        every = model.forward_with_cfg(*doubled, 3.0, guided_channels=channels)
        once = model.forward_with_cfg(*doubled, 1.0, guided_channels=channels)
    guided = without + 3.0 * (with_class - without)
    for half, own in zip(out.chunk(2), (with_class, without), strict=True):
        assert_close(half[:, :3], guided[:, :3], 1e-5)
        assert_close(half[:, 3:], own[:, 3:], 1e-5)
    assert_close(every[:2, :channels], guided[:, :channels], 1e-5)
    assert_close(once[:2], with_class, 1e-5)


def test_guidance_of_one_channel():
    model = small(in_channels=1, learn_sigma=False)
    x, t, y = inputs(channels=1)
    none = torch.full_like(y, 5)
    with torch.no_grad():
        out = model.forward_with_cfg(x.repeat(2, 1, 1, 1), t.repeat(2), torch.cat((y, none)), 2.0)
        wanted = 2 * model(x, t, y) - model(x, t, none)
    assert_close(out, wanted.repeat(2, 1, 1, 1), 1e-5)


def test_labels_are_dropped_in_training_alone():
    model = small(class_dropout_prob=0.25)
    x, t, _ = inputs(batch=1)
    y = torch.zeros(4000, dtype=torch.int64)
    embedding = model.label_embed
    none = embedding.table.weight[5]
    torch.manual_seed(0)
    dropped = (embedding.train()(y) == none).all(dim=1)
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert not (embedding.eval()(y) == none).all(dim=1).any()
    without = small(class_dropout_prob=0.0)
    assert without.label_embed.table.num_embeddings == 5
    assert torch.equal(without.train()(x, t, y[:1]), without.eval()(x, t, y[:1]))
    with pytest.raises(ValueError, match=r"classes 0 to 4, got \[5\]"):
        without(x, t, torch.tensor([5]))


def test_gradient_checkpointing_changes_nothing():
    x, t, y = inputs()
    gradients, runs = [], []
    for checkpointing in (False, True):
        model = small()
        model.set_grad_checkpointing(checkpointing)
        model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
        model(x, t, y).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert len(runs) == 1 + 2  # once more in the backward pass
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_time_is_embedded_in_float32_whatever_the_rest():
    t = torch.tensor([999.0, 998.0])
    full, half = small(), small().bfloat16()
    heard = []
    half.time_embed.mlp[0].register_forward_hook(lambda _m, given, _o: heard.append(given[0]))
    half.time_embed(t)
    assert heard[0].dtype == torch.bfloat16
    frequencies = 10_000 ** (-torch.arange(128, dtype=torch.float64) / 128)
    angles = t.double()[:, None] * frequencies
    assert_close(heard[0], torch.cat((angles.cos(), angles.sin()), dim=1), 5e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        x, t, y = inputs()
        low = full(x, t, y)
    with torch.no_grad():
        assert_close(low, full(x, t, y), 1.5e-2)


def test_gradients_of_single_images():
    """By vmap, in which one tensor holds the labels of all images."""
    model, each = small(), inputs(batch=3)

    def loss(parameters, *one):
        arguments = tuple(x.unsqueeze(0) for x in one)
        return torch.func.functional_call(model, parameters, arguments).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))
    got = gradients(dict(model.named_parameters()), *each)
    model(*each).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(got[name].sum(0), parameter.grad, 1e-4, name)


def test_compiles_as_one_graph():
    model = small(depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(*inputs()), model(*inputs()), 1e-5)


def test_layers_and_decay():
    model = small()
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert layers["time_embed.mlp.0.weight"] == layers["patch_embed.weight"] == 0
    assert layers["blocks.1.ttt.w1"] == 2
    assert layers["head.linear.weight"] == max(layers.values())
    assert "blocks.0.ttt.w2" in model.no_weight_decay()
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.zeros(2, 3, 8, 8)}, r"x must be \[B, 4, H, W\], got \[2, 3, 8, 8\]"),
        ({"x": torch.zeros(4, 8, 8)}, r"x must be \[B, 4, H, W\], got \[4, 8, 8\]"),
        ({"x": torch.zeros(2, 4, 8, 9)}, "images of 8 × 9 are not whole patches of 2 × 2"),
        ({"t": torch.zeros(3)}, r"t and y must be \[2\].*got \[3\] and \[2\]"),
        ({"t": torch.tensor(3.0)}, r"got \[\] and \[2\]"),
        ({"y": torch.zeros(2, 1, dtype=torch.int64)}, r"got \[2\] and \[2, 1\]"),
        ({"y": torch.zeros(2)}, "y must be classes as int64 or int32, got torch.float32"),
        ({"y": torch.tensor([0, 6])}, r"classes 0 to 5, 5 being none, got \[0, 6\]"),
        ({"y": torch.tensor([-1, 0])}, r"classes 0 to 5, 5 being none, got \[-1, 0\]"),
    ],
)
def test_inputs_that_do_not_fit(change, told):
    given = {**dict(zip("xty", inputs(), strict=True)), **change}
    with pytest.raises(ValueError, match=told):
        small()(**given)


def test_what_is_no_tensor_is_refused():
    x, _, y = inputs()
    with pytest.raises(TypeError, match="t must be a tensor, got int"):
        small()(x, 17, y)


def test_guidance_that_does_not_fit():
    model = small()
    with pytest.raises(ValueError, match=r"two halves, got \[3, 4, 8, 8\]"):
        model.forward_with_cfg(*inputs(batch=3), 2.0)
    with pytest.raises(ValueError, match="guided_channels is 9; accepted: 1 to 8"):
        model.forward_with_cfg(*inputs(), 2.0, guided_channels=9)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hidden_size": 34}, "hidden_size is 34; it must be a multiple of 4"),
        ({"num_heads": 3}, "dim must be a multiple of num_heads, got 32 and 3"),
        ({"class_dropout_prob": 1.0}, r"class_dropout_prob is 1.0; accepted: 0 to below 1"),
        ({"num_classes": 0, "class_dropout_prob": 0}, "would accept no label"),
        ({"input_size": 9}, "images of 9 × 9 are not whole patches of 2 × 2"),
        ({"patch_size": 0}, "patch_size is 0; accepted: 1 to 16,384"),
    ],
)
def test_arguments_out_of_range(options, told):
    with pytest.raises(ValueError, match=told):
        DiT3(**{**SMALL, **options})


def test_a_batch_without_images():
    model = small()
    x, t, y = inputs(batch=0)
    out = model(x.requires_grad_(), t, y)
    assert out.shape == (0, *model(*inputs())[0].shape)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert not any(parameter.grad.any() for parameter in model.parameters())
