"""Vision-RWKV: its WKV by the equation, its sizes, and the names of its release."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt import convert
from vision_ttt.bench import count_macs, count_parameters
from vision_ttt.models import create_model
from vision_ttt.models.vrwkv import VRWKV, VRWKVBlock, bi_wkv, q_shift

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 8}


def by_the_equation(k, v, decay, bonus):
    """All T² weights of each channel."""
    length = k.shape[1]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()[..., None]
    scores = k[:, None] - (distance - 1) * decay / length
    scores = torch.where(distance == 0, k[:, None] + bonus / length, scores)
    return torch.einsum("btid,bid->btd", scores.softmax(2), v)


@pytest.mark.parametrize("length", [1, 2, 70])
def test_bi_wkv_and_its_gradients(length):
    torch.manual_seed(0)
    k, v = 20 * torch.randn(2, length, 3).double(), torch.randn(2, length, 3).double()
    inputs = [k, v, torch.tensor([-30.0, 2, 30]).double(), torch.randn(3).double()]
    for x in inputs:
        x.requires_grad_()
    wanted, got = by_the_equation(*inputs), bi_wkv(*inputs)
    assert_close(got, wanted, 1e-10)
    weights = torch.randn_like(v)
    for a, b in zip(
        *(torch.autograd.grad((o * weights).sum(), inputs) for o in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_a_distant_key_far_above_the_others_is_no_division_by_zero():
    k = torch.full((1, 200, 2), -300.0)
    k[:, 0] = 300
    v = torch.randn(1, 200, 2)
    got = bi_wkv(k, v, torch.tensor([40.0, -40]), torch.zeros(2))
    assert_close(got, v[:, :1].expand_as(v), 1e-5)


def test_q_shift_reads_four_neighbours():
    x = torch.arange(6.0).reshape(1, 6, 1).expand(1, 6, 4)  # a grid of 2 × 3
    wanted = [[0, 0, 1, 0, 3, 4], [1, 2, 0, 4, 5, 0], [0, 0, 0, 0, 1, 2], [3, 4, 5, 0, 0, 0]]
    assert q_shift(x, (2, 3))[0].T.tolist() == wanted


class Half(torch.nn.Module):
    """Stands for stochastic depth, of both branches."""

    def forward(self, x):
        return x / 2


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("post_norm", [False, True])
def test_block_by_the_equations(post_norm, scaled, index):
    torch.manual_seed(0)
    block = VRWKVBlock(
        8,
        index,
        2,
        post_norm=post_norm,
        init_scale=0.5 if scaled else None,
        drop_path=Half(),
    ).double()
    for parameter in block.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    y = torch.randn(2, 6, 8).double()
    names = dict(block.named_parameters())

    def norm(x, name):
        weight, bias = names[f"{name}.weight"], names[f"{name}.bias"]
        return (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * (
            weight
        ) + bias

    def mixed(x, part, name):
        share = names[f"{part}.mix_{name}"]
        return share * x + (1 - share) * q_shift(x, (2, 3))

    def spatial(x):
        r, k, v = (
            mixed(x, "spatial_mix", name[0]) @ names[f"spatial_mix.{name}.weight"].T
            for name in ("receptance", "key", "value")
        )
        own = by_the_equation(k, v, names["spatial_mix.decay"], names["spatial_mix.bonus"])
        return (r.sigmoid() * own) @ names["spatial_mix.output.weight"].T

    def channel(x):
        r, k = (
            mixed(x, "channel_mix", name[0]) @ names[f"channel_mix.{name}.weight"].T
            for name in ("receptance", "key")
        )
        return r.sigmoid() * (k.relu() ** 2 @ names["channel_mix.value.weight"].T)

    wanted = y if index else norm(y, "norm0")
    for number, mix in ((1, spatial), (2, channel)):
        name = f"norm{number}"
        branch = norm(mix(wanted), name) if post_norm else mix(norm(wanted, name))
        wanted = wanted + (names[f"scale{number}"] * branch if scaled else branch) / 2
    assert_close(block(y, (2, 3)), wanted, 1e-10)


@pytest.mark.parametrize(
    ("size", "parameters", "gigamacs"),
    [("tiny", 6_155_176, 1.163), ("small", 23_820_136, 4.579), ("base", 93_645_544, 18.176)],
)
def test_sizes(size, parameters, gigamacs):
    """The paper prints 6.2M, 23.8M and 93.7M, 1.2G, 4.6G and 18.2G."""
    with torch.device("meta"):
        model = create_model(f"vrwkv_{size}_patch16_224")
        assert count_parameters(model) == parameters
        assert count_macs(model, (3, 224, 224)) == pytest.approx(gigamacs * 1e9, rel=1e-3)


@pytest.mark.parametrize("design", [{}, {"post_norm": True, "init_scale": 0.5}], ids=str)
def test_learns(design):
    torch.manual_seed(0)
    model = VRWKV(**SMALL, **design).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, losses = torch.randn(8, 3, 32, 32), []
    for _ in range(15):
        loss = F.cross_entropy(model(x), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - 2.08) < 0.3
    assert losses[-1] < 0.3 * losses[0]
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_half_precisions_sum_in_float32():
    torch.manual_seed(0)
    model = VRWKV(**SMALL).eval()
    with torch.no_grad():  # what mixing adds in a new model is below the rounding of the rest
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, 3, 32, 32)
    wanted = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(x), wanted, 2e-2)
    assert_close(model.bfloat16()(x.bfloat16()), model.float()(x), 2e-2)


def test_gradients_of_norms_are_float32_sums_under_autocast():
    torch.manual_seed(0)
    block = VRWKVBlock(8, 1, 2, post_norm=True, init_scale=0.5, drop_path=torch.nn.Identity())
    norms = [*block.norm1.parameters(), *block.norm2.parameters()]
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = block(
                torch.randn(1, 4096, 8, generator=torch.Generator().manual_seed(1)), (64, 64)
            )
        gradients.append(torch.autograd.grad(out.square().sum(), norms))
    for wanted, got in zip(*gradients, strict=True):
        assert_close(got, wanted, 2e-2)


def test_half_precisions_decay_in_float32():
    """At the last token, the first key has decayed to the weight of the last but one. Their values
    cancel, so that an error of the decay shows in the output."""
    k, v = torch.full((1, 1500, 1), -100.0), torch.zeros(1, 1500, 1)
    k[:, 0], k[:, -2] = 40, 0
    v[:, 0], v[:, -2] = 1, -1
    inputs = (k, v, torch.tensor([40.0]), torch.zeros(1))  # exact in bfloat16
    wanted = bi_wkv(*(x.double() for x in inputs))
    assert_close(bi_wkv(*(x.bfloat16() for x in inputs)), wanted, 4e-3)


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"embed_dim": 30}, "multiple of 4"), ({"depth": 0}, "depth"), ({"post_norm": 1}, "true")],
)
def test_wrong_arguments(argument, message):
    with pytest.raises((ValueError, TypeError), match=message):
        VRWKV(**{**SMALL, **argument})


def test_weights_with_the_releases_names():
    """Its names and shapes; no file of the release has been read here."""
    model = VRWKV(**SMALL, post_norm=True, init_scale=1)
    block = {"ln1.weight": (32,), "ln2.bias": (32,), "gamma1": (32,), "gamma2": (32,)}
    block |= {f"att.{name}.weight": (32, 32) for name in ("key", "value", "receptance", "output")}
    block |= {f"att.spatial_{name}": (32,) for name in ("decay", "first")}
    block |= {f"att.spatial_mix_{name}": (1, 1, 32) for name in "kvr"}
    block |= {f"ffn.spatial_mix_{name}": (1, 1, 32) for name in "kr"}
    block |= {"ln1.bias": (32,), "ln2.weight": (32,), "ffn.receptance.weight": (32, 32)}
    block |= {"ffn.key.weight": (128, 32), "ffn.value.weight": (32, 128)}
    shapes = {f"backbone.layers.{i}.{name}": shape for i in (0, 1) for name, shape in block.items()}
    shapes |= {"backbone.patch_embed.projection.weight": (32, 3, 8, 8), "head.fc.bias": (8,)}
    shapes |= {"backbone.patch_embed.projection.bias": (32,), "backbone.pos_embed": (1, 16, 32)}
    shapes |= {f"backbone.{n}.{leaf}": (32,) for n in ("layers.0.ln0", "ln1")
               for leaf in ("weight", "bias")}  # fmt: skip
    released = {name: torch.randn(shape) for name, shape in shapes.items()}
    released["head.fc.weight"] = torch.randn(8, 32)
    model.load_state_dict(convert.remap(released, model))
    assert torch.equal(model.blocks[1].channel_mix.mix_k, released[
        "backbone.layers.1.ffn.spatial_mix_k"].flatten())  # fmt: skip
    assert torch.equal(model.norm.weight, released["backbone.ln1.weight"])
    for own, theirs in (("decay", "decay"), ("bonus", "first")):
        got = model.blocks[1].spatial_mix.get_parameter(own)
        assert torch.equal(got, released[f"backbone.layers.1.att.spatial_{theirs}"])
