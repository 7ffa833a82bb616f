"""for_inference: the parts that it packs, those that it keeps, and the calls that it refuses."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tolerances import FORWARD, assert_close
from vision_ttt import for_inference
from vision_ttt.inference.linear import PackedLinear, PackedPatches
from vision_ttt.inference.mamba import PackedMambaBlock
from vision_ttt.inference.vit3 import PackedVit3Block
from vision_ttt.inference.vittt import PackedVitttBlock, PackedVitttBlocks
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
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def images_of(name, count=2):
    side = 32 if "nano" in name else 64
    return torch.randn(count, 3, side, side)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
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
    assert_close(logits, wanted, 2e-2 if dtype == torch.bfloat16 else FORWARD[torch.float32])
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


CHANGES = {
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


def test_a_changed_part_of_vit3_is_named():
    model = small("vit3_tiny_patch16_224")
    model.blocks[0].ttt.qkv.register_forward_pre_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match=r"blocks\.0 \(ttt.qkv has a hook\)"):
        fast = for_inference(model)
    assert isinstance(fast.blocks[1], PackedVit3Block)
    assert isinstance(fast.blocks[0].mlp.fc1, nn.Linear)  # the whole block is left


def biased(mixer):
    mixer.out_proj = nn.Linear(mixer.inner, 192)


def hooked(mixer):
    mixer.conv.register_forward_hook(lambda *_: None)


def subclassed_mixer(mixer):
    mixer.__class__ = type("Own", (type(mixer),), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    from vision_ttt.inference import conversion
    from vision_ttt.ops.packed import linear, vittt_block_weights

    for module in (conversion, linear, vittt_block_weights):
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
    images = images_of("nano")
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(images), fast(images))
        assert not other.training


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
