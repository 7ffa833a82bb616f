"""The selective scan as a loop of a graph, against its definition and in programs."""

import pytest
import torch

from ops.selective_scan.test_every_backend import CASES, Case, arguments_of
from tolerances import assert_close
from vision_ttt.export.program import decompositions
from vision_ttt.layers import Mamba
from vision_ttt.ops import selective_scan, use_backend
from vision_ttt.ops.selective_scan.contract import Inputs
from vision_ttt.ops.selective_scan.op import OP

UNEVEN = {"one group, a third of it reversed": Case(reverse=12, groups=None)}


def in_float64(arguments):
    return {name: None if x is None else x.double() for name, x in arguments.items()}


@pytest.mark.parametrize("case", (CASES | UNEVEN).values(), ids=CASES | UNEVEN)
def test_the_loop_computes_the_op(case):
    arguments = in_float64(arguments_of(case))
    options = {"delta_softplus": case.softplus, "reverse_channels": case.reverse}
    wanted = selective_scan(**arguments, **options, return_state=True, backend="reference")
    got = OP.exported(Inputs(**arguments, **options))
    for mine, theirs in zip(got, wanted, strict=True):
        assert_close(mine, theirs, 1e-12)


def test_steps_of_any_size():
    """Where the exponential of softplus overflows, or is nearly zero."""
    arguments = in_float64(arguments_of(Case(initial=False)))
    arguments["delta"] *= 300
    options = {"delta_softplus": True, "reverse_channels": 16}
    wanted = selective_scan(**arguments, **options, backend="reference")
    got, _ = OP.exported(Inputs(**arguments, **options))
    assert_close(got, wanted, 1e-12)


def test_bfloat16_is_computed_in_float32():
    arguments = arguments_of(Case())
    for name in ("u", "delta", "B", "C", "z"):
        arguments[name] = arguments[name].bfloat16()
    options = {"delta_softplus": True, "reverse_channels": 16}
    wanted = selective_scan(**arguments, **options, return_state=True, backend="reference")
    got = OP.exported(Inputs(**arguments, **options))
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32]
    for mine, theirs, tolerance in zip(got, wanted, (1e-2, 1e-5), strict=True):
        assert_close(mine, theirs, tolerance)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_program_of_one_direction_takes_any_number_of_tokens(batch):
    """Of a single group, whose B and C are views of one tensor."""
    layer = Mamba(16).eval()
    with torch.no_grad(), use_backend("dual"):
        traced = torch.export.export(
            layer, (torch.randn(batch, 9, 16),), dynamic_shapes=({1: torch.export.Dim("tokens")},)
        )
        program = traced.run_decompositions(decompositions())
    assert "scan" in program.graph_module.code
    assert len(program.graph.nodes) < 100
    for length in (2, 33):
        x = torch.randn(batch, length, 16)
        assert_close(program.module()(x), layer(x), 1e-6)
