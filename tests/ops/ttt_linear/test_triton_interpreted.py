"""The Triton kernels of ttt_linear, interpreted, against the definition.

The interpreter reproduces the kernels' roundings but not their order of summation.
"""

import sys

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from ttt_linear_problems import OP, as_float64, make_problem, solve
from vision_ttt.layers import TTTLinear
from vision_ttt.ops import _learner_triton, ttt_linear
from vision_ttt.ops.ttt_linear.triton_backend import UNNORMED

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted

SHAPES = [  # B, T, H, d, b: one token, ragged ends, several kept states, every dimension, and
    # mini-batches of up to seven tiles, ragged too
    (1, 1, 1, 16, 16),
    (2, 15, 1, 16, 16),
    (1, 33, 1, 64, 16),
    (1, 10, 2, 32, 3),
    (1, 40, 1, 16, 20),
    (1, 70, 1, 128, 64),
    *(
        pytest.param(*[shape], marks=pytest.mark.slow)
        for shape in (
            (1, 17, 2, 32, 16),
            (1, 20, 1, 128, 16),
            (1, 30, 1, 32, 100),
            (1, 21, 2, 32, 3),
            (2, 150, 1, 16, 16),
            (1, 140, 2, 16, 32),
            (1, 200, 2, 16, 20),
            (1, 270, 1, 64, 64),
            (2, 110, 1, 16, 100),
        )
    ),
]
KINDS = [  # inner norm, position scale, one state per image
    (True, "per head", False),
    (True, None, True),
    (False, "shared", False),
]


def supported(shape, norm):
    """The shape, with the largest head dimension that the kernels support."""
    *others, dim, size = shape
    return (*others, dim if norm else min(dim, max(UNNORMED)), size)


def check(problem, dtype, backend="triton", **options):
    wanted = solve(as_float64(problem), backend="dual", **options)
    got = solve(problem, backend=backend, **options)
    for name, value in wanted.items():
        table = GRADIENT if name.startswith("grad") else FORWARD
        assert_close(got[name], value, table[dtype], name)
    return got


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outputs_states_and_gradients(shape, kind):
    # The dual form in float64 stands in for the reference, which it is to ten digits.
    norm, scale, state_per_image = kind
    shape = supported(shape, norm)
    options = {"norm": norm, "scale": scale, "state_per_image": state_per_image}
    problem = make_problem(*shape, **options, dtype=torch.float32)
    reverse_heads = shape[2] // 2 if norm else shape[2]
    check(problem, torch.float32, mini_batch_size=shape[-1], reverse_heads=reverse_heads)


