"""The op ``vision_ttt::packed_vittt_band``: rows of a picture through one scan of a Vittt block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._contract import Whole, check_number
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.block import FLAG, GRID, Block, Run, define, run_op
from vision_ttt.ops.packed.vittt_blocks import (
    FLOATS,
    PARAMETERS,
    RANGES,
    VitttBlockStructure,
    answer,
    convolve,
    derive,
    inner_views,
    learn,
    learner_flops,
    project,
    refuse,
)
from vision_ttt.ops.packed.weights import call


class VitttBandSizes(NamedTuple):
    """The numbers that, with D, determine the shapes of the parameters of a block's scan."""

    heads: int  # H, of the direction that is scanned
    directions: int  # R, 1 or 2, whose outputs are merged
    taps: int  # of the Conv1d; 0: none
    hidden: int  # of the SwiGLU
    mini_batch_size: int  # b
    kernel: int  # K of the Conv2d, odd; 0: none
    views: int  # 2 where q is k, or 3
    gated: int  # 0 or 1
    is_mlp: int  # 0 or 1: the inner model has two layers
    is_bfloat16: int  # 0 or 1: the packed weights are bfloat16
    reverse: int  # 0 or 1: the scan goes from the last token to the first
    merges: int  # 0 or 1: the rest of the block follows the scan


_MERGING = ("post_weight", "post_bias", "out_proj", "mlp_norm.weight", "mlp_norm.bias")
_MERGING = (*_MERGING, "mlp_gate", "mlp_value", "mlp_out")
_PARAMETERS = {
    name: f"{shape} if merges" if name in _MERGING else shape
    for name, shape in PARAMETERS.items()
    if not name.startswith("initial.")
} | {"gate": "packed dim dim if merges_by_gate"}


def _derive(op: str, s: Mapping[str, int]) -> dict[str, int]:
    sizes = derive(op, s, scans=1)
    heads, d, wide = s["heads"], sizes["d"], sizes["wide"]
    seen = max(s["taps"] - 1, 0) + s["mini_batch_size"] - 1
    state = heads * (d * wide + wide + s["is_mlp"] * (wide * d + d))
    state += seen * (sizes["columns"] + heads)
    return {**sizes, "merges_by_gate": s["merges"] * s["gated"], "seen": seen, "numbers": state}


def _check_call(values: Mapping[str, Any], s: Mapping[str, int]) -> None:
    op, y, side = "packed_vittt_band", values["y"], values["side"]
    height, width, above, below, open_tokens, *_ = values["ints"]
    if y.shape[0] != 1:
        raise ValueError(f"{op}: bands are of one picture, got y {list(y.shape)}")
    if y.shape[1] != height * width:
        raise ValueError(f"{op}: {y.shape[1]} tokens do not fill {height} x {width}")
    if above + below >= height:
        raise ValueError(f"{op}: of {height} rows {above} and {below} are around the band's")
    if open_tokens >= s["mini_batch_size"]:
        raise ValueError(
            f"{op}: open must be below the mini-batch size {s['mini_batch_size']}, got "
            f"{open_tokens}"
        )
    if len(values["state"]) != s["numbers"]:
        raise ValueError(
            f"{op}: state must have {s['numbers']} numbers, got {len(values['state'])}"
        )
    if (side is not None) != (s["merges"] and s["directions"] == 2):
        raise ValueError(f"{op}: side must be given where two directions are merged, and else not")
    dtype = torch.bfloat16 if s["is_bfloat16"] else torch.float32
    tokens = (height - above - below) * width
    if side is not None and (side.shape[1] != tokens or side.dtype != dtype):
        raise ValueError(
            f"{op}: side must be [1, {tokens}, {s['dim']}] in {dtype}, got {list(side.shape)} in "
            f"{side.dtype}"
        )


BLOCK = Block(
    "packed_vittt_band",
    VitttBlockStructure,
    _PARAMETERS,
    VitttBandSizes,
    ranges={
        **RANGES,
        **dict.fromkeys(("above", "below", "open"), Whole(0)),
        **dict.fromkeys(("reverse", "merges"), FLAG),
    },
    floats=FLOATS,
    derive=_derive,
    refusal=refuse,
    leading=(*GRID, "above", "below", "open"),
    further=_check_call,
    kernel="packed_vittt_blocks",
)


