"""The FLOPs that PyTorch's counter is told, against those that are done."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from ttt_mlp_problems import NAMES, OP, make_problem
from vision_ttt.ops import ttt_mlp


def test_flops_of_the_forward_pass_are_those_it_does():
    """The formula against a count of the very products the forward runs, and against 28 d²."""
    batch, length, heads, dim, size = 2, 71, 3, 8, 16
    problem = make_problem(batch, length, heads, dim, size, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ttt_mlp(**problem, mini_batch_size=size)
    formula = counter.get_total_flops()
    inputs = OP.inputs(*(problem.get(name) for name in NAMES), size, 0, 1e-6)
    dual = OP.backends["dual"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        dual.forward(inputs, False)
    assert formula == counter.get_total_flops()
    pairs = sum(n * n for n in (16, 16, 16, 16, 7))
    assert formula == 2 * batch * heads * (28 * length * dim**2 + 10 * pairs * dim)


def test_flops_of_the_backward_pass_are_those_it_does():
    """The formula against a count of the very products the backward runs."""
    size = 4
    problem = make_problem(1, 141, 2, 4, size, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        ttt_mlp(**problem, mini_batch_size=size).sum().backward()
    formula = counter.get_flop_counts()["Global"][torch.ops.vision_ttt.ttt_mlp_backward]
    inputs = OP.inputs(*(problem.get(name) for name in NAMES), size, 0, 1e-6)
    dual = OP.backends["dual"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        o, *rest = dual.forward(inputs, True)
        state, kept = rest[:4], rest[4:]
        assert len(kept[0]) > 1
        forward = counter.get_total_flops()
        dual.backward(inputs, o, *state, *kept)
    assert formula == counter.get_total_flops() - forward
