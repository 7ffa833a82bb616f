"""DesignSpace, whose arguments choose the inner training."""

import pytest
import timm
import torch

from studies.models.design_space import INNER_MODELS, MLP_RATIOS, NANO, LearnerMixer
from vision_ttt.inner import Learner, Linear, mse


def small(**options):
    torch.manual_seed(0)
    return timm.create_model(NANO, num_classes=10, embed_dim=32, depth=1, **options)


def image():
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [None, 5, 20, 33])
def test_the_causal_op_computes_what_the_learner_does(size):
    torch.manual_seed(0)
    learner = Learner(Linear(), mse, learning_rate=2.0, mini_batch_size=size, causal=True)
    mixer = LearnerMixer(32, 2, learner).double()
    with torch.no_grad():
        mixer.qkv.weight.mul_(5)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (2, 16)) for part in mixer.qkv(x).chunk(3, dim=-1))
    wanted = mixer.proj(learner(q, k, v, dict(mixer.state.items())).flatten(2))
    torch.testing.assert_close(mixer(x), wanted, rtol=1e-9, atol=1e-9)
    mixer.learner = Learner(Linear(), mse, learning_rate=0.0, mini_batch_size=size, causal=True)
    assert (mixer(x) - wanted).abs().max() > 1e-3


def outputs_beside(model, changed):
    """The change of the mixer's output at the tokens other than the changed one."""
    mixer = model.blocks[0].ttt
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(2))
    other = x.clone()
    other[:, changed] += 1
    with torch.no_grad():
        difference = (mixer(x, (8, 8)) - mixer(other, (8, 8))).abs().amax(-1)[0]
    assert difference[changed] > 0
    return torch.cat([difference[:changed], difference[changed + 1 :]])


@pytest.mark.parametrize("inner_model", [name for name in INNER_MODELS if "conv" not in name])
def test_tokens_learn_of_each_other_by_the_inner_training_alone(inner_model):
    asked = {"inner_model": inner_model, "inner_loss": "mse"}
    assert (outputs_beside(small(**asked), 20) > 0).all()
    assert (outputs_beside(small(**asked, inner_learning_rate=0.0), 20) < 1e-7).all()


def test_a_causal_token_knows_of_no_later_one():
    model = small(inner_model="linear", inner_loss="mse", inner_causal=True)
    beside = outputs_beside(model, 20)
    assert (beside[:20] == 0).all()
    assert (beside[20:] > 0).all()


def test_each_argument_changes_what_is_computed():
    changes = [
        {},
        {"inner_model": "linear"},
        {"inner_model": "mlp"},
        {"inner_model": "mlp", "inner_mlp_ratio": 3},
        {"inner_model": "gated_linear_unit"},
        {"inner_model": "gated_linear_unit", "inner_mlp_ratio": 3},
        {"inner_loss": "rmse"},
        {"inner_learning_rate": 2.0},
        {"inner_mini_batch_size": 16},
        {"inner_epochs": 2},
        {"inner_model": "linear", "inner_causal": True},
        {"inner_model": "vit3"},
        {"convolutions": True},
    ]

    @torch.no_grad()
    def logits_of(**options):
        model = small(**options).double().eval()
        for name, parameter in model.named_parameters():
            if ".ttt." in name:
                parameter.mul_(5)  # as drawn, the inner models answer next to nothing
        return model(image().double())

    logits = [logits_of(**each) for each in changes]
    for place, one in enumerate(logits):
        for other in logits[:place]:
            assert (one - other).abs().max() > 1e-6, changes[place]


@pytest.mark.parametrize(("inner_model", "usual"), MLP_RATIOS.items())
def test_the_ratio_is_the_width_of_the_hidden_layer(inner_model, usual):
    """A head of the small model has 16 channels."""

    def width(**options):
        return small(inner_model=inner_model, **options).blocks[0].ttt.state["w1"].shape[-1]

    assert width() == width(inner_mlp_ratio=usual) == 16 * usual
    assert width(inner_mlp_ratio=5) == 80