class Inputs(NamedTuple):
    """The op's arguments; ``ints`` begin with the numbers of the call, ``floats`` are BLOCK's."""

    y: Tensor
    weights: Tensor
    state: Tensor
    side: Tensor | None
    ints: Sequence[int]
    floats: Sequence[float]


class _Call(NamedTuple):
    """The numbers of a call by their names."""

    above: int
    below: int
    width: int
    open: int
    tokens: int
    sizes: VitttBandSizes

    @classmethod
    def of(cls, inputs: Inputs) -> _Call:
        height, width, above, below, open_tokens, *sizes = inputs.ints
        tokens = (height - above - below) * width
        return cls(above, below, width, open_tokens, tokens, VitttBandSizes(*sizes))

    def own(self, x: Tensor) -> Tensor:
        """The band's own tokens among tokens that include the rows around it."""
        return x[:, self.above * self.width :][:, : self.tokens]

    def results(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Unwritten memory for both results."""
        y, s = inputs.y, self.sizes
        dtype = torch.bfloat16 if s.is_bfloat16 and not s.merges else y.dtype
        out = y.new_empty((1, self.tokens, y.shape[-1]), dtype=dtype)
        return out, inputs.state.new_empty(inputs.state.shape)


def packed_vittt_band_definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See :func:`packed_vittt_band`. It rounds where the kernels round."""
    return _compose(inputs, define)


def _compose(inputs: Inputs, run: Run) -> tuple[Tensor, Tensor]:
    y, weights, state, side, _, floats = inputs
    this, dim = _Call.of(inputs), y.shape[-1]
    s = this.sizes
    p = BLOCK.split(weights, dim, s, y.dtype)
    y = this.own(convolve(y, p, s.kernel, y.shape[1] // this.width, this.width, run))
    views, logits = project(y, p, s, 1, floats)
    dtype = p["views"].dtype

    # The state's tokens and the band's. `rows` is the slice of tokens start … stop - 1 of the scan.
    model, *before = _parts_of(state.to(y.dtype), dim, s)
    pairs = zip(before, (views, logits), strict=True)
    views, logits = (torch.cat(pair[::-1] if s.reverse else pair, dim=1) for pair in pairs)
    seen, length = before[0].shape[1], views.shape[1]

    def rows(start: int, stop: int) -> slice:
        return slice(length - stop, length - start) if s.reverse else slice(start, stop)

    behind = [x[:, rows(length - seen, length)] for x in (views, logits)]
    reverse_heads = s.reverse * s.heads
    qkv = inner_views(views, p, s, reverse_heads, run)
    first, outputs = seen - this.open, []
    whole = first + (length - first) // s.mini_batch_size * s.mini_batch_size
    for start, stop in ((first, whole), (whole, length)):
        if start == stop:
            continue
        part = rows(start, stop)
        given = [x[:, part] for x in qkv], logits[:, part], model
        z, *after = learn(*given, p, s, reverse_heads, floats, run)
        outputs.append(z)
        model = after if stop == whole else model
    z = torch.cat(outputs[::-1] if s.reverse else outputs, dim=1)
    z = (z[:, : this.tokens] if s.reverse else z[:, this.open :]).to(dtype)
    behind = torch.cat([x.flatten() for x in (*model, *behind)]).to(state.dtype)
    if not s.merges:
        return z.contiguous(), behind
    both = z.to(y.dtype) if side is None else torch.cat((z, side), dim=-1).to(y.dtype)
    return answer(y, both, p, s, floats, run), behind


def _parts_of(state: Tensor, dim: int, s: VitttBandSizes) -> tuple[list[Tensor], Tensor, Tensor]:
    """The inner model [1, H, …], and views and logits [1, P, …] of the tokens before the band."""
    sizes = BLOCK.symbols(dim, s)
    heads, d, wide, seen = s.heads, sizes["d"], sizes["wide"], sizes["seen"]
    shapes = [(1, heads, d, wide), (1, heads, wide), (1, heads, wide, d), (1, heads, d)]
    shapes = [*shapes[: 4 if s.is_mlp else 2], (1, seen, sizes["columns"]), (1, seen, heads)]
    parts = state.split([math.prod(shape) for shape in shapes])
    *model, views, logits = (x.view(shape) for x, shape in zip(parts, shapes, strict=True))
    return model, views, logits


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    y, weights, state, side, ints, floats = inputs
    out, behind = _Call.of(inputs).results(inputs)
    state, side = state.contiguous(), None if side is None else side.contiguous()
    others = {"state": state.data_ptr(), "next_state": behind.data_ptr()}
    if side is not None:
        others["side"] = side.data_ptr()
    return BLOCK.run(y, weights, ints, floats, out, **others), behind


def _flops(shapes: Inputs) -> int:
    """FLOPs of the products, convolutions and the learner on the band's own tokens."""
    this, dim = _Call.of(shapes), shapes.y[-1]
    s = this.sizes
    products = s.views * dim + s.kernel * s.kernel + s.heads + 2 * s.taps
    products += s.merges * (s.gated * dim + dim + 3 * s.hidden)
    learner = learner_flops([1, this.tokens, s.heads, dim // s.heads], s)
    return 2 * this.tokens * products * dim + learner


OP = Op(
    "packed_vittt_band",
    Inputs,
    BLOCK.contract("words", ("ints", "floats"), ("side",), state="numbers", side="? 1 n dim"),
    packed_vittt_band_definition,
    {"cpu": Backend(_forward, None, BLOCK.refusal)},
    lambda inputs: _Call.of(inputs).results(inputs),
    schema="(Tensor y, Tensor weights, Tensor state, Tensor? side, SymInt[] ints, float[] floats)"
    " -> (Tensor, Tensor)",
    results=2,
    composition=lambda inputs: _compose(inputs, run_op),
    flops=_flops,
)


def packed_vittt_band(
    y: Tensor,
    weights: Tensor,
    state: Tensor,
    side: Tensor | None,
    sizes: VitttBandSizes,
    *,
    rows: tuple[int, int, int],
    open_tokens: int,
    rate: float,
    eps: tuple[float, float, float, float],
) -> tuple[Tensor, Tensor]:
    """Run one direction's scan of a Vision-TTT block on some rows of a picture, on a CPU.

    Earlier calls have processed the rows before these, in scan order. Their state holds the inner
    models from before the open mini-batch, and the views and the rates' logits of the last
    b - 1 + taps - 1 tokens, in the order of the sequence. At the first row, the models are the
    initial ones and the rest is 0. The inner models learn from the tokens of the open mini-batch
    again, together with those that complete it. Rounding is that of :func:`packed_vittt_blocks`.

    Args:
        y: tokens [1, T, D], float32, of the band's rows and of those around it that the Conv2d
            reads.
        weights: the block's parameters for this direction, from ``BLOCK.join``. The norms behind
            the learners are in the order: this direction's, the other's.
        state: [S].
        side: [1, n, D], the other direction's outputs in the packed weights' dtype, if the call
            merges two directions; otherwise None.
        sizes: of the parameters.
        rows: width, and the numbers of rows above and below the band's.
        open_tokens: the number of tokens before, in scan order, modulo b.
        rate, eps: as of :func:`packed_vittt_blocks`.

    Returns:
        The block's tokens [1, n, D] or, without ``merges``, the learner's outputs in the packed
        weights' dtype; and the state after the band.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit such a block.
    """
    width, above, below = rows
    check_number(BLOCK.name, "width", width, Whole(1))
    numbers = y.shape[1] // width, width, above, below, open_tokens, *sizes
    return call(OP, Inputs(y, weights, state, side, numbers, (rate, *eps)))


def initial_state(model: Sequence[Tensor], dim: int, sizes: VitttBandSizes) -> Tensor:
    """The state before the first token, of the initial inner models in the order of INNER."""
    numbers = BLOCK.symbols(dim, sizes)["numbers"]
    given = torch.cat([x.detach().float().flatten() for x in model])
    return torch.cat((given, given.new_zeros(numbers - len(given))))
