"""What ops refuse: errors that name the op, the argument, what came and what is accepted."""

import pytest
import torch

from vision_ttt.ops import (
    depthwise_conv2d,
    directional_conv1d,
    gated_norm,
    linear,
    selective_scan,
    swiglu,
    swiglu_mlp,
    ttt_linear,
)
from vision_ttt.ops._contract import Contract, Real, Whole
from vision_ttt.ops.vit3_ttt import depthwise_correlation


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# Most of these have crashed or read stale memory once.
REFUSED = {
    "conv1d: two axes": (
        lambda: directional_conv1d(ones(200, 32), ones(32, 1, 4), ones(32), 16),
        r"directional_conv1d: x must have shape \[B, T, C\], got \[200, 32\]",
    ),
    "conv1d: four axes": (
        lambda: directional_conv1d(ones(1, 2, 5, 32), ones(32, 1, 4), ones(32), 16),
        r"x must have shape \[B, T, C\], got \[1, 2, 5, 32\]",
    ),
    "conv1d: one axis": (
        lambda: directional_conv1d(ones(32), ones(32, 1, 4), ones(32), 16),
        r"x must have shape \[B, T, C\], got \[32\]",
    ),
    "conv1d: weight": (
        lambda: directional_conv1d(ones(2, 5, 32), ones(48, 1, 4), ones(48), 0),
        r"weight must have shape \[32, 1, K\], got \[48, 1, 4\]",
    ),
    "conv1d: no taps": (
        lambda: directional_conv1d(ones(2, 5, 32), ones(32, 1, 0), ones(32), 0),
        r"K must be at least 1, got weight \[32, 1, 0\]",
    ),
    "conv1d: bias": (
        lambda: directional_conv1d(ones(2, 5, 32), ones(32, 1, 4), ones(1), 0),
        r"bias must have shape \[32\], got \[1\]",
    ),
    "conv1d: more reverse channels than channels": (
        lambda: directional_conv1d(ones(2, 5, 32), ones(32, 1, 4), ones(32), 33),
        r"reverse_channels must be in 0 … 32, got 33",
    ),
    "conv1d: fewer than none": (
        lambda: directional_conv1d(ones(2, 5, 32), ones(32, 1, 4), ones(32), -16),
        r"reverse_channels must be in 0 … 32, got -16",
    ),
    "conv2d: negative grid": (
        lambda: depthwise_conv2d(ones(3, 35, 32), ones(32, 1, 3, 3), (-5, -7)),
        r"depthwise_conv2d: height must be at least 1, got -5",
    ),
    "conv2d: grid": (
        lambda: depthwise_conv2d(ones(1, 6, 32), ones(32, 1, 3, 3), (2, 4)),
        r"x must have shape \[B, height\*width = 8, C\], got \[1, 6, 32\]",
    ),
    "conv2d: weight": (
        lambda: depthwise_conv2d(ones(1, 6, 32), ones(48, 1, 3, 3), (2, 3)),
        r"weight must have shape \[32, 1, K, K\], got \[48, 1, 3, 3\]",
    ),
    "conv2d: even kernel": (
        lambda: depthwise_conv2d(ones(1, 6, 32), ones(32, 1, 2, 2), (2, 3)),
        r"K must be odd, got 2",
    ),
    "correlation: fewer images": (
        lambda: depthwise_correlation(ones(3, 6, 32), ones(2, 6, 32), (2, 3)),
        r"y must have shape \[3, height\*width = 6, 32\], got \[2, 6, 32\]",
    ),
    "correlation: even kernel": (
        lambda: depthwise_correlation(ones(3, 6, 32), ones(3, 6, 32), (2, 3), 4),
        r"kernel_size must be odd, got 4",
    ),
    "norm: two axes": (
        lambda: gated_norm(ones(900, 64), ones(900, 32), ones(2, 32), ones(2, 32)),
        r"gated_norm: gate must have shape \[B, T, D\], got \[900, 32\]",
    ),
    "norm: directions": (
        lambda: gated_norm(ones(1, 5, 32), None, ones(2, 32), ones(2, 32)),
        r"z must have shape \[B, T, R\*D = 64\], got \[1, 5, 32\]",
    ),
    "norm: gate": (
        lambda: gated_norm(ones(1, 5, 64), ones(1, 1, 32), ones(2, 32), ones(2, 32)),
        r"must have shape \[1, 1, R\*D = 64\], got \[1, 5, 64\]",
    ),
    "norm: bias": (
        lambda: gated_norm(ones(1, 5, 64), None, ones(2, 32), ones(1, 32)),
        r"bias must have shape \[2, 32\], got \[1, 32\]",
    ),
    "norm: eps": (
        lambda: gated_norm(ones(1, 5, 64), None, ones(2, 32), ones(2, 32), float("nan")),
        r"eps must be at least 0, got nan",
    ),
    "swiglu: no halves": (
        lambda: swiglu(ones(2, 33)),
        r"swiglu: x must have shape \[\.\.\., 2\*H\], got \[2, 33\]",
    ),
    "swiglu: no axis": (lambda: swiglu(ones()), r"got \[\]"),
    "devices": (
        lambda: gated_norm(ones(1, 5, 32), None, ones(1, 32), ones(1, 32).to("meta")),
        r"gated_norm: bias is on meta, weight on cpu",
    ),
}
MISTYPED = {
    "not a tensor": (
        lambda: swiglu([1.0, 2.0]),
        r"swiglu: x must be a tensor, got list",
    ),
    "integers": (
        lambda: swiglu(ones(2, 64, dtype=torch.int64)),
        r"x must be one of .*float32.* got torch.int64",
    ),
    "sparse": (lambda: swiglu(ones(2, 64).to_sparse()), r"x must be a strided tensor, got"),
    "float64 beside float32": (
        lambda: gated_norm(ones(1, 5, 32), None, ones(1, 32), ones(1, 32, dtype=torch.float64)),
        r"bias is float64, z is not \(torch.float32\)",
    ),
    "a tensor for a pair": (
        lambda: swiglu_mlp(ones(5, 8), ones(8, 8), ones(8, 4), norm=ones(2, 8)),
        r"swiglu_mlp: norm must be weight and bias as a pair, or None, got Tensor",
    ),
    "a count with a fraction": (
        lambda: directional_conv1d(ones(2, 5, 32), ones(32, 1, 4), ones(32), 16.0),
        r"reverse_channels must be an int, got 16.0",
    ),
    "a truth for a count": (
        lambda: depthwise_conv2d(ones(1, 6, 32), ones(32, 1, 3, 3), (True, 6)),
        r"height must be an int, got True",
    ),
    "words for a number": (
        lambda: gated_norm(ones(1, 5, 32), None, ones(1, 32), ones(1, 32), "1e-6"),
        r"eps must be a number, got '1e-6'",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), MISTYPED.values(), ids=MISTYPED)
