"""The op as a citizen of PyTorch: schema, gradients, compile, export, autocast, FLOPs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tolerances import assert_close
from ttt_linear_problems import KERNELS, NAMES, OP, make_problem
from vision_ttt.ops import ttt_linear, use_backend


@pytest.mark.parametrize("backend", KERNELS)
def test_compiles_with_a_state_and_gradient_of_other_strides(backend):
    def function(problem):
        w0 = problem["w0"].transpose(-1, -2)
        _, (w, *_) = ttt_linear(
            **problem | {"w0": w0}, mini_batch_size=4, return_state=True, backend=backend
        )
        return torch.einsum("bhij,bthj->bthi", w, problem["q"]).square().sum()

    problem = make_problem(2, 9, 2, 16, 4, state_per_image=True, dtype=torch.float32)
    wanted = torch.autograd.grad(function(problem), list(problem.values()))
    compiled = torch.compile(function, fullgraph=True)
    got = torch.autograd.grad(compiled(problem), list(problem.values()))
    for name, a, b in zip(problem, got, wanted, strict=True):
        assert_close(a, b, 1e-5, name)


def test_compiled_code_obeys_a_later_override(monkeypatch):
    runs = []
    dual = OP.backends["dual"]
    counted = dual._replace(forward=lambda *a: (runs.append(1), dual.forward(*a))[1])
    monkeypatch.setattr(OP, "backends", {"dual": counted})
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
    inputs = OP.inputs(*(problem.get(name) for name in NAMES), size, 0, 1e-6)
    dual = OP.backends["dual"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        o, w, b, *kept = dual.forward(inputs, True)
        forward = counter.get_total_flops()
        dual.backward(inputs, o, w, b, *kept)
    assert formula == counter.get_total_flops() - forward


def test_exported_programs_pick_their_backend_where_they_run():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, eta, w0, b0):
            return ttt_linear(q, k, v, eta, w0, b0)

    problem = make_problem(1, 20, 2, 16, norm=False, scale=None, dtype=torch.float32)
    arguments = tuple(x.detach() for x in problem.values())
    program = torch.export.export(Layer(), arguments)
    assert "'auto'" in program.graph_module.code
