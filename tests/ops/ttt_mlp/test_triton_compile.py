"""The Triton kernels of ttt_mlp compiled for Hopper (sm_90) without a GPU."""

import re
from importlib import import_module

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402  (may be missing, see above)
from triton.compiler import ASTSource  # noqa: E402

from machine_code import Usage, check_unspilled, usage_of  # noqa: E402
from vision_ttt.ops import _learner_triton  # noqa: E402
from vision_ttt.ops.ttt_mlp.triton_backend import LAYOUTS  # noqa: E402

KERNELS = {  # module, function, the tensors that it is not given
    "forward": ("triton_forward", "forward_kernel", ("z1_out", "x_out", "norm_out")),
    "replay": ("triton_forward", "forward_kernel", ("q", "o")),
    "scan": ("triton_scan", "scan_kernel", ()),
    "part": ("triton_part", "part_kernel", ()),
}
VIEWS = {"q", "k", "v", "o", "grad_o", "dq", "dk", "dv"}
DTYPES = {  # views, Z1 between the backward kernels
    "bfloat16": ("*bf16", "*bf16"),
    "float16": ("*fp16", "*fp32"),
    "float32": ("*fp32", "*fp32"),
}
OPTIONS = {  # what an option that is not in use leaves out
    "norm": ("ln_weight", "ln_bias", "norm_out", "norm_in", "dweight", "dbias"),
    "scale": ("scale", "dscale", "dlast"),
    "several": ("sum_w1", "sum_b1", "sum_w2", "dsum_w1", "dsum_b1", "dsum_w2"),
}
SHARED_MEMORY = 227 * 1024


def usage(kernel: str, dtype: str, dim: int, b: int, directory, without=()) -> Usage:
    """Compile a kernel for the arguments that its launcher passes it."""
    module, function, absent = KERNELS[kernel]
    jitted = getattr(import_module(f"vision_ttt.ops.ttt_mlp.{module}"), function)
    view, between = DTYPES[dtype]
    constants = _learner_triton.constants(getattr(torch, dtype), dim, b)
    constants["BLOCK"], warps = LAYOUTS[dim]
    if not constants["SEVERAL"] and kernel != "part":
        without = (*without, "several")
    if "norm" in without:
        between = "*fp32"
    constants |= dict.fromkeys(absent)
    constants |= {name: None for option in without for name in OPTIONS[option]}
    constants = {name: x for name, x in constants.items() if name in jitted.arg_names}
    plain = {parameter.name for parameter in jitted.params if parameter.do_not_specialize}
    signature, aligned = {}, {}
    for index, name in enumerate(jitted.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in plain:
            signature[name] = "i32"
        elif name == "positions":
            signature[name] = "*i64"
        elif name == "eps":
            signature[name] = "fp32"
        elif name.endswith("_strides"):
            signature[name] = ("i32",) * 3
            aligned |= {(index, axis): [["tt.divisibility", 16]] for axis in range(3)}
        else:
            hidden = name in ("z1_out", "z1_in")
            signature[name] = view if name in VIEWS else between if hidden else "*fp32"
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return usage_of(compiled, directory)


def check_fast(found: Usage) -> None:
    assert found.shared <= SHARED_MEMORY
    # Products on tensor cores, states fetched 16 bytes at a time.
    assert re.search(r"\bHG?MMA\b", found.machine_code)
    assert "LDG.E.128" in found.machine_code


@pytest.mark.parametrize("kernel", ["forward", pytest.param("replay", marks=pytest.mark.slow)])
def test_nothing_spills_going_forward_at_head_dimension_64(kernel, tmp_path, record_property):
    found = usage(kernel, "bfloat16", 64, 16, tmp_path)
    record_property("registers, stack, shared memory", found[:3])
    check_fast(found)
    check_unspilled(found)


def test_the_way_back_compiles(tmp_path):
    check_fast(usage("scan", "bfloat16", 16, 16, tmp_path, ("scale",)))


@pytest.mark.slow
@pytest.mark.parametrize(("b", "without"), [(32, ()), (16, ("norm", "scale"))], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_fits_the_chip(kernel, dtype, dim, b, without, tmp_path, record_property):
    found = usage(kernel, dtype, dim, b, tmp_path, without)
    record_property("registers, stack, shared memory", found[:3])
    check_fast(found)
