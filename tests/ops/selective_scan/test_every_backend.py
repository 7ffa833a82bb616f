"""The selective scan by each backend: released goldens, the definition in float64, long inputs."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import selective_scan
from vision_ttt.ops.selective_scan import dual
from vision_ttt.ops.selective_scan.op import OP

GOLDEN = Path(__file__).parents[2] / "golden"
BACKENDS = [*(name for name in OP.backends if name != "triton"), "reference"]
KERNELS = [name for name in BACKENDS if name != "reference"]


class Case(NamedTuple):
    """What varies of a call. A direction has 16 channels, or 32 where both scan alike."""

    length: int = 19
    states: int = 16
    reverse: int = 16
    groups: int | None = 2
    batch: int = 2
    skip: bool = True
    gate: bool = True
    softplus: bool = True
    initial: bool = True


CASES = {
    "one token": Case(1),
    "one token short of a chunk": Case(63),
    "a chunk": Case(64),
    "one token more": Case(65),
    "three chunks": Case(130, initial=False),
    "forward only": Case(reverse=0, groups=None),
    "reverse only": Case(reverse=32, groups=None, gate=False),
    "one group for both directions": Case(groups=None),
    "two groups forward": Case(70, reverse=0),
    "bare": Case(skip=False, gate=False, softplus=False, initial=False),
    "one state": Case(states=1),
    "odd states": Case(states=5),
    "many states": Case(states=24),
}


def arguments_of(case: Case, seed: int = 0) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    channels, groups = 32, [] if case.groups is None else [case.groups]

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    tokens = case.batch, case.length
    delta = normal(*tokens, channels)
    matrices = [normal(*tokens, *groups, case.states) for _ in range(2)]
    return {
        "u": normal(*tokens, channels),
        "delta": delta if case.softplus else delta.abs() / 4,
        "A": -normal(channels, case.states).exp(),
        "B": matrices[0],
        "C": matrices[1],
        "D": normal(channels) if case.skip else None,
        "z": normal(*tokens, channels) if case.gate else None,
        "delta_bias": normal(channels) if case.softplus else None,
        "initial_state": normal(case.batch, channels, case.states) if case.initial else None,
    }


def solve(arguments, case: Case, dtype, backend):
    """y, the state, and the gradients of a projection of both; the tokens' tensors in a dtype."""
    tokens = "u", "delta", "B", "C", "z"
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {
        name: None if x is None else x.to(dtype if name in tokens else wide).requires_grad_()
        for name, x in arguments.items()
    }
    leaves = {name: x if x is None else x.detach().requires_grad_() for name, x in leaves.items()}
    y, state = selective_scan(
        **leaves,
        delta_softplus=case.softplus,
        reverse_channels=case.reverse,
        return_state=True,
        backend=backend,
    )
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for x in (y, state):
        weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        weights = weights.bfloat16().double()  # the incoming gradient is exact in every dtype
        loss = loss + (x.double() * weights).sum()
    loss.backward()
    assert y.dtype == dtype
    assert state.dtype == wide
    return {"y": y, "state": state} | {n: x.grad for n, x in leaves.items() if x is not None}


def compare(got, wanted):
    """A result in float32 is that exact whatever the tokens' dtype."""
    for name, x in got.items():
        table = FORWARD if name in ("y", "state") else GRADIENT
        assert_close(x, wanted[name], table[x.dtype], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_released_golden(backend):
    """Released layout: tokens last."""
    tensors = load_file(GOLDEN / "selective_scan_op.safetensors")
    tolerance = json.loads((GOLDEN / "selective_scan_op.json").read_text())["tolerance"]
    leaves = {
        key.removeprefix("input."): x.requires_grad_("proj" not in key)
        for key, x in tensors.items()
        if key.startswith("input.")
    }
    if backend == "cpu":  # 24 channels are no whole number of vectors; channels are independent
        with pytest.raises(ValueError, match="24 channels"):
            run_golden(leaves, backend)
        return
    out, state = run_golden(leaves, backend)
    ((out * leaves["proj_out"]).sum() + (state * leaves["proj_last"]).sum()).backward()
    assert_close(out, tensors["output.out"], tolerance["forward"])
    assert_close(state, tensors["output.last_state"], tolerance["forward"])
    gradients = [key for key in tensors if key.startswith("output.grad.")]
    assert len(gradients) == 8
    for key in gradients:
        leaf = leaves[key.removeprefix("output.grad.")]
        assert_close(leaf.grad, tensors[key], tolerance["gradients"], key)


def run_golden(leaves, backend):
    u, delta, b, c, z = (leaves[name].transpose(1, 2) for name in ("u", "delta", "B", "C", "z"))
    y, state = selective_scan(
        *(u, delta, leaves["A"], b, c, leaves["D"], z, leaves["delta_bias"]),
        delta_softplus=True,
        return_state=True,
        backend=backend,
    )
    return y.transpose(1, 2), state


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, backend):
    arguments = arguments_of(case)
    wanted = solve(arguments, case, torch.float64, "reference")
    compare(solve(arguments, case, torch.float32, backend), wanted)


