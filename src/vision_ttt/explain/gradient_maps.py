"""Gradient magnitude maps: the size of the inner learners' gradient of every image token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.explain.inner_loop import Problem, examine, inner_op, problem_of, refuse_packed
from vision_ttt.layers import ViT3TTT, VitttMixer
from vision_ttt.layers.attention_inner import (
    Grid,
    Positions,
    SwiGLUInner,
    TTTLinearInner,
    ViT3Inner,
)
from vision_ttt.layers.extra_tokens import merge_extra, split_extra
from vision_ttt.ops.swiglu_ttt import swiglu_ttt_gradient_norms
from vision_ttt.ops.vit3_ttt import depthwise_gradient_norms, gated_unit_gradient_norms

STATES = ("final", "initial", "current")
"""The states of a Vittt's learners at which gradients are computed."""
DEFAULT_STATE = "initial"
"""The state whose map does not reflect the scan. Measured by deletion and insertion, the map is not
worse than a random order (docs/explain.md). Vision-TTT's Eq. 6 uses "current"."""
ONE_STEP = (SwiGLUInner, ViT3Inner, ViT3TTT)
"""Layers whose learners take one step, on all tokens: their state is "initial"."""


def states_of(layer: nn.Module) -> tuple[str, ...]:
    """The states at which a layer's gradients can be computed."""
    return ("initial",) if isinstance(layer, ONE_STEP) else STATES


