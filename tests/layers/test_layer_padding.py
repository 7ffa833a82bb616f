"""Padding behind the tokens of the layers that take lengths: whatever it holds changes nothing."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from padded_calls import ANY, absent, check_padding
from tolerances import assert_close
from vision_ttt import for_training
from vision_ttt.inner import Learner, Linear
from vision_ttt.layers import (
    TTTMLP,
    BidirectionalMamba,
    DirectionalConv1d,
    FunctionalLearner,
    LinearLearner,
    Mamba,
    MiniBatchRotary,
    MLPLearner,
    TanhGatedNorm,
    TTTLayer,
    TTTLinear,
)

DIM, SIZE, LENGTH = 32, 4, 9
LENGTHS = torch.tensor([0, 3, 9, 6])
ALL = {"mini_batch_size": SIZE, "share_qk": True, "conv_kernel_size": 4}

LAYERS = {
    "linear": partial(TTTLinear, DIM, 2, mini_batch_size=SIZE),
    "all options": partial(
        TTTLinear, DIM, 2, **ALL, gate=True, merge=TanhGatedNorm, rotary=MiniBatchRotary(16, SIZE)
    ),
    "for training": lambda: for_training(TTTLinear(DIM, 2, **ALL, gate=True)),
    "mlp": partial(TTTMLP, DIM, 2, mini_batch_size=SIZE, conv_kernel_size=2),
    "convolution": partial(DirectionalConv1d, DIM, 4),
    "mamba": partial(Mamba, DIM),
}
BOTH_WAYS = {
    "linear": partial(TTTLinear, DIM, 2, **ALL, gate=True, bidirectional=True),
    "for training": lambda: for_training(TTTLinear(DIM, 2, **ALL, gate=True, bidirectional=True)),
    "mlp": partial(TTTMLP, DIM, 2, mini_batch_size=SIZE, bidirectional=True),
    "convolution": partial(DirectionalConv1d, DIM, 4, reverse_channels=DIM // 2),
    "mamba": partial(BidirectionalMamba, DIM),
    "mamba for training": lambda: for_training(BidirectionalMamba(DIM)),
}


def randomised(layer: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for x in layer.parameters():
            x.copy_(torch.randn_like(x) * 0.3)
    return layer.to(dtype)


def check(layer: nn.Module, value: float, state=None, return_state=False) -> None:
    dtype = next(layer.parameters()).dtype
    x = torch.randn(4, LENGTH, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)

    def call(x):
        o = layer(x, state, return_state, LENGTHS)
        return [o[0], *_leaves(o[1])] if return_state else [o]

    check_padding(call, {"x": x}, list(layer.parameters()), absent(LENGTHS.tolist(), LENGTH), value)


def _leaves(state) -> list[Tensor]:
    if torch.is_tensor(state):
        return [state]
    return [x for part in state if isinstance(part, (tuple, Tensor)) for x in _leaves(part)]


@ANY
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_changes_nothing(name, dtype, value):
    layer = randomised(LAYERS[name](), dtype)
    check(layer, value)
    check(layer, value, return_state=True)


@ANY
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_padding_of_both_directions(name, value):
    check(randomised(BOTH_WAYS[name]()), value)


@ANY
@pytest.mark.parametrize("name", LAYERS)
def test_padding_behind_a_state(name, value):
    """Of sequences that are at several places."""
    layer = randomised(LAYERS[name]())
    _, state = layer(torch.randn(4, 5, DIM), None, True, torch.tensor([5, 4, 0, 2]))
    state = state.detach()
    check(layer, value, state)
    check(layer, value, state, return_state=True)


@ANY
@pytest.mark.parametrize("kind", [LinearLearner, MLPLearner])
def test_padding_of_inner_learners(kind, value):
    learner = randomised(kind(2, 16, mini_batch_size=SIZE))
    tokens = {name: torch.randn(4, LENGTH, 2, 16) for name in ("q", "k", "v")}
    tokens["eta"] = torch.rand(4, LENGTH, 2) / 16

    def call(**tokens):
        o, state = learner(**tokens, return_state=True, lengths=LENGTHS)
        return [o, *_leaves(state)]

    others = list(learner.parameters())
    check_padding(call, tokens, others, absent(LENGTHS.tolist(), LENGTH), value)


EVERY_LAYER = pytest.mark.parametrize(
    "make", [*LAYERS.values(), *BOTH_WAYS.values()], ids=[*LAYERS, *(f"2 {x}" for x in BOTH_WAYS)]
)


@EVERY_LAYER
def test_a_padded_row_gives_what_it_gives_alone(make):
    layer = randomised(make(), torch.float64)
    x = torch.randn(4, LENGTH, DIM, dtype=torch.float64)
    o = layer(x, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        if length:
            assert_close(o[row, :length], layer(x[row : row + 1, :length])[0], 1e-10)


@EVERY_LAYER
def test_lengths_under_vmap(make):
    """As for the gradients of single sequences; one tensor holds the lengths of all of them."""
    layer = randomised(make())
    x = torch.randn(4, LENGTH, DIM, generator=torch.Generator().manual_seed(3))

    def alone(x, length):
        return layer(x.unsqueeze(0), lengths=length.unsqueeze(0)).squeeze(0)

    got = torch.vmap(alone)(x, LENGTHS)
    assert_close(got, layer(x, lengths=LENGTHS), 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_lengths_that_do_not_fit(name):
    layer, x = LAYERS[name](), torch.randn(2, 5, DIM)
    with pytest.raises(TypeError, match="a tensor of int32 or int64, got list"):
        layer(x, lengths=[5, 5])
    with pytest.raises(ValueError, match=r"must have shape \[2\], got \[3\]"):
        layer(x, lengths=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"lengths must be in 0 … 5, got \[6, 1\]"):
        layer(x, lengths=torch.tensor([6, 1]))


def test_learners_without_lengths():
    """Such a learner would read the padding."""
    learner = partial(FunctionalLearner, learner=Learner(Linear()))
    layer, x, lengths = TTTLayer(DIM, 2, learner), torch.randn(1, 5, DIM), torch.tensor([3])
    with pytest.raises(TypeError, match="unexpected keyword argument 'lengths'"):
        layer(x, lengths=lengths)
