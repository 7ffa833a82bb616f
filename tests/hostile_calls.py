"""Calls of every op of the namespace, and ways to spoil them.

A call is good to begin with; spoiling one or two of its arguments gives what careless software
hands over: an axis too many, another size, dtype, layout or device, a number beyond its range.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt import ops
from vision_ttt.ops._op import Op
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed import (
    linear,
    mamba_band,
    mamba_block,
    pack,
    patches,
    swiglu_ttt_block,
    vit3_band,
    vit3_block,
    vittt_band,
    vittt_blocks,
)
from vision_ttt.ops.packed.block import Block
from vision_ttt.ops.ttt_linear.op import PART as ttt_linear_part
from vision_ttt.ops.ttt_mlp.op import PART as ttt_mlp_part
from vision_ttt.ops.vit3_ttt import depthwise_correlation


class Sizes(NamedTuple):
    """Of a call: B images, a grid of tokens, H heads of d channels, C channels, K taps, b."""

    batch: int = 2
    height: int = 3
    width: int = 5
    heads: int = 2
    dim: int = 16
    channels: int = 32
    taps: int = 3
    mini_batch: int = 4
    gated: bool = True

    @property
    def length(self) -> int:
        return self.height * self.width


class Call(NamedTuple):
    """An op, its arguments, and its definition on the same arguments (None: look for crashes)."""

    op: Callable[..., Any]
    arguments: list[Any]
    definition: Callable[..., Any] | None


def normal(*shape: int) -> Tensor:
    return 0.3 * torch.randn(*shape, dtype=torch.float32)


def conv1d_arguments(s: Sizes) -> list[Any]:
    c = s.channels
    return [normal(s.batch, s.length, c), normal(c, 1, s.taps), normal(c), c // 2 // 16 * 16]


def conv2d_arguments(s: Sizes) -> list[Any]:
    x, weight = normal(s.batch, s.length, s.channels), normal(s.channels, 1, s.taps, s.taps)
    return [x, weight, s.height, s.width]


def correlation_arguments(s: Sizes) -> list[Any]:
    x, y = (normal(s.batch, s.length, s.channels) for _ in range(2))
    return [x, y, s.height, s.width, s.taps]


def deformable_arguments(s: Sizes) -> list[Any]:
    """Two levels, or one; some of the points are outside."""
    levels = [s.height, s.width, *[s.taps, 2] * s.gated]
    cells = sum(h * w for h, w in zip(levels[::2], levels[1::2], strict=True))
    points = s.batch, s.length, s.heads, len(levels) // 2, s.mini_batch
    locations = 1.4 * torch.rand(*points, 2, dtype=torch.float32) - 0.2
    return [normal(s.batch, cells, s.heads, s.dim), locations, normal(*points), levels]


def norm_arguments(s: Sizes) -> list[Any]:
    parts, dim = min(s.heads, 2), s.channels
    gate = normal(s.batch, s.length, dim) if s.gated else None
    weights = normal(parts, dim), normal(parts, dim)
    return [normal(s.batch, s.length, parts * dim), gate, *weights, 1e-2]


def linear_layer_arguments(s: Sizes) -> list[Any]:
    dim, columns = s.channels, s.heads * s.dim
    bias = normal(columns) if s.gated else None
    return [normal(s.batch, s.length, dim), normal(columns, dim), bias]


def swiglu_mlp_arguments(s: Sizes) -> list[Any]:
    dim, hidden = s.channels, 2 * s.dim
    x, norm = normal(s.batch, s.length, dim), [normal(dim) if s.gated else None for _ in range(2)]
    return [x, normal(2 * hidden, dim) / dim, normal(dim, hidden) / hidden, *norm, s.gated, 1e-2]


def learner_arguments(s: Sizes, *state: tuple[int, ...]) -> list[Any]:
    views = (normal(s.batch, s.length, s.heads, s.dim) for _ in range(3))
    eta = torch.rand(s.batch, s.length, s.heads, dtype=torch.float32) / s.dim
    norm = (normal(s.heads, s.dim) if s.gated else None for _ in range(2))
    scale = torch.rand(s.heads, s.mini_batch, dtype=torch.float32)
    state = (normal(s.heads, *shape) for shape in state)
    return [*views, eta, *state, *norm, scale, s.mini_batch, s.heads // 2, 1e-2]


def linear_arguments(s: Sizes) -> list[Any]:
    return learner_arguments(s, (s.dim, s.dim), (s.dim,))


def mlp_arguments(s: Sizes) -> list[Any]:
    h = 4 * s.dim
    return learner_arguments(s, (s.dim, h), (h,), (h, s.dim), (s.dim,))


def part_arguments(s: Sizes, *state: tuple[int, ...]) -> list[Any]:
    """One token of sequences at different places, or all tokens as far as a mini-batch goes."""
    position = 0 if s.gated else s.mini_batch // 2
    length = 1 if s.heads == 2 else min(s.length, s.mini_batch - position)
    *tensors, size, _, eps = learner_arguments(s, *state)
    states = [normal(s.batch, *x.shape).contiguous() for x in tensors[4:-3]] * 2
    positions = torch.arange(s.batch) % size if s.heads == 2 else None
    views = [x[:, :length].contiguous() for x in tensors[:4]]
    return [
        *(*views, *states[: len(state)], *tensors[-3:], *states[len(state) :]),
        *(positions, position, size, eps),
    ]


def fused_arguments(s: Sizes) -> list[Any]:
    s = s._replace(dim=max(s.dim, 16), mini_batch=min(s.mini_batch, 64))
    directions, inner = 1 + (s.heads % 2 == 0), s.heads * s.dim
    dim = inner // directions
    widths = [inner, 0 if s.gated else inner, inner, dim if s.gated else 0]
    convolutions = [normal(inner, 1, s.taps), normal(inner)] * 2
    scale = torch.rand(directions, s.mini_batch, dtype=torch.float32)
    tensors = [normal(s.batch, s.length, sum(widths)), normal(s.batch, s.length, s.heads)]
    tensors += [*convolutions, normal(s.heads, s.dim, s.dim)]
    tensors += [*(normal(s.heads, s.dim) for _ in range(3)), scale]
    tensors += [normal(directions, dim), normal(directions, dim)]
    reverse = s.heads // 2 if directions == 2 else 0
    return [*tensors, widths, s.mini_batch, reverse, 1.0, 1e-2, 1e-2]


def swiglu_arguments(s: Sizes) -> list[Any]:
    return [normal(s.batch, s.length, 2 * s.channels)]


def swiglu_ttt_arguments(s: Sizes) -> list[Any]:
    views = (normal(s.batch, s.length, s.heads, s.dim) for _ in range(3))
    return [*views, *(normal(s.heads, s.dim, s.dim) for _ in range(3))]


def scan_arguments(s: Sizes) -> list[Any]:
    """Groups per direction where a direction has whole vectors; a gate, skip and state, or none."""
    dim, states, gated = s.channels, s.mini_batch, s.gated
    groups = [2] if gated and dim % 32 == 0 else []
    delta = torch.rand(s.batch, s.length, dim, dtype=torch.float32)
    matrices = (normal(s.batch, s.length, *groups, states) for _ in range(2))
    optional = [normal(dim), normal(s.batch, s.length, dim), normal(dim)] if gated else [None] * 3
    state = normal(s.batch, dim, states) if gated else None
    a = -torch.rand(dim, states, dtype=torch.float32)
    u = normal(s.batch, s.length, dim)
    return [u, delta, a, *matrices, *optional, state, gated, dim // 2 // 16 * 16]


def mamba_arguments(s: Sizes) -> list[Any]:
    inner = -(-s.channels // 16) * 16  # what the kernels support
    states, rank = s.mini_batch, s.heads
    tensors = [normal(s.batch, s.length, 2 * inner), normal(2 * inner, 1, s.taps)]
    tensors += [normal(2 * inner), normal(2, rank + 2 * states, inner) / inner**0.5]
    tensors += [normal(2, inner, rank), normal(2 * inner)]
    a = -torch.rand(2 * inner, states, dtype=torch.float32)
    return [*tensors, a, normal(2 * inner)]


ARGUMENTS: dict[str, Callable[[Sizes], list[Any]]] = {
    "deformable_attention": deformable_arguments,
    "depthwise_conv2d": conv2d_arguments,
    "depthwise_correlation": correlation_arguments,
    "directional_conv1d": conv1d_arguments,
    "fused_mamba": mamba_arguments,
    "fused_ttt_linear": fused_arguments,
    "gated_norm": norm_arguments,
    "linear": linear_layer_arguments,
    "selective_scan": scan_arguments,
    "swiglu": swiglu_arguments,
    "swiglu_mlp": swiglu_mlp_arguments,
    "swiglu_ttt": swiglu_ttt_arguments,
    "ttt_linear": linear_arguments,
    "ttt_mlp": mlp_arguments,
}
"""Of every op of the table, as its custom op takes them."""


def packed_linear_arguments(s: Sizes) -> list[Any]:
    dtype = torch.bfloat16 if s.gated else torch.float32
    weight = pack(normal(s.dim, s.channels), dtype)
    return [normal(s.batch, s.length, s.channels), weight, normal(s.dim), s.dim]


def packed_patches_arguments(s: Sizes) -> list[Any]:
    images = normal(s.batch, s.heads, s.height * s.taps + 1, s.width * 2)
    weight = pack(normal(s.dim, s.heads * s.taps * 2), torch.float32)
    return [images, weight, normal(s.dim) if s.gated else None, s.dim, [s.taps, 2]]


def vector_of(block: Block, dim: int, sizes: Sequence[int]) -> Tensor:
    """Parameters of a block in its vector."""
    places = block.places(dim, sizes)
    parameters = {name: normal(*place.size) for name, place in places.items()}
    for name in parameters:  # those that are of one sign
        if name.endswith("decay"):
            parameters[name] = -parameters[name].abs()
        elif name == "scale":
            parameters[name] = parameters[name].abs()
    return block.join(parameters, dim, sizes)


def packed_vittt_arguments(s: Sizes) -> list[Any]:
    d, b, gated = max(s.dim, 16), min(s.mini_batch, 64), int(s.gated)
    directions = 1 + (s.heads % 2 == 0)
    dim = s.heads * d // directions
    sizes = s.heads, directions, s.taps, 48, b, s.taps, 3 - gated, gated, 0, 0
    weights = torch.stack([vector_of(vittt_blocks.BLOCK, dim, sizes)] * 2)
    ints = s.height, s.width, *sizes
    return [normal(s.batch, s.length, dim), weights, *ints, 1 / d, *[1e-2] * 4]


def packed_vittt_band_arguments(s: Sizes) -> list[Any]:
    """A scan and the rest of a block, or a scan alone."""
    d, b, merges = max(s.dim, 16), min(s.mini_batch, 64), int(s.gated)
    dim, reverse = s.heads * d, int(s.heads == 3)
    sizes = vittt_band.VitttBandSizes(
        *(s.heads, 1 + (s.heads % 2 == 0), s.taps, 48, b, s.taps, 3 - merges, merges, 0, 0),
        *(reverse, merges),
    )
    above, below = min(s.height - 1, 1), int(s.height > 2)
    state = normal(len(vittt_band.initial_state([normal(s.heads, d, d + 1)], dim, sizes)))
    rows = s.height - above - below
    side = normal(1, rows * s.width, dim) if merges and sizes.directions == 2 else None
    weights, y = vector_of(vittt_band.BLOCK, dim, sizes), normal(1, s.length, dim)
    ints = s.height, s.width, above, below, b - 1, *sizes
    return [y, weights, state, side, *ints, 1 / d, *[1e-2] * 4]


def packed_vit3_arguments(s: Sizes) -> list[Any]:
    dim, modulated = s.heads * max(s.dim, 16), int(s.heads == 3)
    sizes = s.heads, 48, 0, int(s.gated), modulated, 0
    weights = vector_of(vit3_block.BLOCK, dim, sizes)
    modulation = normal(s.batch, 6, dim) if modulated else None
    rotations = normal(s.length, dim // 2, 2) if s.gated else None
    y, ints = normal(s.batch, s.length, dim), (s.height, s.width, *sizes)
    return [y, weights, modulation, rotations, *ints, 0.3, 1e-2, 1e-2]


def packed_swiglu_ttt_arguments(s: Sizes) -> list[Any]:
    """The first token is outside of the grid where there are several heads."""
    d = max(s.dim, 16)
    dim, prefix = s.heads * d, int(s.heads > 1)
    sizes = s.heads, 48, int(s.gated), int(s.heads == 3), 0, 0
    weights = vector_of(swiglu_ttt_block.BLOCK, dim, sizes)
    rotations = normal(s.length, 2 * d) if s.gated else None
    y, ints = normal(s.batch, prefix + s.length, dim), (s.height, s.width, *sizes)
    return [y, weights, rotations, *ints, 1.0, 1e-2, 1e-2]


def packed_mamba_arguments(s: Sizes) -> list[Any]:
    dim = s.heads * max(s.dim, 16)
    sizes = 2 * dim, s.taps, 4, 0
    weights = vector_of(mamba_block.BLOCK, dim, sizes)
    return [normal(s.batch, s.length, dim), weights, *sizes, 1e-2]


def packed_vit3_band_arguments(s: Sizes) -> list[Any]:
    """The first sweep, or the second one."""
    dim = s.heads * max(s.dim, 16)
    sizes = vit3_band.Vit3BlockSizes(s.heads, 48, 0, 0, 0, 0)
    above, below = min(s.height - 1, 2), int(s.height > 3)
    d = dim // s.heads
    sums = normal(2 * s.heads * d * d + 9 * d) if s.gated else None
    weights, y = vector_of(vit3_band.BLOCK, dim, sizes), normal(1, s.length, dim)
    return [y, weights, sums, s.height, s.width, above, below, 9, *sizes, 0.3, 1e-2, 1e-2]


def packed_mamba_band_arguments(s: Sizes) -> list[Any]:
    """A scan and the rest of a block, or a scan alone."""
    dim, merges = s.heads * max(s.dim, 16), int(s.gated)
    sizes = mamba_band.MambaBlockSizes(2 * dim, s.taps, 4, 0)
    weights, y = vector_of(mamba_band.BLOCK, dim, sizes), normal(1, s.length, dim)
    side = normal(1, s.length, 2 * dim) if merges else None
    state = normal(mamba_band.state_numbers(sizes))
    return [y, weights, state, side, int(s.heads == 3), merges, *sizes, 1e-2]


def side_by_side(
    function: Callable[..., Tensor], tensors: int, ints: int, *, floats: bool
) -> Callable[..., Tensor]:
    """``function`` on arguments whose lists of numbers lie side by side."""

    def run(*a: Any) -> Tensor:
        numbers = a[tensors + ints :]
        rest = list(numbers) if floats else numbers[0]
        return function(*a[:tensors], list(a[tensors : tensors + ints]), rest)

    return run


def bare_results(op: Op, arguments: Sequence[Any], *, keep: bool = False) -> tuple[Tensor, ...]:
    """Of the custom op: all, or without ``keep`` those that the definition has."""
    extra = () if op.kept is None else (keep, "auto") if op.backend_at_runtime else (keep,)
    out = op.forward_op(*arguments, *extra)
    out = out if isinstance(out, (tuple, list)) else (out,)
    return tuple(out) if keep else tuple(out[: op.results])


def backward_arguments(op: Op, arguments: list[Any]) -> list[Any]:
    """Of the custom op's backward pass, with gradients of 0.3 or so."""
    results = bare_results(op, arguments, keep=True)
    grads = [normal(*x.shape).to(x) for x in results[: op.results]]
    tensors, options = arguments[: op.tensors], arguments[op.tensors :]
    backend = ["auto"] if op.backend_at_runtime else []
    return [*grads, *tensors, *results[op.results :], *options, *backend]


