"""Every row of Vision-TTT's Tables 3 and 4 and Fig. 7, as Vittt-nano on handwritten digits."""

from __future__ import annotations

from studies.sweeps import TITLES
from studies.sweeps.definition import Panel, Sweep, Variant
from vision_ttt.models.vittt_ablations import ABLATIONS

PUBLISHED = "vittt"
"""The row of the published model, the last of Table 3 and a row of every other comparison."""

# A digit has 64 tokens at patch 4: these are one mini-batch of all tokens, three times the same.
_FULL_BATCH = "b64"
_SAME_HERE = ("b128", "b196")

_ROWS = (
    Variant(PUBLISHED, {}, published=77.7),
    *(
        Variant(
            name,
            {"arguments": ablation.keywords},
            published=ablation.accuracy,
            note="b = 128 and 196 are the same here: a digit has 64 tokens"
            if name == _FULL_BATCH
            else "",
        )
        for name, ablation in ABLATIONS.items()
        if name not in _SAME_HERE
    ),
)

ABLATION_DIGITS = Sweep(
    name="ablation-digits",
    title=TITLES["ablation-digits"],
    recipe="digits",
    # Half a minute a run. Trained by the recipe's twelve epochs Vittt is at 99 %, where 500 images
    # separate little.
    base={"epochs": 2, "warmup": 0.5, "batch_size": 16, "learning_rate": 1.5e-3},
    rows=_ROWS,
    panels=(
        Panel(
            "Table 3: design route",
            {
                "TTT layer": "ttt_layer",
                "+ shared QK": "shared_qk",
                "+ gating": "gating",
                "+ Conv1d": "conv1d",
                "+ dual": "dual",
                "+ Conv2d (Vittt)": PUBLISHED,
            },
            in_steps=True,
        ),
        Panel(
            "Table 4: classification feature",
            {
                "head token": "head_token",
                "middle token": "middle_token",
                "double token": "double_token",
                "max-norm pool": "max_pool",
                "mean pool (Vittt)": PUBLISHED,
            },
        ),
        Panel(
            "Fig. 7a: mini-batch size b",
            {
                "4": "b4",
                "8": "b8",
                "16 (Vittt)": PUBLISHED,
                "32": "b32",
                "64, 128, 196": _FULL_BATCH,
            },
            in_steps=True,
        ),
        Panel(
            "Fig. 7b: learnable states",
            {"0": "w0", "1": "w1", "2 (Vittt)": PUBLISHED},
            in_steps=True,
        ),
    ),
    caveat="Small-scale evidence: Vittt-nano, 1,297 training and 500 test images, two epochs; "
    "differences below the spread over seeds mean nothing.",
    published_unit="top-1 of Vittt-T on ImageNet-1K, %",
)
