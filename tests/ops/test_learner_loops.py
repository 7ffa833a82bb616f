"""The ops as loops of a graph, against their definitions."""

import pytest
import torch

from vision_ttt.ops import ttt_linear, ttt_mlp
from vision_ttt.ops._table import TABLE

OPS = {
    "ttt_linear": (ttt_linear, ((4, 4), (4,))),
    "ttt_mlp": (ttt_mlp, ((4, 16), (16,), (16, 4), (4,))),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("length", "reverse_heads", "norm", "scale", "continued"),
    [(1, 3, True, (8,), False), (8, 0, False, None, True), (19, 2, True, (3, 8), False)],
)
def test_the_scan_computes_the_op(
    name: str,
    length: int,
    reverse_heads: int,
    norm: bool,
    scale: tuple[int, ...] | None,
    continued: bool,
) -> None:
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    op, shapes = OPS[name]
    batch, heads, dim, size = 2, 3, 4, 8
    views = [random(batch, length, heads, dim) for _ in range(3)]
    eta = random(batch, length, heads).abs() / dim
    lead = (batch, heads) if continued else (heads,)
    state = [random(*lead, *shape) for shape in shapes]
    inner_norm = (random(heads, dim), random(heads, dim)) if norm else (None, None)
    position_scale = random(*scale).abs() if scale else None
    tensors = (*views, eta, *state, *inner_norm)
    wanted, last = op(
        *tensors,
        mini_batch_size=size,
        position_scale=position_scale,
        reverse_heads=reverse_heads,
        return_state=True,
        backend="reference",
    )
    inputs = TABLE[name].inputs(*tensors, position_scale, size, reverse_heads, 1e-6)
    got = TABLE[name].exported(inputs)
    for mine, theirs in zip(got, (wanted, *last[: len(state)]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