def test_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


CONTRACT = Contract(
    "op",
    {"x": "... 2*C", "y": "3*C | N C", "z": "? C"},
    {"count": Whole(1, "C"), "limit": Whole(0, 9), "eps": Real(0)},
)
GOOD = {"x": ones(7, 8), "y": ones(12), "z": ones(4), "count": 4, "limit": 0, "eps": 0}


@pytest.mark.parametrize(
    "change",
    [{}, {"z": None}, {"y": ones(3, 4)}, {"x": ones(8)}, {"x": ones(2, 0, 8)}, {"eps": 1.5}],
)
def test_what_the_table_says_is_accepted(change):
    CONTRACT.check(tuple((GOOD | change).values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": ones(7, 9)}, r"op: x must have shape \[\.\.\., 2\*C\], got \[7, 9\]"),
        ({"y": ones(13)}, r"y must have shape \[3\*C = 12\] or \[N, 4\], got \[13\]"),
        ({"y": ones(3, 5)}, r"got \[3, 5\]"),
        ({"z": ones(5)}, r"z must have shape \[4\], got \[5\]"),
        ({"count": 5}, r"count must be in 1 … 4, got 5"),
        ({"count": 0}, r"count must be in 1 … 4, got 0"),
        ({"limit": 10}, r"limit must be in 0 … 9, got 10"),
        ({"eps": -1}, r"eps must be at least 0, got -1"),
    ],
)
def test_what_the_table_does_not_say_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CONTRACT.check(tuple((GOOD | change).values()))


def test_what_was_accepted_once_says_nothing_of_other_calls():
    contract = Contract("op", {"x": "C"}, {"count": Whole(1, "C")}, dense_last=("x",))
    contract.check((ones(4), 1))
    for change in ({"count": True}, {"count": 1.0}, {"x": ones(4).bool()}, {"x": [1.0] * 4}):
        with pytest.raises(TypeError):
            contract.check(tuple(({"x": ones(4), "count": 1} | change).values()))
    for change in ({"count": 5}, {"x": ones(0)}, {"x": ones(8)[::2]}, {"x": ones(4, 1)}):
        with pytest.raises(ValueError, match="op: "):
            contract.check(tuple(({"x": ones(4), "count": 1} | change).values()))


def test_tensors_without_content_are_checked_too():
    """Their device has no autocast to ask about; counting a model's multiply-adds runs on it."""
    views = {name: ones(1, 6, 2, 8).to("meta") for name in "qkv"}
    state = {"w0": ones(2, 8, 8).to("meta"), "b0": ones(2, 8).to("meta")}
    assert ttt_linear(**views, eta=ones(1, 6, 2).to("meta"), **state).shape == (1, 6, 2, 8)
    with pytest.raises(ValueError, match="eta must have shape"):
        ttt_linear(**views, eta=ones(1, 6).to("meta"), **state)


AUTOCAST = {  # what is called with x in float32 and another tensor in float64
    "selective_scan": lambda x, other: selective_scan(
        x, x, -ones(8, 2), x[..., :2], x[..., :2], z=other
    ),
    "linear": lambda x, other: linear(x, other[0]),
    "swiglu_mlp": lambda x, other: swiglu_mlp(x, other[0, :, :8], ones(8, 4)),
    "ttt_linear": lambda x, other: ttt_linear(
        *(view.unsqueeze(2) for view in (x, x, other)), ones(1, 8, 1), ones(1, 8, 8), ones(1, 8)
    ),
}


@pytest.mark.parametrize("call", AUTOCAST.values(), ids=AUTOCAST)
@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_autocast_casts_no_float64(call, first):
    other = torch.float64 if first == torch.float32 else torch.float32
    with torch.autocast("cpu"), pytest.raises(TypeError, match="share a dtype"):
        call(ones(1, 8, 8, dtype=first), ones(1, 8, 8, dtype=other))
