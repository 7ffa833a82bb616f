"""Bad input to selective_scan: an error that names what came and what is accepted."""

import pytest
import torch

from vision_ttt.ops import selective_scan


def call(change=None, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = {"u": (2, 6, 8), "delta": (2, 6, 8), "A": (8, 4), "B": (2, 6, 4), "C": (2, 6, 4)}
    tensors = {
        name: torch.rand(shape, generator=generator, dtype=torch.float32)
        for name, shape in shapes.items()
    }
    return selective_scan(**tensors | (change or {}), **options)


def test_the_unchanged_call_is_accepted():
    assert call().shape == (2, 6, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(2, 6)}, r"u must have shape \[B, T, D\], got \[2, 6\]"),
        ({"delta": torch.zeros(2, 5, 8)}, r"delta must have shape \[2, 6, 8\], got \[2, 5, 8\]"),
        ({"A": torch.zeros(4, 8)}, r"A must have shape \[8, N\], got \[4, 8\]"),
        ({"B": torch.zeros(2, 6, 3)}, r"B must have shape \[2, 6, 4\] or \[2, 6, G, 4\], got"),
        ({"B": torch.zeros(2, 6, 2, 4)}, r"B and C must have one shape, got \[2, 6, 2, 4\] and"),
        ({"D": torch.zeros(4)}, r"D must have shape \[8\], got \[4\]"),
        ({"z": torch.zeros(2, 6, 4)}, r"z must have shape \[2, 6, 8\], got \[2, 6, 4\]"),
        ({"delta_bias": torch.zeros(1)}, r"delta_bias must have shape \[8\], got \[1\]"),
        ({"initial_state": torch.zeros(8, 4)}, r"initial_state must have shape \[2, 8, 4\], got"),
        ({"A": torch.zeros(8, 4, device="meta")}, "A is on meta, u on cpu"),
    ],
)
def test_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        call(change)


@pytest.mark.parametrize("change", [{"delta": torch.zeros(2, 6, 8, dtype=torch.bfloat16)}])
def test_dtypes(change):
    with pytest.raises(TypeError, match="u and delta must share a dtype"):
        call(change)


def test_groups():
    three = {name: torch.zeros(2, 6, 3, 4) for name in ("B", "C")}
    with pytest.raises(ValueError, match="8 channels do not form 3 groups"):
        call(three)
    two = {name: torch.zeros(2, 6, 2, 4) for name in ("B", "C")}
    with pytest.raises(ValueError, match=r"multiple of the 4 channels of a group.* got 3"):
        call(two, reverse_channels=3)
    with pytest.raises(ValueError, match=r"reverse_channels must be in 0 … 8, got 9"):
        call(reverse_channels=9)


def test_options():
    with pytest.raises(TypeError, match="delta_softplus must be a bool, got 1"):
        call(delta_softplus=1)
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        call(backend="cuda")


def test_an_empty_sequence():
    empty = {"u": torch.zeros(2, 0, 8), "delta": torch.zeros(2, 0, 8)}
    empty |= {name: torch.zeros(2, 0, 4) for name in ("B", "C")}
    with pytest.raises(ValueError, match=r"T must be at least 1, got u \[2, 0, 8\]"):
        call(empty)