@pytest.mark.parametrize("size", [2**31 - 1, sys.maxsize])
def test_all_tokens_are_one_mini_batch(size):
    problem = make_problem(1, 20, 2, 16, 20, scale=None, dtype=torch.float32)
    wanted = solve(problem, backend="triton", mini_batch_size=20)
    got = solve(problem, backend="triton", mini_batch_size=size)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_against_the_definition_itself():
    problem = make_problem(1, 37, 2, 16, 16, dtype=torch.float32)
    options = {"mini_batch_size": 16, "reverse_heads": 1, "eps": 0.1}
    wanted = solve(as_float64(problem), backend="reference", **options)
    got = solve(problem, backend="triton", **options)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [  # of one tile with a kept state, of several tiles, and of several programs
        (1, 70, 1, 16, 16),
        (1, 83, 1, 64, 32),
        pytest.param((2, 83, 3, 16, 16), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", [True, False])
def test_half_precisions(dtype, shape, norm):
    shape = supported(shape, norm)
    problem = make_problem(*shape, norm=norm, scale="shared" if norm else None, dtype=dtype)
    results = check(problem, dtype, mini_batch_size=shape[-1], reverse_heads=1)
    assert results["o"].dtype == results["grad q"].dtype == dtype
    assert results["w"].dtype == results["grad w0"].dtype == torch.float32


@pytest.mark.parametrize("norm", [True, False])
def test_either_layout(norm, monkeypatch):
    """One token per row, which a GPU may find faster for bfloat16."""
    from vision_ttt.ops.ttt_linear import triton_tuning

    by_rows = triton_tuning.Layout(False, 8)
    monkeypatch.setattr(triton_tuning, "choices", lambda *_: (by_rows,))
    scale = "per head" if norm else None
    dim = 64 if norm else 32
    problem = make_problem(1, 35, 2, dim, 16, norm=norm, scale=scale, dtype=torch.bfloat16)
    check(problem, torch.bfloat16, mini_batch_size=16, reverse_heads=1)


def test_float16_gradients_may_be_large_in_between():
    """As with a loss scale: ∂G passes 65504 though ∂V, which it becomes, does not."""
    problem = make_problem(1, 33, 2, 32, 16, dtype=torch.float16)
    scale = 8000 * torch.randn(1, 33, 2, 32, generator=torch.Generator().manual_seed(1))
    scale = scale.half()
    (got,) = torch.autograd.grad(ttt_linear(**problem, backend="triton"), problem["v"], scale)
    exact = as_float64(problem)
    o = ttt_linear(**exact, backend="dual")
    (wanted,) = torch.autograd.grad(o, exact["v"], scale.double())
    assert_close(got, wanted, GRADIENT[torch.float16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_activations_do_not_overflow(dtype):
    """Products far beyond float16's range, which no factor of a product may be rounded to."""
    problem = make_problem(1, 33, 2, 32, 16, dtype=dtype)
    large = {n: (x * 100 if n in "qkv" else x).detach() for n, x in problem.items()}
    large = {name: x.requires_grad_() for name, x in large.items()}
    results = solve(large, backend="triton", mini_batch_size=16)
    assert all(torch.isfinite(x).all() for name, x in results.items() if name in ("o", "w", "b"))
    assert torch.isfinite(results["grad q"]).all()


def test_roundings_do_not_grow_along_the_sequence():
    """At a layer's initial state, where a mean left in z would be amplified at every step."""
    torch.manual_seed(0)
    layer = TTTLinear(64, 2)
    with torch.no_grad():
        problem = layer.inner_problem(torch.randn(1, 196, 64))
        exact = {n: x.double() if torch.is_tensor(x) else x for n, x in problem.items()}
        o = ttt_linear(**problem, backend="triton")
        assert_close(o, ttt_linear(**exact, backend="dual"), FORWARD[torch.float32])


def test_strided_views_of_one_projection_with_gradients():
    heads, dim = 2, 16
    problem = make_problem(2, 21, heads, dim, 16, dtype=torch.float32)
    fused = torch.cat([problem[name].detach().flatten(2) for name in "qkv"], dim=-1)
    before = fused.clone()
    fused.requires_grad_()
    views = [x.unflatten(-1, (heads, dim)) for x in fused.split(heads * dim, dim=-1)]
    assert not any(view.is_contiguous() for view in views)
    options = {"mini_batch_size": 16, "reverse_heads": 1, "backend": "triton"}
    strided = ttt_linear(**problem | dict(zip("qkv", views, strict=True)), **options)
    o = ttt_linear(**problem, **options)
    assert_close(strided, o, 1e-6)
    # The output's gradient, too, has the strides of a wider tensor.
    weights = torch.randn(2, 21, heads, 2 * dim)[..., :dim]
    (gradient,) = torch.autograd.grad((strided * weights).sum(), fused)
    separate = torch.autograd.grad((o * weights.contiguous()).sum(), [problem[n] for n in "qkv"])
    assert_close(gradient, torch.cat([x.flatten(2) for x in separate], dim=-1), 1e-6)
    assert torch.equal(fused, before)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_empty_rows_of_a_tile_leave_no_trace(rate):
    """With eps = 0 and a bias of zeros the empty rows' norm divides by 0: NaN, were they used."""
    problem = make_problem(1, 9, 2, 16, 16, dtype=torch.float32)
    problem["b0"] = torch.zeros_like(problem["b0"]).requires_grad_()
    problem["eta"] = (rate * problem["eta"].detach()).requires_grad_()
    check(problem, torch.float32, mini_batch_size=16, reverse_heads=1, eps=0.0)


def test_state_continues_where_it_stopped():
    problem = make_problem(1, 40, 2, 16, 16, dtype=torch.float32)
    whole = solve(problem, backend="triton", mini_batch_size=16)
    o, state = [], (problem["w0"], problem["b0"])
    for tokens in (slice(0, 32), slice(32, 40)):
        part = {n: x[:, tokens] if n in ("q", "k", "v", "eta") else x for n, x in problem.items()}
        part["w0"], part["b0"] = state[:2]
        options = {"mini_batch_size": 16, "backend": "triton", "return_state": True}
        piece, state = ttt_linear(**part, **options)
        o.append(piece)
    assert_close(torch.cat(o, dim=1), whole["o"], 1e-6)
    assert_close(state[0], whole["w"], 1e-6)
    assert_close(state[1], whole["b"], 1e-6)


@pytest.mark.parametrize("size", [16, pytest.param(20, marks=pytest.mark.slow)])
def test_the_kept_states_serve_either_backward(size):
    problem = make_problem(1, 140 if size == 16 else 170, 1, 16, size, dtype=torch.float32)
    inputs = OP.inputs(*(x.detach() for x in problem.values()), size, 1, 1e-6)
    triton, dual = OP.backends["triton"], OP.backends["dual"]
    o, w, b, kept_w, kept_b = triton.forward(inputs, True)
    *_, dual_w, dual_b = dual.forward(inputs, True)
    assert kept_w.shape[0] > 1
    assert_close(kept_w, dual_w, 1e-6)
    assert_close(kept_b, dual_b, 1e-6)
    outcomes = [
        kernel.backward(inputs, o, w, b, *kept)
        for kernel in (triton, dual)
        for kept in ((kept_w, kept_b), (dual_w, dual_b))
    ]
    for outcome in outcomes[1:]:
        for got, wanted in zip(outcome, outcomes[0], strict=True):
            assert_close(got, wanted, 1e-5)


@pytest.mark.parametrize("mini_batch_size", [16, 20])
def test_every_output_is_written(mini_batch_size, monkeypatch):
    """Buffers that start as NaN: what a kernel forgets to write, or reads too early, shows."""
    fill = _learner_triton.LearnerCall.empty

    def poisoned(self, *shape, dtype=torch.float32):
        return fill(self, *shape, dtype=dtype).fill_(float("nan"))

    monkeypatch.setattr(_learner_triton.LearnerCall, "empty", poisoned)
    problem = make_problem(1, 37, 2, 16, mini_batch_size, scale="shared", dtype=torch.float32)
    check(problem, torch.float32, mini_batch_size=mini_batch_size)


def test_nan_reaches_its_own_mini_batch_and_later_ones():
    problem = make_problem(1, 40, 2, 16, 16, dtype=torch.float32)
    problem = {name: x.detach() for name, x in problem.items()}
    problem["v"][0, 20, 0] = float("nan")
    o = ttt_linear(**problem, mini_batch_size=16, backend="triton")
    assert torch.isfinite(o[0, :16]).all()
    assert torch.isfinite(o[0, :, 1]).all()
    assert torch.isnan(o[0, 20:, 0]).all()


def test_no_image_at_all():
    problem = make_problem(0, 17, 2, 16, 16, dtype=torch.float32)
    results = solve(problem, backend="triton", mini_batch_size=16)
    assert results["o"].shape == (0, 17, 2, 16)
    assert not results["grad w0"].any()


def test_memory_kept_for_backward_is_of_the_order_of_the_inputs():
    batch, length, heads, dim = 1, 160, 1, 32
    problem = make_problem(batch, length, heads, dim, 16, dtype=torch.float32)
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ttt_linear(**problem, mini_batch_size=16, backend="triton").sum()
    inputs = sum(x.numel() for x in problem.values())
    assert sum(kept.values()) <= inputs + 1.1 * batch * length * heads * dim


def test_nobody_gets_the_interpreter_unasked(monkeypatch):
    def refuse(*args):
        raise AssertionError("the interpreter ran")

    kernel = OP.backends["triton"]._replace(forward=refuse)
    monkeypatch.setitem(OP.backends, "triton", kernel)
    problem = make_problem(1, 17, 2, 16, 16, dtype=torch.float16)  # which "cpu" does not serve
    assert ttt_linear(**problem).isfinite().all()
    with pytest.raises(AssertionError, match="the interpreter ran"):
        ttt_linear(**problem, backend="triton")
