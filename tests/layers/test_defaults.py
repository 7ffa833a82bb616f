"""Forward and backward pass allocate by their inputs, not by PyTorch's default dtype and device."""

from functools import partial

import pytest
import torch

from vision_ttt.inner import Learner, Linear, NormedResidual
from vision_ttt.layers import (
    TTTMLP,
    BidirectionalMamba,
    ConvMlp,
    DepthwiseConv2d,
    DiT3Block,
    ExtraTokens,
    FunctionalLearner,
    LabelEmbedding,
    LinearAttention,
    Mamba,
    SwiGLU,
    TimestepEmbedding,
    TTTAttention,
    TTTLayer,
    TTTLinear,
    ViT3Block,
    VitttBlock,
    VitttMixer,
)
from vision_ttt.layers.attention_inner import INNER_MODELS
from vision_ttt.layers.conv_stem import ConvStem, Downsample
from vision_ttt.layers.rotary2d import rotary_table
from vision_ttt.layers.sincos2d import sincos_table
from vision_ttt.ops import use_backend

GRID = (4, 5)
TOKENS = torch.randn(2, 20, 32)
VIEWS = (*torch.randn(3, 2, 20, 2, 16), torch.rand(2, 20, 2))
IMAGES = torch.randn(2, 3, 16, 16)
EVERYTHING = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}
CPU = torch.device("cpu")


def generic(**options):
    learner = Learner(NormedResidual(Linear()), mini_batch_size=4, causal=True, **options)
    return TTTLayer(32, 2, partial(FunctionalLearner, learner=learner), **EVERYTHING)


def in_vit3(**options):
    block = ViT3Block(32, 2, **options)
    return lambda: block(TOKENS, GRID, rotary_table(GRID, 32, CPU))


def in_dit3():
    block, condition = DiT3Block(32, 2), torch.randn(2, 32)
    torch.nn.init.normal_(block.modulation[1].weight)  # gates of 0 would hide both branches
    return lambda: block(TOKENS, condition, GRID)


def attention(inner):
    layer, rotations = TTTAttention(32, 2, inner), torch.randn(18, 32)
    if inner == "vit3":
        torch.nn.init.normal_(layer.inner.conv_proj.weight)  # 0 would hide the convolution
    return lambda: layer(TOKENS, (3, 6), (0, 7), rotations)


def of(module, *inputs):
    return lambda: module(*inputs)


CALLS = {
    "TTTLinear": of(TTTLinear(32, 2, **EVERYTHING), TOKENS),
    "TTTMLP": of(TTTMLP(32, 2, **EVERYTHING), TOKENS),
    "shared state": of(TTTLinear(32, 2, bidirectional=True, learnable_states=1), TOKENS),
    "generic learner": of(generic(momentum=0.5), TOKENS),
    "checkpointed learner": of(generic(checkpoint=True), TOKENS),
    "VitttBlock": of(VitttBlock(VitttMixer(32, 2), 32, 48), TOKENS, GRID),
    "ViT3Block": in_vit3(),
    "H-ViT3's block": in_vit3(mlp=ConvMlp(32, 64)),
    "DiT3Block": in_dit3(),
    "BidirectionalMamba": of(BidirectionalMamba(32), TOKENS),
    "Mamba": of(Mamba(32), TOKENS),
    "LinearAttention": of(LinearAttention(2, 16, normalised=True), *VIEWS),
    **{f"TTTAttention, {inner}": attention(inner) for inner in INNER_MODELS},
    "SwiGLU": of(SwiGLU(32, 48), TOKENS),
    "TimestepEmbedding": of(TimestepEmbedding(32), torch.tensor([3, 977])),
    "LabelEmbedding": of(LabelEmbedding(5, 32, 0.5), torch.tensor([0, 4, 2, 3])),
    "ConvStem": of(ConvStem(3, 16), IMAGES),
    "Downsample": of(Downsample(3, 16), IMAGES),
    "sincos_table": lambda: sincos_table(GRID, 32, CPU),
    "a class token": of(ExtraTokens(32, "middle").insert, TOKENS),
    "an extra token": of(DepthwiseConv2d(32), TOKENS, (1, 19), (3,)),
}


def leaves(out):
    """The parameters that a result depends on."""
    nodes, seen, found = [out.grad_fn], {None}, []
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [former for former, _ in node.next_functions]
    return found


def results(call):
    """The result of a call, and the gradients of its parameters."""
    torch.manual_seed(0)
    out = call()
    return [out, *torch.autograd.grad(out.square().sum(), own)] if (own := leaves(out)) else [out]


@pytest.mark.parametrize("backend", [None, "dual"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_defaults_change_nothing(name, default, backend):
    call = CALLS[name]
    with use_backend(backend):
        wanted = results(call)
        try:
            if default == "meta":
                torch.set_default_device(default)
            else:
                torch.set_default_dtype(default)
            got = results(call)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.device == other.device
        assert torch.equal(one, other)
