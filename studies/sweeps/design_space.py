"""Ways of inner training compared on handwritten digits: losses, models, rates, batches, epochs.

The whole product would be some thousand runs. Here are all losses with all inner models, at one
learning rate on all tokens at once; and from two of those cells, ViT³'s own and that of the TTT
paper, one factor at a time.
"""

from __future__ import annotations

from typing import Any

from studies.models.design_space import INNER_MODELS, NANO, PUBLISHED
from studies.sweeps import TITLES
from studies.sweeps.definition import Panel, Sweep, Variant

LOSSES = ("dot_product", "mse", "rmse", "mae", "smooth_l1")
"""Those of ViT³'s supplement, in its order."""

CENTRES = (("simplified_glu", "dot_product"), ("linear", "mse"))
"""ViT³'s inner model (in all of its heads but one) and loss; those of TTT-Linear without norm."""

_RATES = (0.0, 0.1, 10.0)
_BATCHES = (8,)
_EPOCHS = (3,)


def inner_row(inner_model: str, inner_loss: str, suffix: str = "", **others: Any) -> Variant:
    """A row of this inner model and loss, with other `inner_*` arguments of the model."""
    keywords = {"inner_model": inner_model, "inner_loss": inner_loss}
    keywords |= {f"inner_{name}": value for name, value in others.items()}
    return Variant(f"{inner_model}-{inner_loss}{suffix}", {"arguments": keywords})


_GRID = tuple(inner_row(model, loss) for model in INNER_MODELS for loss in LOSSES)
_RATE_ROWS = tuple(
    inner_row(*centre, f"-rate{rate:g}", learning_rate=rate)
    for centre in CENTRES
    for rate in _RATES
)
_BATCH_ROWS = tuple(
    inner_row(*centre, f"-b{size}", mini_batch_size=size) for centre in CENTRES for size in _BATCHES
)
_EPOCH_ROWS = tuple(
    inner_row(*centre, f"-epochs{epochs}", epochs=epochs)
    for centre in CENTRES
    for epochs in _EPOCHS
)
# The causal scan of TTT has ops for its own inner models only; the generic one takes too long.
_CAUSAL = CENTRES[1]
_CAUSAL_SIZES = (8, 64)
_CAUSAL_ROWS = tuple(
    inner_row(*_CAUSAL, f"-causal{size}", mini_batch_size=size, causal=True)
    for size in _CAUSAL_SIZES
)
_VIT3 = Variant(
    PUBLISHED,
    {"arguments": {"inner_model": PUBLISHED}},
    note="ViT³'s published layer: gated units and a convolution, with soft clipping",
)
_VIT3_CONVOLUTIONS = Variant(
    f"{PUBLISHED}-convolutions",
    {"arguments": {"inner_model": PUBLISHED, "convolutions": True}},
    note="ViT³'s whole block: its convolutions encode the positions; other rows embed them",
)


def _panels() -> tuple[Panel, ...]:
    grid = [
        Panel(
            f"loss, with {model}",
            {loss: f"{model}-{loss}" for loss in LOSSES},
        )
        for model in INNER_MODELS
    ]
    models = Panel(
        "inner model, with dot_product",
        {
            **{model: f"{model}-dot_product" for model in INNER_MODELS},
            "ViT³'s layer": PUBLISHED,
            "ViT³'s block": _VIT3_CONVOLUTIONS.name,
        },
    )
    lines = []
    for centre in CENTRES:
        name = "-".join(centre)
        rates = {f"{rate:g}": f"{name}-rate{rate:g}" for rate in _RATES} | {"1": name}
        rates = dict(sorted(rates.items(), key=lambda rate: float(rate[0])))
        lines.append(Panel(f"learning rate, {name}", rates, in_steps=True))
        sizes = {str(size): f"{name}-b{size}" for size in _BATCHES} | {"all 64": name}
        if centre == _CAUSAL:
            sizes |= {f"{size}, causal": f"{name}-causal{size}" for size in _CAUSAL_SIZES}
        lines.append(Panel(f"tokens per step, {name}", sizes))
        epochs = {"1": name} | {str(number): f"{name}-epochs{number}" for number in _EPOCHS}
        lines.append(Panel(f"inner epochs, {name}", epochs, in_steps=True))
    return (*grid, models, *lines)


DESIGN_SPACE_DIGITS = Sweep(
    name="design-space-digits",
    title=TITLES["design-space-digits"],
    recipe="digits",
    # Small batches and a high rate: as many updates as half a minute has room for.
    base={
        "model": NANO,
        "epochs": 5,
        "batch_size": 32,
        "learning_rate": 4e-3,
    },
    rows=(
        *_GRID,
        _VIT3,
        _VIT3_CONVOLUTIONS,
        *_RATE_ROWS,
        *_BATCH_ROWS,
        *_CAUSAL_ROWS,
        *_EPOCH_ROWS,
    ),
    panels=_panels(),
    caveat="Small-scale evidence: two blocks of width 64, 1,297 training and 500 test images, "
    "five epochs; differences below the spread over seeds mean nothing.",
)