@pytest.mark.parametrize("backend", KERNELS)
def test_bfloat16(backend):
    """Of inputs that are bfloat16 already."""
    case = Case(100)
    arguments = {n: x.bfloat16().float() for n, x in arguments_of(case).items()}
    wanted = solve(arguments, case, torch.float64, "reference")
    compare(solve(arguments, case, torch.bfloat16, backend), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reverse_channels_are_the_flipped_scan(backend):
    case = Case(70, reverse=32, groups=None)
    arguments = arguments_of(case)
    flipped = {
        name: x.flip(1) if name in ("u", "delta", "B", "C", "z") else x
        for name, x in arguments.items()
    }
    options = {"delta_softplus": True, "return_state": True, "backend": backend}
    y, state = selective_scan(**arguments, reverse_channels=32, **options)
    other, other_state = selective_scan(**flipped, **options)
    assert_close(y, other.flip(1), 1e-6)
    assert_close(state, other_state, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [1, 17, 64, 69])
def test_a_state_goes_on(split, backend):
    """Two calls give what one does, in outputs and in gradients through the state."""
    arguments = arguments_of(Case(70, reverse=0, groups=None))
    options = {"delta_softplus": True, "return_state": True, "backend": backend}

    def tokens(part):
        return {
            name: x[:, part] if name in ("u", "delta", "B", "C", "z") else x
            for name, x in arguments.items()
        }

    for x in arguments.values():
        x.requires_grad_()
    whole, last = selective_scan(**arguments, **options)
    first, state = selective_scan(**tokens(slice(split)), **options)
    rest = tokens(slice(split, None)) | {"initial_state": state}
    second, final = selective_scan(**rest, **options)
    joined = torch.cat([first, second], 1)
    assert_close(joined, whole, 1e-5)
    assert_close(final, last, 1e-5)
    leaves = list(arguments.values())
    weights = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weights).sum() + last.sum(), leaves)
    got = torch.autograd.grad((joined * weights).sum() + final.sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", KERNELS)
def test_large_inputs_and_many_tokens_stay_finite(backend, dtype):
    case = Case(1500, batch=1, initial=False)
    arguments = arguments_of(case)
    large = {n: x if x is None or n == "A" else 100 * x for n, x in arguments.items()}
    found = solve(large, case, dtype, backend)
    assert all(x.isfinite().all() for x in found.values())


def test_gradcheck():
    """Finite differences along random directions."""
    case = Case(5, states=2, batch=1)
    arguments = {
        name: x[..., :4] if name in ("u", "delta", "z", "D", "delta_bias") else x
        for name, x in arguments_of(case).items()
    }
    arguments["A"], arguments["initial_state"] = (
        arguments["A"][:4],
        arguments["initial_state"][:, :4],
    )
    leaves = [x.double().requires_grad_() for x in arguments.values()]
    for backend in ("dual", "reference"):

        def scan(*tensors, backend=backend):
            named = dict(zip(arguments, tensors, strict=True))
            options = {"delta_softplus": True, "return_state": True, "backend": backend}
            return selective_scan(**named, reverse_channels=2, **options)

        assert torch.autograd.gradcheck(scan, leaves, fast_mode=True)


def test_few_tokens_take_few_steps(monkeypatch):
    steps, advance = [], dual._Scan.advance
    monkeypatch.setattr(dual._Scan, "advance", lambda *a: steps.append(a) or advance(*a))
    case = Case(3)
    solve(arguments_of(case), case, torch.float64, "dual")
    assert len(steps) == 2 * (3 + 3 + 3)  # to the states, the outputs, and back; two directions
