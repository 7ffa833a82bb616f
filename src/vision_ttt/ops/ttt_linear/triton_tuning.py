"""How a Triton kernel lies over the threads: measured once per kind of call, or a default.

The layout sets the order of the sums within a kernel, hence the last bits of its results. Within a
process it is measured once for a kind of call and stays;
:func:`torch.use_deterministic_algorithms` takes the default everywhere, and so does a CUDA graph
captured before the first ordinary call.
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
ROWS = {16: 2, 32: 4, 64: 8, 128: 8}
"""And with one token per row."""
LIMITED = (True, COLUMNS[64][0], None)
REGISTERS = 168
"""The layout that is tried with fewer registers too, and how many let three programs share a
multiprocessor."""

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


def _crowds(programs: int, device: torch.device) -> bool:
    """Whether each multiprocessor of a GPU gets more than two programs."""
    if INTERPRETED:
        return False
    return programs > 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _sensible(configs: list[Any], arguments: dict[str, Any], **options: Any) -> list[Any]:
    dim, several, operand = (options[name] for name in ("DIM", "SEVERAL", "OPERAND"))
    wanted = [(*layout, None) for layout in choices(dim, several, operand)]
    if wanted[0] == LIMITED and arguments["kept_w"] is None:  # keeping states takes registers too
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
    """A kernel whose layout is timed, anew for programs that crowd the multiprocessors.

    Arguments that it reads and ``overwrites`` are restored in between. Where programs crowd, the
    forward kernel of inference is tried with a limit of registers too: it changes no bit, only how
    many programs share a multiprocessor.
    """

    def __init__(self, kernel: Any, overwrites: tuple[str, ...] = ()) -> None:
        self.kernel = kernel
        self.tuners = {
            crowded: _autotuner(kernel, overwrites, crowded) for crowded in (False, True)
        }

    def launch(self, programs: int, *arguments: Any, **options: Any) -> None:
        """Run on a one-dimensional grid; the first argument is a tensor."""
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
            options |= {"TRANSPOSED": layout.transposed, "num_warps": layout.warps}
            self.kernel[(programs,)](*arguments, **options, num_stages=1)
        else:
            tuner = self.tuners[_crowds(programs, arguments[0].device)]
            tuner[(programs,)](*arguments, **options)
