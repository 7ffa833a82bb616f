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

WARPS = {16: (1, 2), 32: (2, 4), 64: (4, 8), 128: (8,)}
"""Per head dimension the default and what else is tried: fewer warps spill, more exchange more."""
TILE = 16
"""Tokens of a tile up to which a head dimension's first number of warps is enough."""

PLAIN = ["state_batch", "scale_head", "length", "heads", "reverse_heads", "mini_batch_size"]
PLAIN += ["interval"]
"""Integers that make no difference to the code, so that no version is compiled for each value."""


def choices(dim: int, tile: int, operand: Any) -> tuple[int, ...]:
    """Numbers of warps worth trying, the default first."""
    warps = WARPS[dim]
    if tile > TILE:
        return warps[-1:]
    # Float32 compiles to several times the code: one version keeps the first call short.
    return warps if operand == triton.language.bfloat16 else warps[:1]


def _sensible(configs: list[Any], _: dict[str, Any], **options: Any) -> list[Any]:
    warps = choices(options["DIM"], options["TILE"], options["OPERAND"])
    return [config for config in configs if config.num_warps in warps]


def tuned(kernel: Any, overwrites: tuple[str, ...] = ()) -> Any:
    """Let a kernel be timed; arguments it reads and ``overwrites`` are restored in between."""
    warps = sorted({n for numbers in WARPS.values() for n in numbers})
    return triton.autotune(
        configs=[triton.Config({}, num_warps=n, num_stages=1) for n in warps],
        key=["DIM", "TILE", "OPERAND", "PRECISION"],
        prune_configs_by={"early_config_prune": _sensible},
        restore_value=list(overwrites),
    )(kernel)


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
