"""for_inference: the parts that it packs, those that it keeps, and the calls that it refuses."""

import copy
import pickle
from typing import NamedTuple

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tolerances import FORWARD, assert_close
from vision_ttt import for_inference, for_training
from vision_ttt.acceleration.packed_linear import PackedLinear, PackedPatches
from vision_ttt.acceleration.packed_mamba import PackedMambaBlock
from vision_ttt.acceleration.packed_vit3 import PackedVit3Block
from vision_ttt.acceleration.packed_vittt import PackedVitttBlock, PackedVitttBlocks
from vision_ttt.layers import BidirectionalMamba, DirectionalConv1d, SwiGLU, TTTLinear
from vision_ttt.layers.conv_stem import ConvNorm
from vision_ttt.models import create_model

SMALL = {
    "vittt_nano_patch4_32": {"depth": 2},
    "vit3_tiny_patch16_224": {"depth": 2, "img_size": 64},
    "hvit3_tiny": {"depths": (1, 1, 1, 1), "img_size": 64},
    "vim_tiny_patch16_224": {"depth": 2, "img_size": 64},
    "mambar_tiny_patch16_224": {"depth": 2, "img_size": 64},
    "deit_tiny_patch16_224": {"depth": 2, "img_size": 64},
    "convnext_atto": {},
    "resnet18": {},
}


