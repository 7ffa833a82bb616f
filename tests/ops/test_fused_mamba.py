"""fused_mamba beyond what every op is tested for: half precision, and what its parts cannot do."""

import torch

from tolerances import assert_close
from vision_ttt.ops.fused_mamba.op import OP

INNER, STATES, RANK, TAPS = 16, 4, 2, 4


def make_inputs(dtype=torch.float32, states=STATES):
    torch.manual_seed(0)
    shapes = {
        "conv_weight": (2 * INNER, 1, TAPS),
        "conv_bias": (2 * INNER,),
        "x_proj": (2, RANK + 2 * states, INNER),
        "dt_proj": (2, INNER, RANK),
        "dt_bias": (2 * INNER,),
        "A": (2 * INNER, states),
        "D": (2 * INNER,),
    }
    given = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    given["A"] = -given["A"].abs()
    return OP.inputs(torch.randn(2, 5, 2 * INNER).to(dtype), **given)


def test_states_are_kept_in_float32():
    out, kept = OP.fake(make_inputs(torch.bfloat16), True)
    assert (out.dtype, kept.dtype) == (torch.bfloat16, torch.float32)


def test_tokens_in_half_precision_with_parameters_in_float32():
    inputs = make_inputs(torch.bfloat16)
    got = OP(inputs)
    assert got.dtype == torch.bfloat16
    assert_close(got, OP(OP.inputs(*(x.double() for x in inputs))), 3e-2)


def test_a_state_that_the_scan_of_a_gpu_refuses():
    reason = OP.backends["triton"].refusal(make_inputs(states=257))
    assert reason == "a state of 257 numbers per channel is over 256"
