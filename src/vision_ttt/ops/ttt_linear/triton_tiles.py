"""The common part of ttt_linear's Triton kernels: tiles of tokens, products, the inner norm.

Legend: n tokens of a mini-batch, padded to a tile; d the head dimension. If TRANSPOSED, factors of
products with the state are held transposed, one token per column: Wᵀ is then the left factor of
every product and stays in the same registers from one mini-batch to the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _rounded(x):
    """x rounded to the nearest number of tf32, which has 13 bits fewer than float32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, accumulator, OPERAND: tl.constexpr, PARTS: tl.constexpr):
    """accumulator + a b in float32 on tensor cores, the factors rounded to OPERAND.

    Factors of float32 are rounded to tf32. With two PARTS the remainder is multiplied too: three
    products, as exact as float32's own except for the last digit. The chip rounds a sum that it
    continues toward 0, so that a state of many steps would shrink: float32 arithmetic adds the
    three products to the accumulator.
    """
    if PARTS == 2:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        a_first = _rounded(a)
        b_first = _rounded(b)
        exact = tl.dot(a_first, b - b_first, input_precision="tf32")
        exact = tl.dot(a - a_first, b_first, exact, input_precision="tf32")
        accumulator += tl.dot(a_first, b_first, exact, input_precision="tf32")
    else:
        # The interpreter stores bfloat16 as integers and would multiply these: convert to float32.
        FACTOR: tl.constexpr = tl.float32 if INTERPRETED else OPERAND
        a = a.to(OPERAND).to(FACTOR)
        b = b.to(OPERAND).to(FACTOR)
        accumulator = tl.dot(a, b, accumulator, input_precision="tf32")
    return accumulator


@triton.jit
def turned(x, TRANSPOSED: tl.constexpr):
    """x, transposed if TRANSPOSED: the held form of a matrix x, or the matrix with held form x."""
    return tl.trans(x) if TRANSPOSED else x


@triton.jit
def product(
    a,
    b,
    accumulator,
    OPERAND: tl.constexpr,
    PARTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SPLIT: tl.constexpr = False,
):
    """accumulator + a b, accumulator and result held transposed if TRANSPOSED.

    With SPLIT a second product adds the rounding error of b.
    """
    if SPLIT and b.dtype != OPERAND:
        rest = b - b.to(OPERAND).to(tl.float32)
        accumulator = product(a, rest, accumulator, OPERAND, PARTS, TRANSPOSED)
    if TRANSPOSED:
        accumulator = dot(tl.trans(b), tl.trans(a), accumulator, OPERAND, PARTS)
    else:
        accumulator = dot(a, b, accumulator, OPERAND, PARTS)
    return accumulator