def small(name, **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **SMALL[name], **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # What a new H-ViT³'s first stages compute is below any tolerance of its logits.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images_of(name, count=2):
    side = 32 if "nano" in name else 64
    return torch.randn(count, 3, side, side)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_the_logits_are_the_models(name, dtype):
    model, images = small(name), images_of(name)
    before = copy.deepcopy(model.state_dict())
    fast = for_inference(model, dtype=dtype, strict=True)
    with torch.no_grad():
        wanted = model(images)
    logits = fast(images)
    assert logits.dtype == torch.float32
    assert not logits.requires_grad
    assert_close(logits, wanted, 4e-2 if dtype == torch.bfloat16 else FORWARD[torch.float32])
    for key, x in model.state_dict().items():
        assert torch.equal(x, before[key])
    assert any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dit3(dtype):
    torch.manual_seed(0)
    model = create_model("dit3_small_patch8_32", depth=2)
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    inputs = torch.randn(2, 4, 32, 32), torch.rand(2), torch.tensor([3, 7])
    with torch.no_grad():
        wanted = model(*inputs)
    got = for_inference(model, dtype=dtype, strict=True)(*inputs)
    assert_close(got, wanted, FORWARD[torch.float32] if dtype == torch.float32 else 2e-2)


def test_what_is_packed():
    fast = for_inference(small("vittt_nano_patch4_32"))
    assert isinstance(fast.blocks, PackedVitttBlocks)
    assert all(isinstance(block, PackedVitttBlock) for block in fast.blocks)
    assert isinstance(fast.head, PackedLinear)
    assert isinstance(fast.patch_embed.proj, PackedPatches)
    assert not list(fast.model.blocks.parameters())
    deit = for_inference(small("deit_tiny_patch16_224"))
    assert not any(isinstance(module, nn.Linear) for module in deit.modules())


OURS = [name for name in SMALL if name.startswith(("vi", "hvi", "mamba"))]


@pytest.mark.parametrize("name", OURS)
def test_features_and_other_sizes(name):
    model = small(name, dynamic_img_size=True)
    side = 48 if "nano" in name else 96
    images = torch.randn(1, 3, side, side + 32)
    fast = for_inference(model)
    with torch.no_grad():
        assert_close(fast(images), model(images), 1e-5)
        wanted, maps = model.forward_intermediates(images)
        got, fast_maps = fast.forward_intermediates(images)
    assert_close(got, wanted, 1e-5)
    for a, b in zip(fast_maps, maps, strict=True):
        assert_close(a, b, 1e-5)


def test_feature_extractors():
    model = timm.create_model("vittt_nano_patch4_32", features_only=True, out_indices=(1, 3)).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        wanted = model(images)
    fast = for_inference(model, strict=True)
    for a, b in zip(fast(images), wanted, strict=True):
        assert_close(a, b, 1e-5)
    assert sum(isinstance(m, PackedVitttBlock) for m in fast.modules()) == 4


def test_methods_of_a_model_that_is_cast_take_float32_images():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    fast, x = for_inference(model, dtype=torch.bfloat16), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = fast.forward_features(x)
        assert features.dtype == torch.float32
        assert_close(features, model.forward_features(x), 5e-2)
        _, maps = fast.forward_intermediates(x, indices=2)
        assert [each.dtype for each in maps] == [torch.float32] * 2
        (last,) = fast.get_intermediate_layers(x, n=1, norm=True)
        assert_close(last, features[:, 1:], 1e-6)
        assert_close(fast.forward_head(features), fast(x), 2e-2)


def test_modules_that_are_registered_twice_are_packed_at_both_places():
    linear = torch.nn.Linear(32, 32)
    twice = torch.nn.Sequential(linear, torch.nn.ReLU(), linear)
    fast, x = for_inference(twice), torch.randn(4, 32)
    assert isinstance(fast.model[0], PackedLinear)
    assert fast.model[2] is fast.model[0]
    assert_close(fast(x), twice(x), 1e-5)
    model = timm.create_model("vittt_nano_patch4_32", num_classes=4, depth=3).eval()
    model.blocks[2] = model.blocks[0]
    fast, x = for_inference(model, strict=True), torch.randn(1, 3, 32, 32)
    assert isinstance(fast.model.blocks, PackedVitttBlocks)
    assert_close(fast(x), model(x), 1e-4)


def test_a_block_or_a_layer_alone():
    model, y = small("vittt_nano_patch4_32"), torch.randn(1, 35, 96)
    block = for_inference(model.blocks[0])
    assert isinstance(block.model, PackedVitttBlock)
    with torch.no_grad():
        assert_close(block(y, (5, 7)), model.blocks[0](y, (5, 7)), 1e-5)
        assert_close(for_inference(model.head)(y), model.head(y), 1e-5)


# Parts that it does not support stay as they are.


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def low_rank(block):
    block.mlp.fc1 = LowRank(block.mlp.fc1)


def hook(block):
    block.norm.register_forward_hook(lambda _m, _i, out: 2 * out)


def replaced_part(block):
    block.mlp = nn.Sequential(block.mlp, nn.Tanh())


def replaced_method(block):
    rates = block.mixer.ttt.rates
    block.mixer.ttt.rates = lambda logits: 3 * rates(logits)


def parametrised(block):
    parametrizations.weight_norm(block.mixer.ttt.out_proj)


def pruned(block):
    prune.random_unstructured(block.mlp.fc2, "weight", 0.5)


def subclassed(block):
    ttt = block.mixer.ttt
    ttt.__class__ = type("Own", (type(ttt),), {"rates": lambda self, x: 5 * x.sigmoid()})


def with_bias(linear):
    other = nn.Linear(linear.in_features, linear.out_features)
    nn.init.normal_(other.bias)
    return other


def biased_input(block):
    block.mixer.ttt.in_proj = with_bias(block.mixer.ttt.in_proj)


def biased_output(block):
    block.mixer.ttt.out_proj = with_bias(block.mixer.ttt.out_proj)


def biased_mlp(block):
    block.mlp.fc1 = with_bias(block.mlp.fc1)


def biased_mlp_output(block):
    block.mlp.fc2 = with_bias(block.mlp.fc2)


def other_directions(block):
    block.mixer.ttt.conv_q = DirectionalConv1d(192, 4)


def other_taps(block):
    block.mixer.ttt.conv_q = DirectionalConv1d(192, 3, reverse_channels=96)


def norm_without_bias(block):
    block.norm = nn.LayerNorm(96, bias=False)


def norm_without_weight(block):
    block.mixer.norm = nn.LayerNorm(96, elementwise_affine=False)


def rates_without_bias(block):
    block.mixer.ttt.rate_proj = nn.Linear(96, 6, bias=False)


def negative_rate(block):
    block.mixer.ttt.base_learning_rate = -1.0


CHANGES = {
    biased_input: "mixer.ttt.in_proj has a bias",
    biased_output: "mixer.ttt.out_proj has a bias",
    biased_mlp: "mlp.fc1 has a bias",
    biased_mlp_output: "mlp.fc2 has a bias",
    other_directions: "mixer.ttt.conv_q has reverse_channels=0, not 96",
    other_taps: "conv_k.weight must be [192, 3]",
    norm_without_bias: "norm has no bias",
    norm_without_weight: "mixer.norm has no weight",
    rates_without_bias: "mixer.ttt.rate_proj has no bias",
    negative_rate: "mixer.ttt.base_learning_rate is -1.0",
    low_rank: "mlp.fc1 is a LowRank",
    hook: "norm has a hook",
    replaced_part: "mlp is a Sequential",
    replaced_method: "mixer.ttt has its own rates",
    parametrised: "mixer.ttt.out_proj is a Parametrized",
    pruned: "mlp.fc2 has a hook",
    subclassed: "mixer.ttt is a Own",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_block_stays_and_is_named(change):
    model, images = small("vittt_nano_patch4_32"), images_of("vittt_nano_patch4_32")
    change(model.blocks[1])
    model.eval()
    with torch.no_grad():
        wanted = model(images)
    with pytest.warns(RuntimeWarning, match="blocks.1") as warned:
        fast = for_inference(model)
    assert len(warned) == 1
    assert CHANGES[change] in str(warned[0].message)
    assert "blocks.0" not in str(warned[0].message)
    assert isinstance(fast.blocks[0], PackedVitttBlock)
    assert_close(fast(images), wanted, 1e-5)
    with pytest.raises(ValueError, match=r"blocks\.1"):
        for_inference(model, strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: setattr(b, "norm1", nn.LayerNorm(192, bias=False)), "norm1 has no bias"),
        (
            lambda b: setattr(b.mlp, "fc1", nn.Linear(192, b.mlp.fc1.out_features, bias=False)),
            "mlp.fc1 has no bias",
        ),
    ],
)
def test_parts_of_vit3_without_a_bias_are_named(change, message):
    model, images = small("vit3_tiny_patch16_224"), images_of("vit3")
    change(model.blocks[0])
    with pytest.warns(RuntimeWarning, match=rf"blocks\.0 \({message}"):
        fast = for_inference(model)
    with torch.no_grad():
        assert_close(fast(images), model(images), 1e-5)