def test_convolutions_take_the_place_of_the_embedded_positions():
    convolving, model = small(convolutions=True), small()
    tokens = torch.randn(1, 64, 32)
    assert not torch.equal(convolving.blocks[0].cpe(tokens, (8, 8)), tokens)
    assert torch.equal(model.blocks[0].cpe(tokens, (8, 8)), tokens)
    assert convolving.pos_embed is None
    assert model.pos_embed.shape == (1, 64, 32)
    with torch.no_grad():
        before = model.eval()(image())
        model.pos_embed.add_(torch.randn(1, 64, 32))
        assert (model(image()) - before).abs().max() > 1e-4


def test_positions_and_initial_states_do_not_decay():
    names = small(inner_model="linear").no_weight_decay()
    assert names == {"pos_embed", "blocks.0.ttt.state.w", "blocks.0.ttt.state.b"}
    assert "blocks.0.ttt.w3" in small(inner_model="vit3").no_weight_decay()
    assert "pos_embed" not in small(convolutions=True).no_weight_decay()


def test_the_published_layer_with_convolutions_is_vit3():
    keywords = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}
    model = small(inner_model="vit3", convolutions=True).eval()
    torch.manual_seed(0)
    vit3 = timm.create_model("vit3_tiny_patch16_224", num_classes=10, **keywords).eval()
    assert model.state_dict().keys() == vit3.state_dict().keys()
    assert torch.equal(model(image()), vit3(image()))


@pytest.mark.parametrize("inner_model", ["linear", "depthwise_conv3x3"])
def test_set_input_size(inner_model):
    model = small(inner_model=inner_model).eval()
    model.set_input_size((24, 40))
    assert model.pos_embed.shape == (1, 60, 32)
    assert model(torch.randn(1, 3, 24, 40)).shape == (1, 10)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_heads": 5}, "dim must be a multiple of num_heads, got 32 and 5"),
        ({"img_size": 33}, "images of 33 × 33 are not whole patches of 4 × 4"),
        ({"inner_model": "lstm"}, "inner_model must be one of"),
        ({"inner_loss": "huber"}, "inner_loss must be one of"),
        ({"inner_mlp_ratio": 2}, "inner_model 'simplified_glu' has no hidden layer"),
        ({"inner_mlp_ratio": 2, "inner_model": "vit3"}, "accepted: None, or one of .'mlp', 'gated"),
        ({"inner_mlp_ratio": 0, "inner_model": "mlp"}, "inner_mlp_ratio is 0; accepted: 1 to 64"),
        ({"inner_epochs": 0}, "epochs must be at least 1"),
        ({"inner_model": "depthwise_conv3x3", "inner_causal": True}, "cannot be causal"),
    ],
)
def test_what_cannot_be_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        small(**wrong)


def test_a_ratio_is_a_whole_number():
    with pytest.raises(TypeError, match=r"inner_mlp_ratio is 1\.5; accepted: a whole number"):
        small(inner_model="mlp", inner_mlp_ratio=1.5)


@pytest.mark.parametrize("inner_model", ["simplified_glu", "vit3"])
def test_checkpointing_changes_no_gradient(inner_model):
    model = small(inner_model=inner_model)

    def gradients():
        loss = model(image()).square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    wanted = gradients()
    model.set_grad_checkpointing()
    assert inner_model == "vit3" or model.blocks[0].ttt.learner.checkpoint
    for got, exact in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("inner_model", ["depthwise_conv3x3", "vit3"])
def test_a_graph_of_torch_fx_computes_what_the_model_does(inner_model):
    model = small(inner_model=inner_model).eval()
    graph = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(graph(image()), model(image()))


def test_torch_export_is_refused_where_torch_func_learns():
    """PyTorch's own error there is misleading and leaves torch.func unusable."""
    with pytest.raises(ValueError, match=r"torch\.export cannot see .* inner_model='vit3'"):
        torch.export.export(small().eval(), (image(),))
    for options in (
        {"inner_model": "vit3"},
        {"inner_model": "linear", "inner_loss": "mse", "inner_causal": True},
    ):
        model = small(**options).eval()
        torch.testing.assert_close(
            torch.export.export(model, (image(),)).module()(image()), model(image())
        )
