"""Pictures at their own proportions, squeezed and padded, on clothes of many proportions."""

from __future__ import annotations

from studies.sweeps import TITLES
from studies.sweeps.definition import Panel, Sweep, Variant
from studies.sweeps.linearize import UPDATE, examine

_FOLDER = "runs/trimmed-clothes"

ASPECT_RATIOS = Sweep(
    name="aspect-ratios",
    title=TITLES["aspect-ratios"],
    recipe="fashion-mnist",
    base={
        "model": "vittt_nano_patch4_32",
        "epochs": 6,
        "warmup": 0.5,
        "ema_decay": 0.0,
        # It erases pixels of squares, and whole patches of sequences.
        "random_erasing": 0.0,
    },
    rows=(
        Variant("native", {"dataset": f"{_FOLDER}/native", "naflex": 49}),
        Variant("squeezed", {"dataset": f"{_FOLDER}/squeezed"}),
        Variant("padded", {"dataset": f"{_FOLDER}/padded"}),
    ),
    panels=(
        Panel(
            "trimmed clothes, at most 49 patches",
            {"native proportions": "native", "squeezed": "squeezed", "padded": "padded"},
        ),
    ),
    caveat="Small-scale evidence: 0.57 million parameters, photographs of at most 28 pixels, equal "
    "epochs; CPU time is that of an update on one thread, without reading the images.",
    columns=(UPDATE,),
    examine=examine,
)