def test_a_modulation_without_a_bias_is_named():
    model = create_model("dit3_small_patch8_32", depth=1).eval()
    modulation = model.blocks[0].modulation
    modulation[1] = nn.Linear(modulation[1].in_features, modulation[1].out_features, bias=False)
    with pytest.warns(RuntimeWarning, match=r"blocks\.0 \(modulation\.1 has no bias\)"):
        for_inference(model)


def test_a_changed_part_of_vit3_is_named():
    model = small("vit3_tiny_patch16_224")
    model.blocks[0].ttt.qkv.register_forward_pre_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match=r"blocks\.0 \(ttt.qkv has a hook\)"):
        fast = for_inference(model)
    assert isinstance(fast.blocks[1], PackedVit3Block)
    assert isinstance(fast.blocks[0].mlp.fc1, nn.Linear)  # the whole block is left


def biased(mixer):
    mixer.out_proj = nn.Linear(mixer.inner, 192)


def forth_alone(mixer):
    mixer.conv = DirectionalConv1d(768, 4)


def hooked(mixer):
    mixer.conv.register_forward_hook(lambda *_: None)


def subclassed_mixer(mixer):
    mixer.__class__ = type("Own", (type(mixer),), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forth_alone, "mixer.conv has reverse_channels=0, not 384"),
        (biased, "mixer.out_proj has a bias"),
        (hooked, "mixer.conv has a hook"),
        (subclassed_mixer, "mixer is a Own, not a BidirectionalMamba"),
    ],
)
def test_a_changed_part_of_vim_is_named(change, message):
    model, images = small("vim_tiny_patch16_224"), images_of("vim")
    change(model.blocks[0].mixer)
    with pytest.warns(RuntimeWarning, match=rf"blocks\.0 \({message}\)"):
        fast = for_inference(model)
    assert isinstance(fast.blocks[1], PackedMambaBlock)
    with torch.no_grad():
        assert_close(fast(images), model.eval()(images), 1e-5)


def test_a_block_alone_stays_whole():
    model, y = small("vittt_nano_patch4_32"), torch.randn(1, 35, 96)
    block = model.blocks[0]
    block.norm.register_forward_hook(lambda _m, _i, out: 2 * out)
    with pytest.warns(RuntimeWarning, match=r"the model \(norm has a hook\)"):
        fast = for_inference(block)
    assert not any(isinstance(module, PackedLinear) for module in fast.modules())
    with torch.no_grad():
        assert_close(fast(y, (5, 7)), block(y, (5, 7)), 1e-5)


