"""The op as a scan, against the op."""

import pytest
import torch

from vision_ttt.export.plain_ops import ttt_linear_scan
from vision_ttt.ops import ttt_linear


@pytest.mark.parametrize("length", [1, 7, 16, 37])
@pytest.mark.parametrize(("reverse_heads", "norm", "scale"), [(0, False, None), (2, True, "head")])
def test_the_scan_computes_the_op(
    length: int, reverse_heads: int, norm: bool, scale: str | None
) -> None:
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, heads, dim, size = 2, 3, 4, 8
    views = [random(batch, length, heads, dim) for _ in range(3)]
    eta = random(batch, length, heads).abs() / dim
    state = random(heads, dim, dim), random(heads, dim)
    inner_norm = (random(heads, dim), random(heads, dim)) if norm else (None, None)
    position_scale = random(heads, size).abs() if scale else None
    tensors = (*views, eta, *state, *inner_norm)
    wanted, (w, b) = ttt_linear(
        *tensors,
        mini_batch_size=size,
        position_scale=position_scale,
        reverse_heads=reverse_heads,
        return_state=True,
        backend="reference",
    )
    with torch.no_grad():
        got = ttt_linear_scan(
            *tensors, position_scale, size, reverse_heads, 1e-6, False, "reference"
        )
    for mine, theirs in zip(got, (wanted, w, b), strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert [len(kept) for kept in got[3:]] == [0, 0]