def gradient_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that have gradient magnitude maps, by module name, in their order.

    These are the token mixers of a Vittt, with linear or two-layer inner models, and of a ViT³, and
    the inner models of a linearised ViT.

    Raises:
        TypeError: the model is one of ``for_inference``, whose blocks do not call their layers.
    """
    refuse_packed(model)
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (*ONE_STEP, TTTLinearInner))
        or (isinstance(layer, VitttMixer) and inner_op(layer.ttt) is not None)
    }


def gradient_magnitude(
    model: nn.Module,
    images: Tensor,
    *,
    state: str | None = None,
    layers: Sequence[int] | None = None,
) -> Tensor:
    """‖G_t‖ of every image token in every layer and head (Vision-TTT, Eq. 6, Figs. 3, 9 and 10).

    G_t is the gradient of the inner loss of token t with respect to the inner model's weight
    matrices. Its Frobenius norm measures how much the learner can learn from that token. It depends
    on the learner's state:

    - "initial", the default: before any step. All tokens meet the same state, so that the map
      depends on the image and not on the scan.
    - "final": after learning from the whole image. All tokens meet the same state, too. The
      gradient is large for tokens that the rest of the image does not predict: the map to draw of
      images of many mini-batches.
    - "current": before the token's mini-batch, which is the paper's definition. The first
      mini-batch of each direction meets an untrained state and dominates the map.

    The inner models of a ViT³ and the SwiGLUs of a linearised ViT take one step, along the gradient
    of the loss of all tokens at the "initial" state. G_t is token t's share of that gradient,
    before it is clipped.

    The cost is about that of a forward pass, for "current" that of a loop over mini-batches. Of all
    layers only the maps are kept.

    Args:
        model: a Vittt, ViT³, H-ViT³ or linearised ViT, or a model that contains one. It is not
            modified.
        images: [B, C, H, W], normalised as for the model.
        state: one of those above, or None for the model's default.
        layers: indices among :func:`gradient_layers`; None for all, which for models of several
            resolutions are those of the last one.

    Returns:
        [B, layers, heads, h, w] on the token grid, float32, ≥ 0, in the units of the gradient.
        A Vittt of two directions, and a linearised ViT's "ttt_linear", have those of the forward
        scan in the first half of their heads. The last head of a ViT³, and of a linearised ViT's
        "vit3", is the convolution. Tokens outside the grid are left out.

    Raises:
        TypeError: the model has no such layers, does not call them, or is one of
            ``for_inference``.
        ValueError: the state is not one of the layers', or layers differ in grid or heads.
        IndexError: the model has no such layer, or none is asked for.
    """
    every = gradient_layers(model)
    if not every:
        raise TypeError(
            "gradient magnitude maps need a model with TTT layers, such as a Vittt with linear or "
            f"two-layer inner models, a ViT³, an H-ViT³ or a linearised ViT; got "
            f"{type(model).__name__}"
        )
    names = list(every) if layers is None else _chosen(list(every), layers)
    for name in names:
        _check_state(state, every[name])
    maps = _maps(model, images, {name: every[name] for name in names}, state)
    if layers is None:
        last = maps[names[-1]].shape
        names = [name for name in names if maps[name].shape == last]
    sizes = {name: list(maps[name].shape[1:]) for name in names}
    if len({tuple(size) for size in sizes.values()}) > 1:
        raise ValueError(
            "layers must be of one resolution; their heads and grids [heads, h, w] are "
            + ", ".join(f"{name}: {size}" for name, size in sizes.items())
        )
    return torch.stack([maps[name] for name in names], dim=1)


def mean_map(magnitude: Tensor, last_layers: int = 1) -> Tensor:
    """The mean of maps over the last layers, their heads and directions.

    Args:
        magnitude: [B, layers, heads, h, w] of :func:`gradient_magnitude`.
        last_layers: how many of the last layers, at least 1.

    Returns:
        [B, h, w].

    Raises:
        ValueError: the shape or the number of layers does not fit.
    """
    if magnitude.ndim != 5:
        raise ValueError(f"magnitude must be [B, layers, heads, h, w], got {list(magnitude.shape)}")
    if not 1 <= last_layers <= magnitude.shape[1]:
        raise ValueError(f"last_layers must be in 1 … {magnitude.shape[1]}, got {last_layers}")
    return magnitude[:, -last_layers:].mean((1, 2))


def _chosen(names: Sequence[str], layers: Sequence[int]) -> list[str]:
    """The names at some indices, which may count from the end."""
    wrong = [index for index in layers if not -len(names) <= index < len(names)]
    if wrong or not layers:
        raise IndexError(
            f"layers must be indices of the model's {len(names)} layers, at least one; got "
            f"{list(layers)}"
        )
    return [names[index] for index in layers]


def _check_state(state: str | None, layer: nn.Module) -> None:
    accepted = states_of(layer)
    if state is not None and state not in accepted:
        raise ValueError(
            f"state must be one of {', '.join(accepted)} for a {type(layer).__name__}, got "
            f"{state!r}"
        )


def _maps(
    model: nn.Module, images: Tensor, layers: Mapping[str, nn.Module], state: str | None
) -> dict[str, Tensor]:
    """Name → maps [B, heads, h, w] of some of :func:`gradient_layers`."""

    def look(layer: nn.Module, arguments: Mapping[str, Any]) -> Any:
        place = arguments.get("grid"), arguments.get("extra", ())
        match layer:
            case VitttMixer():
                return None, place
            case ViT3TTT():
                return _vit3_norms(layer, **arguments), place
            case SwiGLUInner():
                return _swiglu_norms(layer, **arguments), place
            case ViT3Inner():
                return _vit3_inner_norms(layer, **arguments), place
        return _norms(layer, problem_of(layer, arguments), state or DEFAULT_STATE), place

    # A Vittt's mixer knows the grid, the layer within it the tokens.
    within = {
        f"{name}.ttt": layer.ttt for name, layer in layers.items() if isinstance(layer, VitttMixer)
    }
    found = examine(model, images, {**layers, **within}, look)
    missing = [name for name in (*layers, *within) if name not in found]
    if missing:
        raise TypeError(f"{type(model).__name__} does not call its layer {missing[0]}")
    maps = {}
    for name in layers:
        norms, place = found[name]
        if norms is None:
            norms, _ = found[f"{name}.ttt"]
        maps[name] = _on_grid(norms, *place)
    return maps


def _norms(layer: nn.Module, problem: Problem, state: str) -> Tensor:
    """‖G_t‖ [B, N, heads] of the tokens of one layer of learners that take several steps."""
    op = inner_op(layer)
    if state == "current":
        return op.trace(**problem).gradient_norm
    names = layer.learner.state_names
    if state == "final":
        _, last = op.run(**problem, return_state=True)
        problem.update(zip(names, last, strict=False))
    given = ("k", "v", *names, "ln_weight", "ln_bias", "eps")
    return op.losses(**{name: problem[name] for name in given}).gradient_norm


def _vit3_norms(layer: ViT3TTT, x: Tensor, grid: Grid, rotations: Tensor | None = None) -> Tensor:
    """‖G_t‖ [B, T, H + 1] of the gated units and of the convolution."""
    (_, k1, v1), (_, k2, v2) = layer.views(x, rotations)
    gated = gated_unit_gradient_norms(k1, v1, layer.w1, layer.w2)
    convolved = depthwise_gradient_norms(k2, v2, grid, layer.w3.shape[-1])
    return torch.cat((gated, convolved.unsqueeze(-1)), dim=-1)


def _swiglu_norms(
    layer: SwiGLUInner, k: Tensor, v: Tensor, grid: Grid, extra: Positions, **_: Tensor
) -> Tensor:
    """‖G_t‖ [B, N, H]."""
    keys = layer.keys(k, grid, extra)
    return swiglu_ttt_gradient_norms(keys, v, layer.w1, layer.w2, layer.w3)


def _vit3_inner_norms(
    layer: ViT3Inner, x: Tensor, k: Tensor, v: Tensor, grid: Grid, extra: Positions, **_: Tensor
) -> Tensor:
    """‖G_t‖ [B, N, H + 1], of the convolution 0 outside the grid, which it leaves out."""
    gated = gated_unit_gradient_norms(k, v, layer.w1, layer.w2)
    _, k2, v2 = layer.conv_views(x, extra)
    convolved = depthwise_gradient_norms(k2, v2, grid, layer.w3.shape[-1]).unsqueeze(-1)
    if extra:
        convolved = merge_extra(convolved, convolved.new_zeros(len(x), len(extra), 1), extra)
    return torch.cat((gated, convolved), dim=-1)


def _on_grid(norms: Tensor, grid: Sequence[int], extra: Sequence[int] = ()) -> Tensor:
    """Norms [B, N, heads] as maps [B, heads, h, w], without the tokens outside the grid."""
    if extra:
        norms, _ = split_extra(norms, extra)
    return norms.float().transpose(1, 2).unflatten(2, tuple(grid)).contiguous()


def top_fraction(maps: Tensor, fraction: float = 0.3) -> Tensor:
    """Mark the tokens of largest gradient in each map (Vision-TTT, Fig. 10 marks 30 %).

    Args:
        maps: [B, h, w], e.g. of :func:`mean_map`.
        fraction: share of the tokens to mark, in (0, 1].

    Returns:
        Boolean [B, h, w] with max(1, round(fraction · h · w)) marks each.

    Raises:
        ValueError: the fraction is outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    flat = maps.flatten(1)
    count = max(1, round(fraction * flat.shape[1]))
    marks = torch.zeros_like(flat, dtype=torch.bool)
    return marks.scatter_(1, flat.topk(count).indices, True).view(maps.shape)