@pytest.mark.parametrize(
    ("layer", "tokens"),
    [
        (lambda: SwiGLU(32, 64), (2, 7, 32)),
        (lambda: for_training(TTTLinear(32, 2, conv_kernel_size=4)), (2, 7, 32)),
        (lambda: for_training(BidirectionalMamba(32)), (2, 7, 32)),
        (lambda: ConvNorm(3, 8, 1), (2, 3, 6, 5)),
        (lambda: nn.Conv2d(3, 8, 1), (3, 6, 5)),
        (lambda: nn.Conv2d(3, 8, 2, 2), (3, 6, 4)),
        (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 7, 32)),
    ],
    ids=["swiglu", "ttt", "mamba", "conv-norm", "pixels", "patches", "transformer"],
)
def test_layers_alone(layer, tokens):
    module = nn.Sequential(layer()).eval()
    x = torch.randn(tokens)
    for model in (module, module[0]):
        with torch.no_grad():
            assert_close(for_inference(model, strict=True)(x), model(x), 1e-5)


def test_weights_that_others_read():
    for module in (nn.Linear(6, 20), nn.Conv2d(3, 20, (2, 3), (2, 3))):
        for dtype in (torch.float32, torch.bfloat16):
            fast = for_inference(module, dtype=dtype)
            assert torch.equal(fast.weight, module.weight.to(dtype))


@pytest.mark.parametrize("channels_last", [False, True])
def test_maps_of_pixels_lie_as_those_of_a_convolution(channels_last):
    conv, x = nn.Conv2d(3, 8, 1), torch.randn(2, 3, 6, 5)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    with torch.no_grad():
        assert for_inference(conv)(x).stride() == conv(x).stride()
        every_other = for_inference(conv)(x[..., ::2])
        assert every_other.stride() == conv(x[..., ::2]).stride()


def test_maps_of_pixels_under_vmap():
    fast, x = for_inference(nn.Conv2d(3, 8, 1)), torch.randn(2, 3, 6, 5)
    with torch.no_grad():
        assert_close(torch.vmap(fast)(x), fast(x), 1e-5)


@pytest.mark.parametrize("module", [nn.Linear(0, 4), nn.Linear(4, 2, dtype=torch.complex64)])
def test_layers_that_have_no_packed_form(module):
    x = torch.randn(3, module.in_features, dtype=module.weight.dtype)
    fast = for_inference(nn.Sequential(module))
    with torch.no_grad():
        assert torch.equal(fast(x), module(x))


def test_states_that_the_kernels_do_not_take():
    model = timm.create_model("vim_nano_patch4_32", depth=1, state=8)
    with pytest.warns(RuntimeWarning, match="state 8 is not 16"):
        for_inference(model)


def test_sizes_that_the_kernels_do_not_take():
    model = timm.create_model("vittt_nano_patch4_32", depth=1, embed_dim=72)
    with pytest.warns(RuntimeWarning, match="head dimension 24"):
        fast = for_inference(model)
    images = images_of("nano")
    with torch.no_grad():
        assert_close(fast(images), model.eval()(images), 1e-5)


def test_hooked_layers_of_other_models_stay():
    model, seen = small("deit_tiny_patch16_224"), []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    fast = for_inference(model, strict=True)
    fast(images_of("deit"))
    assert seen
    assert type(fast.head) is nn.Linear


def test_without_the_kernels(monkeypatch):
    from vision_ttt.acceleration import inference
    from vision_ttt.ops import _native

    for module in (inference, _native):
        monkeypatch.setattr(module, "LIBRARY", None)
    model, images = small("vittt_nano_patch4_32"), images_of("nano")
    with pytest.warns(RuntimeWarning, match="compiled kernels are missing.*pip install"):
        fast = for_inference(model)
    with torch.no_grad():
        assert_close(fast(images), model(images), 1e-5)


# Evaluation only.


@pytest.fixture(scope="module")
def fast():
    return for_inference(small("vittt_nano_patch4_32"))


