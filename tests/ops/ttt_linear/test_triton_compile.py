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
from vision_ttt.ops.ttt_linear import triton_backend  # noqa: E402

PACKAGE = "vision_ttt.ops.ttt_linear"
KERNELS = {
    "forward": ("triton_forward", "forward_kernel"),
    "segments": ("triton_segments", "segments_kernel"),
    "scan": ("triton_scan", "scan_kernel"),
}
VIEWS = {"q", "k", "v", "o", "grad_o", "dq", "dk", "dv"}
SHARES = {"dk_share", "dg_share", "dz_q_out", "dz_q_in", "x_out", "x_in"}
DTYPES = {  # views, what the backward kernels hand over
    "bfloat16": ("*bf16", "*bf16"),
    "float16": ("*fp16", "*fp32"),
    "float32": ("*fp32", "*fp32"),
}
OPTIONS = {  # what an option that is not in use leaves out
    "norm": ("ln_weight", "ln_bias", "norm_out", "norm_in", "dweight"),
    "scale": ("scale", "dscale", "dlast"),
}
SHARED_MEMORY = 227 * 1024
SPILLED = {  # bytes of a thread's stack at d = 64; a kernel that is not named spills nothing there
    ("forward", "bfloat16", 64): 320,
    ("forward", "float16", 64): 568,
    ("forward", "float32", 16): 384,
    ("forward", "float32", 32): 1304,
    ("forward", "float32", 64): 1664,
    ("segments", "bfloat16", 32): 192,
    ("segments", "bfloat16", 64): 840,
    ("segments", "float16", 16): 96,
    ("segments", "float16", 32): 608,
    ("segments", "float16", 64): 1272,
    ("segments", "float32", 16): 1160,
    ("segments", "float32", 32): 1784,
    ("segments", "float32", 64): 2656,
    ("scan", "bfloat16", 64): 440,
    ("scan", "float16", 16): 136,
    ("scan", "float16", 32): 336,
    ("scan", "float16", 64): 960,
    ("scan", "float32", 16): 992,
    ("scan", "float32", 32): 1552,
    ("scan", "float32", 64): 2664,
}


def usage(
    kernel: str, dtype: str, dim: int, b: int, layout, directory, without=(), **limits
) -> Usage:
    """Compile a kernel for the arguments that its launcher passes it, all options in use."""
    module, function = KERNELS[kernel]
    jitted = getattr(import_module(f"{PACKAGE}.{module}"), function)
    view, share = DTYPES[dtype]
    constants = triton_backend._kind(getattr(torch, dtype), dim, b)
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


def _warps(dim: int, tile: int, dtype: str) -> tuple[int, ...]:
    tuning = import_module(f"{PACKAGE}.triton_tuning")
    operand = triton_backend._products(getattr(torch, dtype), dim, tile)["OPERAND"]
    return tuning.choices(dim, tile, operand)


def check_fast(found: Usage) -> None:
    check_unspilled(found)
    assert found.shared <= SHARED_MEMORY
    # Products on Hopper's own tensor core instruction, tokens fetched 16 bytes at a time.
    assert "HGMMA" in found.machine_code
    assert "LDG.E.128" in found.machine_code


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_of_vittt_spill_nothing(kernel, tmp_path, record_property):
    """d = 64, b = 16 in bfloat16, as Vittt trains."""
    (warps,) = _warps(64, 16, "bfloat16")
    found = usage(kernel, "bfloat16", 64, 16, warps, tmp_path)
    record_property("registers, stack, shared memory", found[:3])
    check_fast(found)


def test_three_programs_of_the_crowded_forward_pass_share_a_multiprocessor(tmp_path):
    limit = import_module(f"{PACKAGE}.triton_tuning").register_limit(64, 16, tl.bfloat16)
    found = usage("forward", "bfloat16", 64, 16, 4, tmp_path, maxnreg=limit)
    check_fast(found)
    assert 3 * 4 * 32 * found.registers <= 65536
    assert 3 * found.shared <= SHARED_MEMORY


def test_a_mean_needs_no_exchange_between_warps(tmp_path):
    """Six sums of three shuffles in a mini-batch, see by_rows; between warps it would be twenty."""
    found = usage("forward", "bfloat16", 64, 16, 4, tmp_path)
    assert found.machine_code.count("SHFL") <= 6 * 3 + 10  # and what the states' writing takes


@pytest.mark.parametrize("dim", [16, 32, 128])
def test_other_dimensions_compile(dim, tmp_path):
    found = usage("scan", "bfloat16", dim, 16, _warps(dim, 16, "bfloat16")[0], tmp_path)
    assert found.shared <= SHARED_MEMORY
    assert re.search(r"\bHG?MMA\b", found.machine_code)


@pytest.mark.parametrize(
    ("dim", "tile", "operand", "wanted"),
    [
        (64, 16, tl.bfloat16, [(4, None), (4, 168)]),
        (64, 16, tl.float32, [(4, None)]),
        (64, 32, tl.bfloat16, [(8, None)]),
        (32, 16, tl.bfloat16, [(2, None), (4, None)]),
    ],
)
def test_only_what_bears_it_is_tried_with_fewer_registers(dim, tile, operand, wanted):
    tuning = import_module(f"{PACKAGE}.triton_tuning")
    crowded = import_module(f"{PACKAGE}.triton_forward").crowded_forward
    tried = tuning._sensible(crowded.configs, {}, DIM=dim, TILE=tile, OPERAND=operand)
    assert [(c.num_warps, c.maxnreg) for c in tried] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_fits_the_chip(kernel, dtype, dim, tile, tmp_path, record_property):
    for warps in _warps(dim, tile, dtype):
        found = usage(kernel, dtype, dim, tile, warps, tmp_path)
        record_property(f"{warps} warps: registers, stack, shared memory", found[:3])
        assert found.shared <= SHARED_MEMORY
        assert re.search(r"\bHG?MMA\b", found.machine_code)
        if dim == 64:
            assert found.stack <= SPILLED.get((kernel, dtype, tile), 0)
