"""Whether a sequence of tokens fills the grid that it is said to be."""

from __future__ import annotations

from torch.fx.node import has_side_effect


@has_side_effect  # a graph of torch.fx keeps it, though nothing uses its result
def check_grid(length: int, grid: tuple[int, int], num_extra: int = 0) -> None:
    """Refuse a length that is not h · w + num_extra.

    Modules that call it wrap it for torch.fx, whose tracing knows no sizes yet.

    Raises:
        ValueError: the tokens are too few or too many.
    """
    height, width = grid
    if length != height * width + num_extra:
        raise ValueError(
            f"{length} tokens do not fill a grid of {height} × {width}"
            + (f" and {num_extra} extra tokens" if num_extra else "")
        )
