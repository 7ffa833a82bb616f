"""The designs of Vision-TTT's Table 3: mixers from the bare TTT layer to the published one."""

from __future__ import annotations

from torch import nn

from vision_ttt.layers import TTTMLP, TTTLinear, VitttMixer
from vision_ttt.models.arguments import choose

DESIGNS = ("ttt_layer", "shared_qk", "gating", "conv1d", "dual", "conv2d")
"""The rows of Table 3. Each design adds one part to the former; the last is the published model."""

ONE_WAY = "one_way"
"""The published design but for the second direction: not on the paper's route, which adds the
Conv2d last. It separates the two."""

INNER_MODELS = {"linear": TTTLinear, "mlp": TTTMLP}
"""Sequence layers by the name of their inner model: the published one, and that of TTT-MLP."""


def check_design(design: str, inner_model: str, *, global_pool: str) -> None:
    """Check that a design exists and supports the other arguments.

    Raises:
        ValueError: it does not; names the accepted values.
    """
    has = _steps(choose("design", design, (*DESIGNS, ONE_WAY)))
    choose("inner_model", inner_model, INNER_MODELS)
    if global_pool == "head" and "dual" not in has:
        raise ValueError(
            f"global_pool='head' needs a design that scans both ways ('dual' or 'conv2d'): the "
            f"head token comes before the image, and with {design!r} it does not see the image"
        )


def make_mixer(
    dim: int,
    num_heads: int,
    *,
    design: str,
    inner_model: str,
    mini_batch_size: int,
    learnable_states: int | None,
    drop_path: nn.Module,
) -> VitttMixer:
    """The token mixer of a design, by the arguments of :class:`vision_ttt.models.Vittt`."""
    has = _steps(design)
    ttt = INNER_MODELS[inner_model](
        dim,
        num_heads,
        mini_batch_size=mini_batch_size,
        bidirectional="dual" in has,
        share_qk="shared_qk" in has,
        conv_kernel_size=4 if "conv1d" in has else 0,
        gate="gating" in has,
        learnable_states=learnable_states,
    )
    return VitttMixer(dim, ttt=ttt, conv2d="conv2d" in has, drop_path=drop_path)


def _steps(design: str) -> tuple[str, ...]:
    """The names of the parts that a design has: the designs up to this one, itself included."""
    if design == ONE_WAY:
        return tuple(part for part in DESIGNS if part != "dual")
    return DESIGNS[: DESIGNS.index(design) + 1]
