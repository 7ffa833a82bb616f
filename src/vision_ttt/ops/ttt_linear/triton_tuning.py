"""How a Triton kernel lies over the threads: measured once per kind of call, or a default.

The layout sets the order of the sums within a kernel, hence the last bits of its results. Within a
process it is measured once and stays; :func:`torch.use_deterministic_algorithms` takes the default
everywhere, and so does a CUDA graph captured before the first ordinary call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.language import bfloat16

from vision_ttt.ops.ttt_linear.triton_tiles import INTERPRETED


class Layout(NamedTuple):
    """Whether matrices that meet the state are held transposed, and the warps of a program."""

    transposed: bool
    warps: int


COLUMNS = {16: (1, 2), 32: (2, 4), 64: (4,), 128: (8,)}
"""Per head dimension the warps with one token per column: fewer spill, more exchange more."""
ROWS = {16: 1, 32: 4, 64: 8, 128: 8}
"""And with one token per row."""
REGISTERS = 168
"""Registers of a thread with which three programs of four warps share a multiprocessor."""

PLAIN = ["state_batch", "scale_head", "length", "heads", "reverse_heads", "mini_batch_size"]
PLAIN += ["interval"]
"""Integers that make no difference to the code, so that no version is compiled for each value."""


def choices(dim: int, several: bool, operand: Any) -> tuple[Layout, ...]:
    """Layouts worth trying, the default first; see this folder's README."""
    rows = Layout(False, ROWS[dim])
    if several or operand != bfloat16:
        return (rows,)
    columns = tuple(Layout(True, warps) for warps in COLUMNS[dim])
    return (*columns, rows) if dim == 64 else columns


def _sensible(configs: list[Any], _: dict[str, Any], **options: Any) -> list[Any]:
    dim, several, operand = (options[name] for name in ("DIM", "SEVERAL", "OPERAND"))
    layouts = choices(dim, several, operand)
    # The limit costs other kernels a spill.
    limits = (None, REGISTERS) if dim == 64 and layouts[0].transposed else (None,)
    return [
        c
        for c in configs
        if (c.kwargs["TRANSPOSED"], c.num_warps) in layouts and c.maxnreg in limits
    ]


def tuned(kernel: Any, overwrites: tuple[str, ...] = (), crowded: bool = False) -> Any:
    """Let a kernel be timed; arguments it reads and ``overwrites`` are restored in between.

    With ``crowded`` a limit of registers is tried too: it changes no bit, only how many programs
    share a multiprocessor, and pays once there are more than two for each.
    """
    layouts = {Layout(True, n) for warps in COLUMNS.values() for n in warps}
    layouts |= {Layout(False, n) for n in ROWS.values()}
    limits = dict.fromkeys(sorted(layouts, reverse=True), (None,))
    if crowded:
        limits[Layout(True, *COLUMNS[64])] += (REGISTERS,)
    return triton.autotune(
        configs=[
            triton.Config({"TRANSPOSED": transposed}, num_warps=n, num_stages=1, maxnreg=limit)
            for (transposed, n), of_layout in limits.items()
            for limit in of_layout
        ],
        key=["DIM", "SEVERAL", "OPERAND", "PARTS"],
        prune_configs_by={"early_config_prune": _sensible},
        restore_value=list(overwrites),
    )(kernel)


def crowds(programs: int, device: torch.device) -> bool:
    """Whether each multiprocessor of a GPU gets more than two programs."""
    if INTERPRETED:
        return False
    return programs > 2 * torch.cuda.get_device_properties(device).multi_processor_count


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Run a tuned kernel on a one-dimensional grid."""
    if programs == 0:
        return
    options["enable_fp_fusion"] = True
    untimed = (
        INTERPRETED
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.is_current_stream_capturing()
    )
    if untimed:
        layout, *_ = choices(options["DIM"], options["SEVERAL"], options["OPERAND"])
        options |= {"TRANSPOSED": layout.transposed, "num_warps": layout.warps, "num_stages": 1}
        kernel.fn[(programs,)](*arguments, **options)
    else:
        kernel[(programs,)](*arguments, **options)
