"""The thread layout of a Triton kernel: measured once per kind of call, or a default.

The layout determines the order of the sums within a kernel, hence the last bits of its results. A
process measures it once per kind of call and keeps it. With
:func:`torch.use_deterministic_algorithms`, and in a CUDA graph that is captured before the first
ordinary call, the default is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.language import bfloat16

from vision_ttt.ops.ttt_linear.triton_tiles import INTERPRETED


class Layout(NamedTuple):
    """Whether the factors of products with the state are held transposed, and a program's warps."""

    transposed: bool
    warps: int


COLUMNS = {16: (1, 2), 32: (2, 4), 64: (4,), 128: (8,)}
"""Head dimension → numbers of warps for one token per column. Fewer warps spill registers, more
warps exchange more data."""
ROWS = {16: 2, 32: 4, 64: 8, 128: 8}
"""Head dimension → number of warps for one token per row."""
LIMITED = (True, COLUMNS[64][0], None)
"""The layout that is also measured with at most REGISTERS registers."""
REGISTERS = 168
"""The registers per thread with which three programs share a multiprocessor."""

PLAIN = ["state_batch", "scale_head", "length", "heads", "reverse_heads", "mini_batch_size"]
PLAIN += ["interval"]
"""Integers that the code is not specialised for, so that new values compile nothing."""


def choices(dim: int, several: bool, operand: Any) -> tuple[Layout, ...]:
    """The layouts to measure, the default first; see this folder's README."""
    rows = Layout(False, ROWS[dim])
    if several or operand != bfloat16:
        return (rows,)
    columns = tuple(Layout(True, warps) for warps in COLUMNS[dim])
    return (*columns, rows) if dim == 64 else columns


def _crowds(programs: int, device: torch.device) -> bool:
    """Whether every multiprocessor of the GPU runs more than two programs."""
    if INTERPRETED:
        return False
    return programs > 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _sensible(configs: list[Any], arguments: dict[str, Any], **options: Any) -> list[Any]:
    dim, several, operand = (options[name] for name in ("DIM", "SEVERAL", "OPERAND"))
    wanted = [(*layout, None) for layout in choices(dim, several, operand)]
    if wanted[0] == LIMITED and arguments["kept_w"] is None:  # saving states needs registers too
        wanted.append((*wanted[0][:2], REGISTERS))
    return [c for c in configs if (c.kwargs["TRANSPOSED"], c.num_warps, c.maxnreg) in wanted]


def _autotuner(kernel: Any, overwrites: tuple[str, ...], crowded: bool) -> Any:
    layouts = {Layout(True, n) for warps in COLUMNS.values() for n in warps}
    layouts |= {Layout(False, n) for n in ROWS.values()}
    return triton.autotune(
        configs=[
            triton.Config({"TRANSPOSED": transposed}, num_warps=n, num_stages=1, maxnreg=limit)
            for limit in ((None, REGISTERS) if crowded else (None,))
            for transposed, n in sorted(layouts, reverse=True)
        ],
        key=["DIM", "SEVERAL", "OPERAND", "PARTS"],
        prune_configs_by={"early_config_prune": _sensible},
        restore_value=list(overwrites),
    )(kernel)


class Tuned:
    """A kernel whose layout is measured, separately for more than two programs per multiprocessor.

    The arguments that the kernel both reads and ``overwrites`` are restored between measurements.
    With more than two programs per multiprocessor the forward kernel of inference is also measured
    with a limit of registers, which changes no bit of the results.
    """

    def __init__(self, kernel: Any, overwrites: tuple[str, ...] = ()) -> None:
        self.kernel = kernel
        self.tuners = {
            crowded: _autotuner(kernel, overwrites, crowded) for crowded in (False, True)
        }
        self.measured: dict[tuple[Any, ...], dict[str, Any]] = {}

    def launch(self, programs: int, *arguments: Any, **options: Any) -> None:
        """Run the kernel on a one-dimensional grid. The first argument must be a tensor."""
        if programs == 0:
            return
        crowded = _crowds(programs, arguments[0].device)
        kind = (crowded, *options.values(), *(getattr(x, "dtype", None) for x in arguments))
        options["enable_fp_fusion"] = True
        default = INTERPRETED or torch.are_deterministic_algorithms_enabled()
        if not default and kind in self.measured:
            layout = self.measured[kind]
        elif default or torch.cuda.is_current_stream_capturing():
            (transposed, warps), *_ = choices(
                options["DIM"], options["SEVERAL"], options["OPERAND"]
            )
            layout = {"TRANSPOSED": transposed, "num_warps": warps, "num_stages": 1}
        else:
            tuner = self.tuners[crowded]
            tuner[(programs,)](*arguments, **options)
            self.measured[kind] = tuner.best_config.all_kwargs()
            return
        self.kernel[(programs,)](*arguments, **options, **layout)
