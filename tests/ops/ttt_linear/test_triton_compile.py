"""The Triton kernels compiled for Hopper (sm_90) without a GPU: what ptxas says of them."""

import re
from importlib import import_module

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  (may be missing, see above)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from machine_code import Usage, check_unspilled, usage_of  # noqa: E402
from vision_ttt.ops import _learner_triton  # noqa: E402
from vision_ttt.ops.ttt_linear.triton_backend import UNNORMED  # noqa: E402

PACKAGE = "vision_ttt.ops.ttt_linear"
tuning = import_module(f"{PACKAGE}.triton_tuning")
KERNELS = {
    "forward": ("triton_forward", "forward_kernel"),
    "segments": ("triton_segments", "segments_kernel"),
    "scan": ("triton_scan", "scan_kernel"),
    "part": ("triton_part", "part_kernel"),
}
VIEWS = {"q", "k", "v", "o", "grad_o", "dq", "dk", "dv"}
SHARES = {"dk_share", "dg_share", "dz_q_out", "dz_q_in", "x_out", "x_in"}
DTYPES = {  # views, what the backward kernels hand over
    "bfloat16": ("*bf16", "*bf16"),
    "float16": ("*fp16", "*fp32"),
    "float32": ("*fp32", "*fp32"),
}
OPTIONS = {  # what an option that is not in use leaves out
    "norm": ("ln_weight", "ln_bias", "norm_out", "norm_in", "dweight", "dbias"),
    "scale": ("scale", "dscale", "dlast"),
}
SHARED_MEMORY = 227 * 1024


def usage(
    kernel: str, dtype: str, dim: int, b: int, layout, directory, without=(), **limits
) -> Usage:
    """Compile a kernel for the arguments that its launcher passes it, all options in use."""
    module, function = KERNELS[kernel]
    jitted = getattr(import_module(f"{PACKAGE}.{module}"), function)
    view, share = DTYPES[dtype]
    normed = "norm" not in without
    constants = _learner_triton.constants(getattr(torch, dtype), dim, b, normed)
    constants["TRANSPOSED"] = layout.transposed
    constants |= {name: None for option in without for name in OPTIONS[option]}
    if "norm" in without:
        share = "*fp32"
    if limits:  # of the crowded forward pass, which keeps no states
        constants |= {"kept_w": None, "kept_b": None}
    if kernel == "segments" and not constants["SEVERAL"]:
        constants["w_before"] = None
    plain = {parameter.name for parameter in jitted.params if parameter.do_not_specialize}
    constants = {name: x for name, x in constants.items() if name in jitted.arg_names}
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
            signature[name] = view if name in VIEWS else share if name in SHARES else "*fp32"
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": layout.warps, "num_stages": 1, "enable_fp_fusion": True, **limits}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return usage_of(compiled, directory)


def _layouts(dim: int, b: int, dtype: str):
    kind = _learner_triton.constants(getattr(torch, dtype), dim, b)
    return tuning.choices(dim, kind["SEVERAL"], kind["OPERAND"])


def check_spills(found: Usage, dtype: str) -> None:
    if dtype == "float32":  # three products and their sum: a little is spilled
        assert found.stack <= 128
    else:
        check_unspilled(found)


def check_fast(found: Usage, dtype: str = "bfloat16") -> None:
    check_spills(found, dtype)
    assert found.shared <= SHARED_MEMORY
    # Products on tensor cores, tokens fetched 16 bytes at a time.
    assert re.search(r"\bHG?MMA\b", found.machine_code)
    assert "LDG.E.128" in found.machine_code


@pytest.mark.parametrize("b", [16, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=[pytest.mark.slow] * (d != "bfloat16")) for d in DTYPES]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_spills_at_head_dimension_64(kernel, dtype, b, tmp_path, record_property):
    """A mini-batch of one tile and of several, in every layout that is tried.

    On the options' other settings see the slow test below.
    """
    for layout in _layouts(64, b, dtype):
        found = usage(kernel, dtype, 64, b, layout, tmp_path)
        record_property(f"{layout}: registers, stack, shared memory", found[:3])
        check_fast(found, dtype)


def test_the_state_of_vittt_meets_tensor_cores_in_registers(tmp_path):
    """Hopper's own instruction, one token per column, see the README."""
    layout = _layouts(64, 16, "bfloat16")[0]
    assert layout.transposed
    found = usage("forward", "bfloat16", 64, 16, layout, tmp_path)
    assert found.machine_code.count("HGMMA") > 8


def test_three_programs_of_the_crowded_forward_pass_share_a_multiprocessor(tmp_path):
    layout = _layouts(64, 16, "bfloat16")[0]
    found = usage("forward", "bfloat16", 64, 16, layout, tmp_path, maxnreg=tuning.REGISTERS)
    check_fast(found)
    assert 3 * 32 * layout.warps * found.registers <= 65536
    assert 3 * found.shared <= SHARED_MEMORY


def test_a_mean_needs_no_exchange_between_warps(tmp_path):
    """Six sums of three shuffles in a mini-batch, see by_rows; between warps it would be twenty."""
    found = usage("forward", "bfloat16", 64, 16, _layouts(64, 16, "bfloat16")[0], tmp_path)
    assert found.machine_code.count("SHFL") <= 6 * 3 + 10  # and what the states' writing takes


@pytest.mark.parametrize("dim", [16, *(pytest.param(d, marks=pytest.mark.slow) for d in (32, 128))])
def test_other_dimensions_compile(dim, tmp_path):
    found = usage("scan", "bfloat16", dim, 16, _layouts(dim, 16, "bfloat16")[0], tmp_path)
    assert found.shared <= SHARED_MEMORY
    assert re.search(r"\bHG?MMA\b", found.machine_code)


@pytest.mark.parametrize(
    ("dim", "several", "operand", "wanted"),
    [
        (64, False, tl.bfloat16, {(True, 4), (False, 8), (True, 4, 168)}),
        (64, False, tl.float32, {(False, 8)}),
        (64, True, tl.bfloat16, {(False, 8)}),
        (32, False, tl.bfloat16, {(True, 4), (True, 2)}),
    ],
)
def test_only_what_bears_it_is_tried_with_fewer_registers(dim, several, operand, wanted):
    kind = {"DIM": dim, "SEVERAL": several, "OPERAND": operand}
    forward = import_module(f"{PACKAGE}.triton_forward").forward

    def tried(crowded, kept_w):
        configs = tuning._sensible(forward.tuners[crowded].configs, {"kept_w": kept_w}, **kind)
        limits = [(c.maxnreg,) if c.maxnreg else () for c in configs]
        return {
            (c.kwargs["TRANSPOSED"], c.num_warps, *limit)
            for c, limit in zip(configs, limits, strict=True)
        }

    assert tried(True, None) == wanted
    for other in (tried(False, None), tried(True, "kept states")):
        assert other == {choice for choice in wanted if len(choice) == 2}


@pytest.mark.slow
@pytest.mark.parametrize("without", [(), ("scale",), ("norm",), ("norm", "scale")], ids=str)
@pytest.mark.parametrize("b", [16, 32])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_fits_the_chip(kernel, dtype, dim, b, without, tmp_path, record_property):
    if "norm" in without and dim not in UNNORMED:
        pytest.skip("refused")
    for layout in _layouts(dim, b, dtype):
        found = usage(kernel, dtype, dim, b, layout, tmp_path, without)
        record_property(f"{layout}: registers, stack, shared memory", found[:3])
        assert found.shared <= SHARED_MEMORY
        assert re.search(r"\bHG?MMA\b", found.machine_code)
        if dim == 64:
            check_spills(found, dtype)