def test_it_cannot_be_trained(fast):
    images = images_of("nano")
    for call in (
        fast.train,
        lambda: fast.load_state_dict(fast.state_dict()),
        fast.requires_grad_,
        lambda: fast(images.clone().requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="call for_inference again"):
            call()
    assert not fast.eval().training
    assert fast.requires_grad_(False) is fast
    other = copy.deepcopy(fast)
    other.norm.weight.requires_grad_()
    with torch.no_grad():  # where nobody asks for gradients
        fast(images.clone().requires_grad_())
        other(images)
    with pytest.raises(RuntimeError, match=r"norm\.weight requires a gradient"):
        other(images)


def test_copies(fast):
    images, y = images_of("nano"), torch.randn(1, 64, 96)
    pickled = pickle.dumps(fast)
    for other in (copy.deepcopy(fast), pickle.loads(pickled)):
        assert torch.equal(other(images), fast(images))
        assert torch.equal(other.blocks[1](y, (8, 8)), fast.blocks[1](y, (8, 8)))
        assert not other.training
        shared = [block.weights.untyped_storage().data_ptr() for block in other.blocks]
        assert set(shared) == {other.blocks.weights.untyped_storage().data_ptr()}
    weights = sum(x.nbytes for x in (*fast.parameters(), *fast.buffers()))
    assert weights - fast.blocks.weights.nbytes < len(pickled) < 1.2 * weights


def test_graphs_are_copied_whole():
    fast = for_inference(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    assert isinstance(copy.deepcopy(fast), type(fast))


def test_it_keeps_its_dtypes():
    for dtype in (torch.float32, torch.bfloat16):
        fast = for_inference(small("vittt_nano_patch4_32"), dtype=dtype)
        images = images_of("nano")
        wanted = fast(images)
        for call in (fast.half, fast.double, fast.bfloat16, lambda fast=fast: fast.to("meta")):
            with pytest.raises(RuntimeError, match="keeps its device and dtypes"):
                call()
        assert torch.equal(fast.cpu()(images), wanted)
        for model in (fast, nn.Sequential(fast)):
            with pytest.raises(ValueError, match="has packed this model already"):
                for_inference(model)


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


class TwoFold(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair):
        return Pair(self.linear(pair.first), [self.linear(each) for each in pair.second])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_structured_arguments_and_results(dtype):
    fast, x = for_inference(TwoFold(), dtype=dtype), torch.randn(2, 4)
    pair = fast(Pair(x, [x]))
    assert isinstance(pair, Pair)
    assert pair.first.dtype == pair.second[0].dtype == torch.float32
    with pytest.raises(RuntimeError, match="an argument requires a gradient"):
        fast(Pair(x, [x.clone().requires_grad_()]))


def test_tangents_are_refused(fast):
    images = images_of("nano")
    with pytest.raises(RuntimeError, match="an argument requires a gradient"):
        torch.func.jvp(fast, (images,), (torch.ones_like(images),))


def test_it_is_no_checkpoint(fast):
    for call in (fast.save_pretrained, fast.push_to_hub):
        with pytest.raises(RuntimeError, match="not saved as a checkpoint"):
            call("folder")


def test_under_autocast():
    """The stem's convolutions give maps in bfloat16."""
    model, images = small("hvit3_tiny"), images_of("hvit3")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_close(for_inference(model)(images), model(images), 4e-2)


def test_attributes_are_the_models(fast):
    assert fast.num_classes == 10
    assert fast.pretrained_cfg["first_conv"] == "patch_embed.proj"
    assert fast.forward_features(images_of("nano")).shape == (2, 64, 96)
    with pytest.raises(AttributeError, match="no_such"):
        fast.no_such  # noqa: B018


def test_compiled_and_exported(fast):
    images = images_of("nano")
    wanted = fast(images)
    torch.compiler.reset()
    assert_close(torch.compile(fast, fullgraph=True, backend="aot_eager")(images), wanted, 1e-6)
    exported = torch.export.export(fast, (images,))
    graphs = [m.graph for m in exported.graph_module.modules() if hasattr(m, "graph")]
    targets = [str(node.target) for graph in graphs for node in graph.nodes]
    assert any("packed_vittt_blocks" in target for target in targets)
    assert_close(exported.module()(images), wanted, 1e-6)


def test_multiply_adds_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    for name in OURS:
        model, images = small(name), images_of(name, 1)
        counts = []
        for each in (model, for_inference(model)):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                each(images)
            counts.append(counter.get_total_flops())
        assert abs(counts[1] / counts[0] - 1) < 0.02, (name, counts)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("a model",), TypeError, "must be an nn.Module, got str"),
        ((nn.Linear(2, 2), torch.float16), ValueError, "dtype must be one of .* got torch.float16"),
        ((nn.Linear(2, 2, device="meta"),), ValueError, "weight is on meta"),
    ],
)
def test_bad_arguments(arguments, error, message):
    model, *dtype = arguments
    with pytest.raises(error, match=message):
        for_inference(model, dtype=dtype[0] if dtype else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_encoder_layers_keep_the_weights_that_their_fast_path_reads(dtype):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoder(layer, 2)).eval()
    packed, x = for_inference(model, dtype=dtype), torch.randn(2, 9, 64)
    with torch.inference_mode():
        assert_close(packed(x).float(), model(x), 1e-5 if dtype == torch.float32 else 5e-2)
    packed_layers = [name for name, m in packed.named_modules() if isinstance(m, PackedLinear)]
    assert packed_layers
    assert not any("layers" in name for name in packed_layers)