def gradients_of(op: Op, *arguments: Any) -> list[Tensor]:
    """The tensors' gradients by the definition, given those of its results."""
    grads, arguments = arguments[: op.results], arguments[op.results :]
    inputs, options = arguments[: op.tensors], arguments[op.tensors :]
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    given = [x for x in inputs if x is not None]
    with torch.enable_grad():
        out = op.definition(op.inputs(*inputs, *options))
    found = iter(torch.autograd.grad(out, given, grads))
    return [torch.empty(0) if x is None else next(found) for x in inputs]


def definition_of(op: Op) -> Callable[..., Any]:
    """The definition on arguments side by side."""
    return lambda *arguments: op.definition(op.inputs(*arguments))


def in_parts(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The fused op's public function on its custom op's arguments."""
    names = "widths", "mini_batch_size", "reverse_heads", "base_learning_rate"
    names = (*names, "inner_eps", "post_eps")

    def run(*a: Any) -> Tensor:
        pairs = a[2:4], a[4:6], a[6:8], a[8:10], a[10], a[11:13]
        return op(*a[:2], *pairs, **dict(zip(names, a[13:], strict=True)))

    return run


def with_grid(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, height, width, *rest: op(x, y, (height, width), *rest)


def with_pairs(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of a list of pairs on arguments whose last one is the pairs' numbers."""
    return lambda *a: op(*a[:-1], list(zip(a[-1][::2], a[-1][1::2], strict=True)))


def by_name(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A learner's public function on its custom op's arguments."""
    return lambda *a: op(
        *a[:-4], position_scale=a[-4], mini_batch_size=a[-3], reverse_heads=a[-2], eps=a[-1]
    )


def with_options(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The selective scan's public function on its custom op's arguments."""
    return lambda *a: op(*a[:8], initial_state=a[8], delta_softplus=a[9], reverse_channels=a[10])


def mamba_in_pairs(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The fused Mamba's public function on its custom op's arguments."""
    return lambda *a: op(a[0], a[1:3], a[3], a[4:6], *a[6:])


def with_norm(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The MLP's public function on its custom op's arguments."""

    def run(x: Tensor, up: Tensor, down: Tensor, *rest: Any) -> Tensor:
        weight, bias, residual, eps = rest
        norm = None if weight is None else (weight, bias)
        return op(x, up, down, norm=norm, residual=residual, eps=eps)

    return run


PUBLIC: dict[str, Callable[..., Any]] = {
    "deformable_attention": with_pairs(ops.deformable_attention),
    "depthwise_conv2d": with_grid(ops.depthwise_conv2d),
    "depthwise_correlation": with_grid(depthwise_correlation),
    "directional_conv1d": ops.directional_conv1d,
    "fused_mamba": mamba_in_pairs(ops.fused_mamba),
    "fused_ttt_linear": in_parts(ops.fused_ttt_linear),
    "gated_norm": ops.gated_norm,
    "linear": ops.linear,
    "selective_scan": with_options(ops.selective_scan),
    "swiglu": ops.swiglu,
    "swiglu_mlp": with_norm(ops.swiglu_mlp),
    "swiglu_ttt": ops.swiglu_ttt,
    "ttt_linear": by_name(ops.ttt_linear),
    "ttt_mlp": by_name(ops.ttt_mlp),
}
"""The public functions on the arguments above."""


def public_definition(op: Op) -> Callable[..., Any]:
    """What the definition says of the public function, on arguments side by side."""

    def run(*arguments: Any) -> Tensor:
        out = op.definition(op.inputs(*arguments))
        return out if isinstance(out, Tensor) else out[0]

    return run


def make_calls(s: Sizes) -> dict[str, Callable[[], Call]]:
    """Every op of the namespace by a name for reports."""
    calls: dict[str, Callable[[], Call]] = {}

    def add(op: Op) -> None:
        make = ARGUMENTS[op.name]
        calls[op.name] = lambda: Call(PUBLIC[op.name], make(s), public_definition(op))
        calls[f"{op.name} op"] = lambda: Call(
            lambda *a: bare_results(op, a), make(s), definition_of(op)
        )
        if op.backward_op is not None:
            definition = partial(gradients_of, op) if op.kept is None else None
            calls[f"{op.name}_backward"] = lambda: Call(
                op.backward_op, backward_arguments(op, make(s)), definition
            )

    for op in TABLE.values():
        add(op)
    h = 4 * s.dim
    for part, state in (
        (ttt_linear_part, ((s.dim, s.dim), (s.dim,))),
        (ttt_mlp_part, ((s.dim, h), (h,), (h, s.dim), (s.dim,))),
    ):
        calls[part.name] = partial(
            lambda part, state: Call(
                lambda *a: part.forward_op(*a, s.batch > 1),
                part_arguments(s, *state),
                lambda *a: part.definition(part.inputs(*a, s.batch > 1)),
            ),
            *(part, state),
        )
    calls |= {
        "packed_linear": lambda: Call(
            linear.packed_linear, packed_linear_arguments(s), definition_of(linear.OP)
        ),
        "packed_patches": lambda: Call(
            patches.packed_patches, packed_patches_arguments(s), definition_of(patches.OP)
        ),
    }
    for op, make, places in (
        (vittt_blocks.OP, packed_vittt_arguments, {"tensors": 2, "ints": 12, "floats": True}),
        (
            vittt_band.OP,
            packed_vittt_band_arguments,
            {"tensors": 4, "ints": 17, "floats": True},
        ),
        (vit3_band.OP, packed_vit3_band_arguments, {"tensors": 3, "ints": 11, "floats": True}),
        (mamba_band.OP, packed_mamba_band_arguments, {"tensors": 4, "ints": 6, "floats": False}),
        (vit3_block.OP, packed_vit3_arguments, {"tensors": 4, "ints": 8, "floats": True}),
        (
            swiglu_ttt_block.OP,
            packed_swiglu_ttt_arguments,
            {"tensors": 3, "ints": 8, "floats": True},
        ),
        (mamba_block.OP, packed_mamba_arguments, {"tensors": 2, "ints": 4, "floats": False}),
    ):
        calls[op.name] = partial(
            lambda op, make, places: Call(
                side_by_side(op.forward_op, **places),
                make(s),
                side_by_side(definition_of(op), **places),
            ),
            *(op, make, places),
        )
        calls[f"{op.name} called"] = partial(
            lambda op, make, places: Call(
                side_by_side(lambda *a: op(op.inputs(*a)), **places),
                make(s),
                side_by_side(definition_of(op), **places),
            ),
            *(op, make, places),
        )
    return calls


NAMES = tuple(make_calls(Sizes()))


def _resized(x: Tensor, axis: int, by: int) -> Tensor:
    sizes = list(x.shape)
    sizes[axis] = max(sizes[axis] + by, 0)
    kept = x[tuple(slice(0, size) for size in sizes)]
    out = torch.zeros(sizes, dtype=x.dtype)
    out[tuple(slice(0, size) for size in kept.shape)] = kept
    return out


def _strided(x: Tensor) -> Tensor:
    """The same numbers, every second of a row twice as long."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


SPOILS: dict[str, Callable[[Tensor, int], Any]] = {
    "one axis less": lambda x, axis: x.select(axis, 0),
    "one axis more": lambda x, axis: x.unsqueeze(axis),
    "one larger": lambda x, axis: _resized(x, axis, 1),
    "one smaller": lambda x, axis: _resized(x, axis, -1),
    "sixteen smaller": lambda x, axis: _resized(x, axis, -16),
    "sixteen larger": lambda x, axis: _resized(x, axis, 16),
    "empty": lambda x, axis: x.narrow(axis, 0, 0),
    "of size one": lambda x, axis: x.narrow(axis, 0, 1),
    "expanded": lambda x, axis: x.narrow(axis, 0, 1).expand_as(x),
    "transposed": lambda x, axis: x.transpose(axis, -1),
    "transposed in memory": lambda x, axis: x.transpose(axis, -1).contiguous().transpose(axis, -1),
    "strided": lambda x, axis: _strided(x),
    "negated by a bit": lambda x, axis: torch._neg_view(x),
    "float64": lambda x, axis: x.double(),
    "bfloat16": lambda x, axis: x.bfloat16(),
    "float16": lambda x, axis: x.half(),
    "int64": lambda x, axis: x.long(),
    "bool": lambda x, axis: x > 0,
    "complex": lambda x, axis: x.to(torch.complex64),
    "on meta": lambda x, axis: x.to("meta"),
    "sparse": lambda x, axis: x.to_sparse(),
    "None": lambda x, axis: None,
    "a list": lambda x, axis: x.tolist(),
    "a number": lambda x, axis: 1.0,
}
NUMBERS = (-(2**63), -(2**31), -17, -1, 0, 1, 2, 17, 65, 2**31, 2**40, 2**63 - 1, 2**64)
NUMBERS += (0.5, -0.5, math.nan, math.inf, True, None, "4", [4], 10**400)


def spoilt(value: Any, how: str, axis: int, number: Any) -> Any:
    """The argument, spoilt: a tensor by SPOILS[how] along an axis, a number by another one."""
    if isinstance(value, Tensor):
        if how == "sparse" and value.layout != torch.strided:
            return value
        return SPOILS[how](value, axis % max(value.ndim, 1)) if value.ndim else value
    if isinstance(value, list):
        return [*value[:axis], number, *value[axis + 1 :]]
    return number


def exactly(value: Any) -> Any:
    """The argument in float64, for the definition."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double()
    if isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, int) and abs(value) >= 2**63 else value
