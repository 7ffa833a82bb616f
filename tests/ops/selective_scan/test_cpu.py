"""The compiled kernels of the selective scan: what is theirs alone, against float64."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import _native, selective_scan
from vision_ttt.ops.selective_scan import cpu
from vision_ttt.ops.selective_scan.contract import Inputs

pytestmark = pytest.mark.kernels

GOLDEN = Path(__file__).parents[2] / "golden"
TOKENS = "u", "delta", "B", "C", "z"


def arguments_of(length: int, channels: int, states: int, groups: int, batch: int = 1):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    matrix = (batch, length, groups, states) if groups > 1 else (batch, length, states)
    return {
        "u": normal(batch, length, channels),
        "delta": normal(batch, length, channels),
        "A": -normal(channels, states).exp(),
        "B": normal(*matrix),
        "C": normal(*matrix),
        "D": normal(channels),
        "z": normal(batch, length, channels),
        "delta_bias": normal(channels),
        "initial_state": normal(batch, channels, states),
    }


def solve(arguments: dict[str, Tensor], backend: str, reverse: int = 0) -> dict[str, Tensor]:
    """y, the last state, and the gradients of a projection of both."""
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()}
    options = {"delta_softplus": True, "reverse_channels": reverse, "return_state": True}
    y, state = selective_scan(**leaves, **options, backend=backend)
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (y, state))
    weights = (w.bfloat16().double() for w in weights)  # an incoming gradient that nothing rounds
    loss = sum((x.double() * w).sum() for x, w in zip((y, state), weights, strict=True))
    gradients = torch.autograd.grad(loss, leaves.values())
    return {"y": y.detach(), "state": state.detach()} | dict(zip(leaves, gradients, strict=True))


def check(arguments: dict[str, Tensor], dtype: torch.dtype, reverse: int = 0) -> None:
    """A result in float32 is that exact whatever the tokens' dtype."""
    given = {name: x.to(dtype) if name in TOKENS else x for name, x in arguments.items()}
    got = solve(given, "cpu", reverse)
    wanted = solve({name: x.double() for name, x in given.items()}, "dual", reverse)
    for name, x in got.items():
        table = FORWARD if name in ("y", "state") else GRADIENT
        assert_close(x, wanted[name], table[x.dtype], name)


@pytest.mark.parametrize(
    ("length", "channels", "groups", "reverse", "states", "dtype"),
    [
        (1, 16, 1, 0, 16, torch.float32),
        (1, 16, 1, 16, 1, torch.bfloat16),
        (63, 32, 1, 16, 8, torch.float32),
        (64, 96, 2, 48, 16, torch.float32),
        (65, 112, 1, 32, 20, torch.float32),
        (65, 112, 1, 32, 16, torch.bfloat16),
        (130, 80, 5, 80, 1, torch.float32),
        (130, 32, 2, 16, 20, torch.bfloat16),
    ],
)
def test_ragged_ends_and_blocks(length, channels, groups, reverse, states, dtype):
    """Also blocks of fewer channels than the backward pass sums at a time."""
    check(arguments_of(length, channels, states, groups, batch=2), dtype, reverse)


def test_released_golden():
    """Of 24 channels, with 8 of zeros more: the kernels serve multiples of 16."""
    tensors = load_file(GOLDEN / "selective_scan_op.safetensors")
    tolerance = json.loads((GOLDEN / "selective_scan_op.json").read_text())["tolerance"]
    leaves = {
        key.removeprefix("input."): x.requires_grad_("proj" not in key)
        for key, x in tensors.items()
        if key.startswith("input.")
    }

    def padded(name: str) -> Tensor:
        x = leaves[name].transpose(1, 2) if leaves[name].ndim == 3 else leaves[name]
        axis = 0 if name in ("A", "D", "delta_bias") else -1
        zeros = torch.zeros_like(x.narrow(axis, 0, 8))
        return torch.cat([x, zeros], axis)

    b, c = (leaves[name].transpose(1, 2) for name in ("B", "C"))
    y, state = selective_scan(
        *(padded("u"), padded("delta"), padded("A"), b, c),
        *(padded("D"), padded("z"), padded("delta_bias")),
        delta_softplus=True,
        return_state=True,
        backend="cpu",
    )
    out, state = y[..., :24].transpose(1, 2), state[:, :24]
    ((out * leaves["proj_out"]).sum() + (state * leaves["proj_last"]).sum()).backward()
    assert_close(out, tensors["output.out"], tolerance["forward"])
    assert_close(state, tensors["output.last_state"], tolerance["forward"])
    for key in (key for key in tensors if key.startswith("output.grad.")):
        leaf = leaves[key.removeprefix("output.grad.")]
        assert_close(leaf.grad, tensors[key], tolerance["gradients"], key)


