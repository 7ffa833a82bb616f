"""The contract of timm's registry, for each model of this package at a small size."""

import copy
import io
import re

import pytest
import timm
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt.models import create_model, is_model, list_models

OURS = list_models()
NAMES = [name for name in timm.list_models() if name in OURS]
DENOISERS = [name for name in OURS if name not in NAMES]
SMALL = {
    "linear": {"embed_dim": 32, "depth": 2, "num_heads": 1, "patch_size": 8, "img_size": 32},
    "vittt": {"embed_dim": 32, "depth": 2, "num_heads": 1, "patch_size": 8, "img_size": 32},
    "vit3": {"embed_dim": 32, "depth": 2, "num_heads": 1, "patch_size": 8, "img_size": 32},
    "hvit3": {"dims": (16, 32), "depths": (1, 1), "num_heads": (1, 1), "img_size": 32},
    "vim": {"embed_dim": 32, "depth": 2, "patch_size": 8, "img_size": 32},
    "vrwkv": {"embed_dim": 32, "depth": 2, "patch_size": 8, "img_size": 32},
    "mambar": {
        **{"embed_dim": 32, "depth": 2, "patch_size": 8, "img_size": 32},
        **{"num_registers": 3, "head_reduction": 2},
    },
}

# Ablations differ by keywords of one class: some of them stand for all.
LIKE_OTHERS = ("b8", "b32", "b64", "b128", "b196", "shared_qk", "gating", "head_token", "w1")
SOME = [name for name in NAMES if not any(f"_{row}_" in name for row in LIKE_OTHERS)]
# The sizes of a family are one model where all are built small.
ONCE_MORE = re.compile(
    r"hvit3_(small|base)|(mambar|vim)_(tiny|small|base|large)_patch.*|vit3_(small|base)_patch.*"
    r"|vit3_nano_patch8_256|vittt_(tiny|small|base)_patch.*|vittt_nano_patch(2_28|8_256)"
    r"|vrwkv_(tiny|small)_patch.*"
)
DISTINCT = [name for name in SOME if not ONCE_MORE.fullmatch(name)]
of_every_classifier = pytest.mark.parametrize("name", DISTINCT)


def small(name, **options):
    torch.manual_seed(0)
    arguments = {"num_classes": 4, **SMALL[name.split("_")[0]], **options}
    return timm.create_model(name, **arguments)


def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["dit3_nano_patch4_32", *DISTINCT])
def test_reparameterized_for_inference_it_computes_the_same(name):
    """Methods that libraries call on any module, to replace it, have no other meaning here."""
    if name.startswith("dit3"):
        torch.manual_seed(0)
        model = create_model(name, img_size=32, hidden_size=32, depth=1, num_heads=1)
        x = torch.randn(2, model.in_channels, 32, 32), torch.rand(2), torch.tensor([0, 1])
    else:
        model, x = small(name), (images(),)
    called = {"fuse", "reparameterize", "switch_to_deploy", "convert_to_deploy", "deploy"}
    called |= {"export", "quantize", "prepare", "fuse_lora", "fuse_qkv_projections"}
    found = {(type(m).__name__, n) for m in model.modules() for n in called if hasattr(m, n)}
    assert found == set()
    model.eval()
    with torch.no_grad():
        assert torch.equal(timm.utils.reparameterize_model(model)(*x), model(*x))


def test_models_that_are_no_classifiers_are_not_timms():
    assert len(NAMES) > 20
    assert DENOISERS == [name for name in OURS if name.startswith("dit3_")] != []
    for name in DENOISERS:
        assert is_model(name)
        assert not timm.is_model(name)
    with torch.device("meta"):
        model = create_model("dit3_base_patch8_32", depth=1, num_classes=None)
    assert model.num_classes == 1000
    assert model.pretrained_cfg["architecture"] == "dit3_base_patch8_32"
    assert list_models("hvit3_*") == ["hvit3_base", "hvit3_small", "hvit3_tiny"]
    assert not is_model("dit3_huge")
    with pytest.raises(RuntimeError, match="dit3_huge"):
        create_model("dit3_huge")
    assert type(create_model("resnet18", num_classes=2)).__name__ == "ResNet"


