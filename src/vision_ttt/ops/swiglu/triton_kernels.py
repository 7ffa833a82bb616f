"""GPU kernels of swiglu: one program computes a block of rows and columns, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = ["rows"]
"""Integers that the code is not specialised for, so that new values compile nothing."""


@triton.jit
def _place(rows, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's rows [n, 1] and columns [1, m] of the output, and the mask of those inside it."""
    COLUMN_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    row = program // COLUMN_BLOCKS * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % COLUMN_BLOCKS).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < HIDDEN)


@triton.jit
def _load(x, place, valid):
    return tl.load(x + place, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _store(x, place, value, valid):
    tl.store(x + place, value.to(x.dtype.element_ty), mask=valid)


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    x, out, x_row, rows, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # fmt: on
    row, column, valid = _place(rows, HIDDEN, ROWS, BLOCK)
    a = _load(x, row * x_row + column, valid)
    b = _load(x, row * x_row + (HIDDEN + column), valid)
    _store(out, row * HIDDEN + column, a * tl.sigmoid(a) * b, valid)


# fmt: off
@triton.jit(do_not_specialize=PLAIN)
def backward_kernel(
    grad, x, dx, grad_row, x_row, rows,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row, column, valid = _place(rows, HIDDEN, ROWS, BLOCK)
    g = _load(grad, row * grad_row + column, valid)
    a = _load(x, row * x_row + column, valid)
    b = _load(x, row * x_row + (HIDDEN + column), valid)
    s = tl.sigmoid(a)
    slope = s * (1.0 + a * (1.0 - s))
    _store(dx, row * (2 * HIDDEN) + column, g * b * slope, valid)
    _store(dx, row * (2 * HIDDEN) + (HIDDEN + column), g * a * s, valid)