def test_the_same_bits_whatever_the_threads():
    """Several blocks per group, several sequences, both directions."""
    arguments = arguments_of(130, 160, 16, 1, batch=2)
    before, wanted = torch.get_num_threads(), solve(arguments, "cpu", 64)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            got = solve(arguments, "cpu", 64)
            assert all(torch.equal(got[name], x) for name, x in wanted.items())
    finally:
        torch.set_num_threads(before)


def test_views_of_one_projection_are_read_in_place(monkeypatch):
    """As a layer makes them: no copy, and nothing beside the views is read."""
    channels, states = 32, 16
    widths = [channels, channels, channels, states, states]
    whole = torch.randn(2, 70, sum(widths) + 3, dtype=torch.float32)
    whole[..., -3:] = float("nan")
    u, delta, z, b, c, _ = whole.split([*widths, 3], -1)
    a = -torch.rand(channels, states, dtype=torch.float32)
    tensors = {"u": u, "delta": delta, "A": a, "B": b, "C": c, "z": z}
    copies = []
    monkeypatch.setattr(cpu, "contiguous_last", lambda x: _seen(x, copies))
    got = selective_scan(**tensors, delta_softplus=True, backend="cpu")
    assert copies == [False] * 5
    wanted = selective_scan(
        **{name: x.contiguous() for name, x in tensors.items()}, delta_softplus=True, backend="cpu"
    )
    assert torch.equal(got, wanted)


def _seen(x: Tensor, copies: list[bool]) -> Tensor:
    prepared = _native.contiguous_last(x)
    copies.append(prepared.data_ptr() != x.data_ptr())
    return prepared


def decays(x: Tensor) -> Tensor:
    """exp(x) as the kernels compute it: of a state of ones after one token of zeros."""
    zeros = torch.zeros(1, 1, 16, dtype=torch.float32)
    ones = torch.ones(1, 16, len(x), dtype=torch.float32)
    matrix = torch.zeros(1, 1, len(x), dtype=torch.float32)
    _, state = selective_scan(
        *(zeros, zeros + 1, x.expand(16, -1), matrix, matrix),
        initial_state=ones,
        return_state=True,
        backend="cpu",
    )
    assert torch.equal(state, state[:, :1].expand_as(state)) or state.isnan().any()
    return state[0, 0]


@pytest.mark.parametrize("isa", ["avx512bf16", "avx2", "baseline"])
def test_the_exponential(isa, load_kernels):
    """A relative error of 2e-7 and that of rounding x log2 e; saturation where float32 ends."""
    load_kernels(isa)
    x = torch.cat([torch.linspace(-87, 88, 40001), -torch.logspace(-9, 0, 2001)]).float()
    got, wanted = decays(x).double(), x.double().exp()
    assert ((got / wanted - 1).abs() <= 2e-7 + 1.2e-7 * x.abs()).all()
    slow = x.abs() < 1e-3  # over a thousand tokens an error here would add up
    assert (got - wanted)[slow].abs().max() < 6.1e-8
    infinity = float("inf")
    extremes = torch.tensor([0.0, -1e4, -3e38, -infinity, 89.0, 3e38, float("nan")]).float()
    got = decays(extremes)
    assert got[0] == 1
    assert (got[1:4] < 1.2e-38).all()
    assert (got[4:6] == infinity).all()
    assert got[6].isnan()


def test_inputs_a_hundred_times_as_large():
    """Softplus does not overflow, and decays underflow to zero."""
    arguments = {n: 100 * x for n, x in arguments_of(6400, 16, 16, 1).items()}
    for name, x in solve(arguments, "cpu").items():
        assert x.isfinite().all(), name


def test_parameters_of_other_dtypes():
    """What is summed in float32 may come in any dtype; gradients have their tensors'."""
    arguments = arguments_of(20, 32, 16, 1)
    others = {n: x if n in TOKENS else x.bfloat16() for n, x in arguments.items()}
    got, wanted = (
        solve(given, "cpu") for given in (others, {n: x.float() for n, x in others.items()})
    )
    for name, x in got.items():
        assert name not in others or x.dtype == others[name].dtype
        assert torch.equal(x, wanted[name].to(x.dtype)), name


@pytest.mark.parametrize(
    ("change", "groups", "reverse", "reason"),
    [
        ({}, 1, 8, "24 channels are no multiple of 16"),
        ({}, 4, 0, "8 channels are no multiple of 16"),
        ({"u": torch.float16}, 1, 0, "dtype torch.float16 is not one of"),
    ],
)
def test_refusals(change, groups, reverse, reason):
    arguments = arguments_of(3, 32, 4, groups)
    for name, dtype in change.items():
        arguments[name] = arguments[name].to(dtype)
    found = cpu.refusal(Inputs(*arguments.values(), True, reverse))
    assert found is not None
    assert found.startswith(reason)