@pytest.mark.parametrize("name", SOME)
def test_default_cfg(name):
    """At the published size the description agrees with the model."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    config, state = model.default_cfg, model.state_dict()
    features = model.forward_features(torch.empty(1, *config["input_size"], device="meta"))
    if hasattr(model, "output_fmt"):  # maps, not tokens
        assert model.output_fmt == "NHWC"
        assert tuple(config["pool_size"]) == tuple(features.shape[1:3])
    else:
        assert config["pool_size"] is None
        assert features.ndim == 3
    for key in ("classifier", "first_conv"):
        assert f"{config[key]}.weight" in state
    assert state[f"{config['first_conv']}.weight"].shape[1] == config["input_size"][0]
    assert state[f"{config['classifier']}.weight"].shape[0] == config["num_classes"]
    assert {"mean", "std", "interpolation", "crop_pct", "license"} <= config.keys()


@of_every_classifier
def test_heads(name):
    model = small(name).eval()
    features = model.forward_features(images())
    assert_close(model.forward_head(features), model(images()), 1e-5)
    feature = model.forward_head(features, pre_logits=True)
    assert feature.shape == (2, model.head_hidden_size)
    assert features.shape[-1] == model.num_features
    model.reset_classifier(7)
    assert model(images()).shape == (2, model.num_classes) == (2, 7)
    model.reset_classifier(0)
    assert_close(model(images()), feature, 1e-5)
    model.reset_classifier(0, "")
    assert_close(model(images()), features, 1e-5)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["vittt_nano_patch4_32", "mambar_nano_patch4_32"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((-3, ""), ValueError, "num_classes is -3; accepted: 0 to"),
        (("5", ""), TypeError, "num_classes is '5'; accepted: whole numbers"),
        ((2.0, ""), TypeError, "num_classes is 2.0; accepted: whole numbers"),
        ((3, "x"), ValueError, "global_pool must be one of .*, got 'x'"),
    ],
)
def test_a_refused_head_changes_nothing(name, given, error, message):
    model = small(name)
    former = model.num_classes, model.global_pool, model.head, getattr(model, "neck", None)
    with pytest.raises(error, match=message):
        model.reset_classifier(*given)
    now = model.num_classes, model.global_pool, model.head, getattr(model, "neck", None)
    assert now == former


@of_every_classifier
@pytest.mark.parametrize("shallow", [False, True])
def test_features_only(name, shallow):
    cut = {"depths": (1,), "dims": (16,), "num_heads": (1,)} if "hvit3" in name else {"depth": 1}
    model = small(name, features_only=True, **(cut if shallow else {})).eval()
    maps = model(images())
    assert len(maps) == (1 if shallow else 2)
    assert [x.shape[1] for x in maps] == model.feature_info.channels()
    assert [32 // x.shape[-1] for x in maps] == model.feature_info.reduction()


@of_every_classifier
def test_forward_intermediates(name):
    model = small(name).eval()
    modules = dict(model.named_modules())
    assert all(info["module"] in modules for info in model.feature_info)
    final, maps = model.forward_intermediates(images())
    assert_close(final, model.forward_features(images()), 1e-6)
    assert [x.shape[1] for x in maps] == [info["num_chs"] for info in model.feature_info]
    (last,) = model.forward_intermediates(images(), indices=1, intermediates_only=True)
    assert torch.equal(last, maps[-1])
    assert model.prune_intermediate_layers(1, prune_head=True) == [1]
    assert_close(model(images()), model.forward_head(final, pre_logits=True), 1e-5)


@of_every_classifier
def test_gradient_checkpointing_changes_no_gradient(name):
    model = small(name, drop_path_rate=0.2)
    model.train()

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        F.cross_entropy(model(images()), torch.tensor([0, 3])).backward()
        return {key: x.grad.clone() for key, x in model.named_parameters()}

    wanted = gradients()
    model.set_grad_checkpointing()
    got = gradients()
    for key, x in wanted.items():
        assert_close(got[key], x, 1e-5, key)


@of_every_classifier
def test_copies_and_files(name):
    model = small(name).eval()
    wanted = model(images())
    other = small(name, num_classes=4).eval()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(images()), wanted)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images()), wanted)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert torch.equal(model(images()), wanted)


@of_every_classifier
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused_in_a_sentence(name):
    model = small(name).eval()
    extractor = small(name, features_only=True).eval()
    with pytest.raises(TypeError, match=r"TorchScript .* cannot hold this model.*torch\.export"):
        torch.jit.script(torch.nn.Sequential(model))
    for each in (model, extractor):
        with pytest.raises(TypeError, match=r"TorchScript .* cannot hold this model"):
            torch.jit.trace(each, images())


@of_every_classifier
def test_made_on_a_device_and_in_a_precision(name):
    model = small(name, device="meta", dtype=torch.bfloat16)
    tensors = [x for x in model.state_dict().values() if x.is_floating_point()]
    assert {(x.device.type, x.dtype) for x in tensors} == {("meta", torch.bfloat16)}
    assert {x.dtype for x in small(name).parameters()} == {torch.float32}
    with pytest.raises(TypeError, match="devise"):
        small(name, devise="meta")


@pytest.mark.parametrize("train", [False, True])
@of_every_classifier
def test_a_batch_without_images(name, train):
    """As at the end of a loader's shard; every parameter has a gradient, which DDP waits for."""
    model, x = small(name).train(train), images()[:0].requires_grad_()
    logits = model(x)
    assert logits.shape == (0, 4)
    logits.sum().backward()
    assert x.grad.shape == x.shape
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert not parameter.grad.any(), key
    for tokens in model.forward_intermediates(x, intermediates_only=True):
        assert len(tokens) == 0