@triton.jit
def load_state(x, DIM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load a contiguous matrix [d, d] in its held form."""
    i = tl.arange(0, DIM)
    return turned(tl.load(x + i[:, None] * DIM + i[None, :]), TRANSPOSED)


@triton.jit
def store_state(x, state, DIM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Write a matrix in its held form to a contiguous one [d, d]."""
    i = tl.arange(0, DIM)
    tl.store(x + i[:, None] * DIM + i[None, :], turned(state, TRANSPOSED))


@triton.jit
def load_bias(x, DIM: tl.constexpr, TILE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load a bias [d] as equal rows [n, d], in the held form of the products it is added to."""
    row = tl.load(x + tl.arange(0, DIM))
    return turned(tl.broadcast_to(row[None, :], [TILE, DIM]), TRANSPOSED)


@triton.jit
def store_bias(x, bias, DIM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Write a bias of equal rows to [d]."""
    tl.store(x + tl.arange(0, DIM), tl.max(bias, axis=1 if TRANSPOSED else 0))


@triton.jit
def end_mini_batch(x, w, b, b_now, p_n, DIM: tl.constexpr, PART_SCALED: tl.constexpr):
    """Store the new state W to x; return w, b and b_now for the tiles of the next mini-batch.

    With PART_SCALED w and b_now are the state's change, which is multiplied with p_n.
    """
    if PART_SCALED:
        w = load_state(x, DIM, False) + p_n * w
        b_now = b + p_n * b_now
    b = b_now
    tl.debug_barrier()
    store_state(x, w, DIM, False)
    tl.debug_barrier()
    if PART_SCALED:
        w, b_now = tl.zeros_like(w), tl.zeros_like(b)
    return w, b, b_now


@triton.jit
def tiles_of(length, mini_batch_size, TILE: tl.constexpr):
    """The number of tiles of a sequence. A tile has tokens of one mini-batch only."""
    whole = length // mini_batch_size * tl.cdiv(mini_batch_size, TILE)
    return whole + tl.cdiv(length % mini_batch_size, TILE)


@triton.jit
def locate(number, mini_batch_size, length, reverse, TILE: tl.constexpr, SEVERAL: tl.constexpr):
    """A tile's offset in its mini-batch, its tokens [n], their mask, and whether it is the last.

    Without SEVERAL every mini-batch has one tile.
    """
    part = 0
    start = number * mini_batch_size
    if SEVERAL:
        parts = tl.cdiv(mini_batch_size, TILE)
        part = number % parts * TILE
        start = number // parts * mini_batch_size + part
    place = tl.arange(0, TILE)
    valid = place < tl.minimum(mini_batch_size - part, length - start)
    token = start + place
    token = tl.where(reverse, length - 1 - token, token).to(tl.int64)
    last = (part + TILE >= mini_batch_size) | (start + TILE >= length)
    return part, token, valid, last


@triton.jit
def _later(x, beside, next_x, next_beside):
    return next_x, next_beside


@triton.jit
def by_rows(x, beside):
    """Convert x [n, d] to the thread layout of the loaded tile ``beside`` [n, d]: row by row.

    The columns of a product are spread over all warps, so that a mean along d would need an
    exchange between warps. In the layout of a loaded tile a row belongs to a few threads of one
    warp. ``tl.associative_scan`` converts both of its operands to that layout. The scan's operator
    returns its second operand, so that the values do not change.
    """
    if INTERPRETED:
        return x, beside
    ROWS: tl.constexpr = x.shape[0]
    DIM: tl.constexpr = x.shape[1]
    VECTOR: tl.constexpr = 128 // beside.dtype.primitive_bitwidth
    x = tl.permute(tl.reshape(x, [ROWS, DIM // VECTOR, VECTOR]), (2, 0, 1))
    beside = tl.permute(tl.reshape(beside, [ROWS, DIM // VECTOR, VECTOR]), (2, 0, 1))
    x, beside = tl.associative_scan((x, beside), 0, _later)
    x = tl.reshape(tl.permute(x, (1, 2, 0)), [ROWS, DIM])
    return x, tl.reshape(tl.permute(beside, (1, 2, 0)), [ROWS, DIM])


@triton.jit
def load_tokens(x, rows, valid, DIM: tl.constexpr):
    """Load the tile [n, d] of the token rows at the offsets [n]; invalid rows are 0."""
    offsets = rows[:, None] + tl.arange(0, DIM)[None, :]
    return tl.load(x + offsets, mask=valid[:, None], other=0.0)


@triton.jit
def store_tokens(x, rows, valid, tile, DIM: tl.constexpr):
    """Write the valid rows of tile [n, d] to the offsets [n], rounded to x's dtype."""
    offsets = rows[:, None] + tl.arange(0, DIM)[None, :]
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=valid[:, None])


@triton.jit
def standardise(z, valid, eps, DIM: tl.constexpr):
    """x̂ [n, d], which is z with mean 0 and variance 1 along d, and r = 1 / standard deviation [n].

    Both are 0 for absent tokens, for any eps, because all their z are equal.
    """
    centred = z - (tl.sum(z, axis=1) / DIM)[:, None]
    r = tl.rsqrt(tl.sum(centred * centred, axis=1) / DIM + eps)
    r = tl.where(valid, r, 0.0)
    return centred * r[:, None], r


@triton.jit
def project(x, x_hat, DIM: tl.constexpr):
    """P x = x - mean(x) - x̂ mean(x x̂) along d, and the second mean [n]."""
    mean = tl.sum(x, axis=1) / DIM
    along = tl.sum(x * x_hat, axis=1) / DIM
    return x - mean[:, None] - x_hat * along[:, None], along


@triton.jit
def load_norm(norm, at, valid, NORM: tl.constexpr):
    """r and mean(u x̂) of a tile's tokens [n]; unused without a norm."""
    r = 0.0
    mean_ux = 0.0
    if NORM:
        r = tl.load(norm + at * 2, mask=valid, other=0.0)
        mean_ux = tl.load(norm + at * 2 + 1, mask=valid, other=0.0)
    return r, mean_ux


@triton.jit
def load_affine(weight, bias, NORM: tl.constexpr, DIM: tl.constexpr):
    """The norm's weight and bias as rows [1, d]; unused without a norm."""
    gain = 1.0
    offset = 0.0
    if NORM:
        gain = tl.load(weight + tl.arange(0, DIM))[None, :]
        offset = tl.load(bias + tl.arange(0, DIM))[None, :]
    return gain, offset


@triton.jit
def inner_gradient(x, r, mean_ux, k, v, gain, offset, NORM: tl.constexpr, DIM: tl.constexpr):
    """g, u and e [n, d] of the inner loss, from x̂ and the saved r and mean(u x̂)."""
    error = x - v.to(tl.float32)
    u = error
    g = error
    if NORM:
        error = x * gain + offset + (k.to(tl.float32) - v.to(tl.float32))
        u = error * gain
        g = (u - (tl.sum(u, axis=1) / DIM)[:, None] - x * mean_ux[:, None]) * r[:, None]
    return g, u, error
