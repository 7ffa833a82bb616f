"""The op as a citizen of PyTorch: schema, gradients, compile, export, autocast, FLOPs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tolerances import assert_close
from ttt_linear_problems import BACKENDS, KERNELS, make_problem, solve
from vision_ttt.ops import ttt_linear, use_backend
from vision_ttt.ops.ttt_linear import autograd
from vision_ttt.ops.ttt_linear.autograd import ttt_linear_op

NAMES = ("q", "k", "v", "eta", "w0", "b0", "ln_weight", "ln_bias", "position_scale")


def op_arguments(problem, backend, mini_batch_size=4, reverse_heads=1):
    tensors = (problem.get(name) for name in NAMES)
    return (*tensors, mini_batch_size, reverse_heads, 1e-6, True, backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(backend, norm, dtype):
    scale = "per head" if norm else None
    # 33 tokens: two states kept; a transposed state must not pass its strides on
    problem = make_problem(2, 33, 3, 16, 4, norm=norm, scale=scale, dtype=dtype)
    problem["w0"] = problem["w0"].detach().transpose(-1, -2).requires_grad_()
    torch.library.opcheck(ttt_linear_op, op_arguments(problem, backend))


@pytest.mark.parametrize("backend", KERNELS)
def test_compiles_with_a_state_and_gradient_of_other_strides(backend):
    def function(problem):
        w0 = problem["w0"].transpose(-1, -2)
        _, (w, _) = ttt_linear(
            **problem | {"w0": w0}, mini_batch_size=4, return_state=True, backend=backend
        )
        return torch.einsum("bhij,bthj->bthi", w, problem["q"]).square().sum()

    problem = make_problem(2, 9, 2, 16, 4, state_per_image=True, dtype=torch.float32)
    wanted = torch.autograd.grad(function(problem), list(problem.values()))
    compiled = torch.compile(function, fullgraph=True)
    got = torch.autograd.grad(compiled(problem), list(problem.values()))
    for name, a, b in zip(problem, got, wanted, strict=True):
        assert_close(a, b, 1e-5, name)


@pytest.mark.parametrize("backend", ["dual", "reference"])
@pytest.mark.parametrize("norm", [True, False])
def test_gradcheck(backend, norm):
    problem = make_problem(1, 7, 2, 4, 3, norm=norm)

    def function(*tensors):
        arguments = dict(zip(problem, tensors, strict=True))
        options = {"mini_batch_size": 3, "reverse_heads": 1, "backend": backend}
        o, state = ttt_linear(**arguments, **options, return_state=True)
        return o, *state

    assert torch.autograd.gradcheck(function, tuple(problem.values()))


@pytest.mark.parametrize("backend", KERNELS)
def test_compiles_as_one_graph_and_for_any_length(backend):
    options = {"mini_batch_size": 4, "reverse_heads": 1, "backend": backend}
    compiled = torch.compile(ttt_linear, fullgraph=True, dynamic=True)
    for length in (19, 8, 33):
        problem = make_problem(2, length, dim=16, dtype=torch.float32)
        wanted = solve(problem, **options)
        got = solve(problem, function=compiled, **options)
        for name, value in wanted.items():
            assert_close(got[name], value, 1e-6, name)


def test_reference_compiles_as_one_graph():
    problem = make_problem(1, 6, 2, 4, 3, dtype=torch.float32)
    options = {"mini_batch_size": 3, "reverse_heads": 1, "backend": "reference"}
    # aot_eager: what is in question is the one graph; generated C++ for it takes half a minute.
    compiled = torch.compile(ttt_linear, fullgraph=True, backend="aot_eager")
    assert_close(compiled(**problem, **options), ttt_linear(**problem, **options), 1e-5)


def test_compiled_code_obeys_a_later_override(monkeypatch):
    runs = []
    dual = autograd.KERNELS["dual"]
    counted = dual._replace(forward=lambda *a: (runs.append(1), dual.forward(*a))[1])
    monkeypatch.setattr(autograd, "KERNELS", {"dual": counted})
    problem = {n: x.detach() for n, x in make_problem(1, 6, 2, 4, 3, dtype=torch.float32).items()}
    compiled = torch.compile(lambda: ttt_linear(**problem, mini_batch_size=3), fullgraph=True)
    compiled()
    assert len(runs) == 1
    with use_backend("reference"):
        compiled()
    assert len(runs) == 1
    compiled()
    assert len(runs) == 2


def test_exports_with_dynamic_length():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, eta, w0, b0):
            return ttt_linear(q, k, v, eta, w0, b0, mini_batch_size=4)

    def arguments(length):
        problem = make_problem(2, length, norm=False, scale=None, dtype=torch.float32)
        return tuple(x.detach() for x in problem.values())

    length = torch.export.Dim("length", min=2, max=10_000)
    along = {1: length}
    shapes = (along, along, along, along, None, None)
    program = torch.export.export(Layer(), arguments(19), dynamic_shapes=shapes)
    for size in (3, 50):
        wanted = Layer()(*arguments(size))
        assert_close(program.module()(*arguments(size)), wanted, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_views_and_keeps_state_and_norm(backend):
    problem = make_problem(2, 37, dim=16, dtype=torch.float32)
    rounded = {
        name: (x.detach().bfloat16() if name in "qkv" else x.detach()).requires_grad_()
        for name, x in problem.items()
    }
    options = {"mini_batch_size": 4, "backend": backend}
    wanted = solve(rounded, **options)

    def under_autocast(**arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ttt_linear(**arguments)

    got = solve(problem, function=under_autocast, **options)
    assert got["o"].dtype == torch.bfloat16
    assert got["w"].dtype == torch.float32
    for name, value in wanted.items():
        # The same numbers: the inside of the op is not autocast, in neither direction.
        assert torch.equal(got[name].to(value.dtype), value), name


def test_backward_inside_autocast_is_not_autocast():
    problem = make_problem(2, 37, dtype=torch.bfloat16)
    wanted = solve(problem, mini_batch_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = solve(problem, mini_batch_size=4)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_autocast_rule_of_the_bare_op():
    problem = make_problem(2, 19, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, w, *_ = ttt_linear_op(*op_arguments(problem, "dual"))
    assert o.dtype == torch.bfloat16
    assert w.dtype == torch.float32


def test_flops_are_those_of_equation_13():
    batch, length, heads, dim, size = 2, 64, 3, 8, 16
    problem = make_problem(batch, length, heads, dim, size, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ttt_linear(**problem, mini_batch_size=size)
    multiply_adds = batch * heads * (3 * length * dim**2 + 2 * size * length * dim)
    assert counter.get_total_flops() == 2 * multiply_adds


def test_flops_of_the_backward_pass_are_those_it_does():
    """The formula against a count of the very products the backward runs."""
    size = 4
    problem = make_problem(1, 71, 2, 16, size, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        ttt_linear(**problem, mini_batch_size=size).sum().backward()
    formula = counter.get_flop_counts()["Global"][torch.ops.vision_ttt.ttt_linear_backward]
    inputs = [problem.get(name) for name in NAMES]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        o, w, b, *kept = autograd.KERNELS["dual"].forward(*inputs, size, 0, 1e-6, True)
        forward = counter.get_total_flops()
        autograd.KERNELS["dual"].backward(o, w, b, *inputs, *kept, size, 0, 1e-6)
    assert formula == counter.get_total_flops() - forward


def test_forward_derivatives_and_transforms_go_through_the_reference():
    problem = make_problem(1, 6, 2, 4, 3)
    tangent = torch.randn_like(problem["k"])

    def function(k, **options):
        return ttt_linear(**problem | {"k": k}, mini_batch_size=3, **options)

    _, derivative = torch.func.jvp(function, (problem["k"],), (tangent,))
    step = 1e-6
    ahead, behind = (function(problem["k"] + s * tangent) for s in (step, -step))
    assert_close(derivative, (ahead - behind) / (2 * step), 1e-7)
    gradient = torch.func.grad(lambda k: function(k).sum())(problem["k"])
    (wanted,) = torch.autograd.grad(function(problem["k"]).sum(), problem["k"])
    assert_close(gradient, wanted, 1e-10)
    with pytest.raises(ValueError, match=r"torch\.func transforms .* need the backend 'reference'"):
        torch.func.jvp(lambda k: function(k, backend="dual"), (problem["k"],), (tangent,))


def test_exported_programs_pick_their_backend_where_they_run():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, eta, w0, b0):
            return ttt_linear(q, k, v, eta, w0, b0)

    problem = make_problem(1, 20, 2, 16, norm=False, scale=None, dtype=torch.float32)
    arguments = tuple(x.detach() for x in problem.values())
    program = torch.export.export(Layer(), arguments)
    assert "'auto'" in program.graph_module.code
