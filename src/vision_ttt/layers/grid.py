"""The check that a sequence of tokens fills its grid."""

from __future__ import annotations

from torch.fx.node import has_side_effect


@has_side_effect  # a graph of torch.fx keeps it, though nothing uses its result
def check_grid(length: int, grid: tuple[int, int], num_extra: int = 0) -> None:
    """Require a length of h · w + num_extra.

    Modules that call it wrap it for torch.fx, which traces without sizes.

    Raises:
        ValueError: there are more or fewer tokens.
    """
    height, width = grid
    if length != height * width + num_extra:
        raise ValueError(
            f"{length} tokens do not fill a grid of {height} × {width}"
            + (f" and {num_extra} extra tokens" if num_extra else "")
        )
