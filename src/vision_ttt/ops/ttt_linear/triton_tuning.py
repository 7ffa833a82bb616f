"""How many warps a Triton kernel runs on: measured once per kind of call, or a default.

The number of warps sets the order of the sums within a kernel, hence the last bits of its results.
Within a process it is measured once and stays; :func:`torch.use_deterministic_algorithms` takes
the default everywhere, and so does a CUDA graph captured before the first ordinary call.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from vision_ttt.ops.ttt_linear.triton_tiles import INTERPRETED

WARPS = {16: (1, 2), 32: (2, 4), 64: (4,), 128: (8,)}
"""Per head dimension the default and what else is tried: fewer warps spill, more exchange more."""
TILE = 16
"""Tokens of a tile up to which these are enough; a longer one takes twice the default."""
REGISTERS = 168
"""Registers of a thread with which three programs of four warps share a multiprocessor."""

PLAIN = ["state_batch", "scale_head", "length", "heads", "reverse_heads", "mini_batch_size"]
PLAIN += ["interval"]
"""Integers that make no difference to the code, so that no version is compiled for each value."""


def choices(dim: int, tile: int, operand: Any) -> tuple[int, ...]:
    """Numbers of warps worth trying, the default first."""
    warps = WARPS[dim]
    if tile > TILE:
        return (min(2 * warps[0], 8),)
    # Float32 compiles to several times the code: one version keeps the first call short.
    return warps if operand == triton.language.bfloat16 else warps[:1]


def register_limit(dim: int, tile: int, operand: Any) -> int | None:
    """The limit to try where programs crowd; only the kernels named here bear it unspilled."""
    return REGISTERS if (dim, tile, operand) == (64, TILE, triton.language.bfloat16) else None


def _sensible(configs: list[Any], _: dict[str, Any], **options: Any) -> list[Any]:
    kind = (options["DIM"], options["TILE"], options["OPERAND"])
    warps = choices(*kind)
    limits = (None, register_limit(*kind))
    return [c for c in configs if c.num_warps in warps and c.maxnreg in limits]


def tuned(kernel: Any, overwrites: tuple[str, ...] = (), crowded: bool = False) -> Any:
    """Let a kernel be timed; arguments it reads and ``overwrites`` are restored in between.

    With ``crowded`` a limit of registers is tried too: it changes no bit, only how many programs
    share a multiprocessor, and pays once there are more than two for each.
    """
    warps = (1, 2, 4, 8)
    configs = [triton.Config({}, num_warps=n, num_stages=1) for n in warps]
    if crowded:
        limited = triton.Config({}, num_warps=WARPS[64][0], num_stages=1, maxnreg=REGISTERS)
        configs.append(limited)
    return triton.autotune(
        configs=configs,
        key=["DIM", "TILE", "OPERAND", "PRECISION"],
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
        warps, *_ = choices(options["DIM"], options["TILE"], options["OPERAND"])
        kernel.fn[(programs,)](*arguments, **options, num_warps=warps, num_stages=1)
    else:
        kernel[(programs,)](*arguments, **options)
