"""Does longer context help? Three language models of equal size and tokens, by their context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, Sweep, Variant
from studies.sweeps.position_figure import position_figure

if TYPE_CHECKING:
    from studies.sweeps.results import Result
    from vision_ttt.engine.train import TrainResult

CONTEXTS = (512, 2048, 8192)
TOKENS_PER_UPDATE = 8192

# 1,305,708 parameters; the others have 0.5 and 0.8 % more. The recipe's arguments of TTT that the
# others do not have are removed.
_OURS = dict.fromkeys(("use_gate", "share_qk", "pre_conv"))
_MODELS: dict[str, dict[str, Any]] = {
    "ttt": {},
    "llama": {"model": "llama", "arguments": {**_OURS, "intermediate_size": 384}},
    "mamba": {
        "model": "mamba",
        "arguments": {
            **_OURS,
            "intermediate_size": None,
            "num_attention_heads": None,
            "num_hidden_layers": 11,
        },
    },
}
LABELS = {"ttt": "TTT-Linear", "llama": "Llama", "mamba": "Mamba"}


def _row(model: str, context: int) -> Variant:
    changes = {"context": context, "batch_size": TOKENS_PER_UPDATE // context}
    return Variant(f"{model}-{context}", {**_MODELS[model], **changes})


def measure_positions(trained: TrainResult) -> dict[str, Any]:
    """Return bits per byte, and the test loss by bands and by octaves of positions."""
    evaluation = trained.evaluation
    return {
        "bits_per_byte": evaluation.bits_per_byte,
        "bands": evaluation.by_band(),
        "octaves": evaluation.by_octave(),
    }


def _last_octave(result: Result) -> float:
    return result.measured["octaves"][-1]["loss"]


TEXT_CONTEXTS = Sweep(
    name="text-contexts",
    title=TITLES["text-contexts"],
    recipe="text",
    base={"units": 2_000_000, "warmup": 100_000, "evaluate_every": 61},
    rows=tuple(_row(model, context) for context in CONTEXTS for model in _MODELS),
    panels=tuple(
        Panel(f"context {context}", {LABELS[model]: f"{model}-{context}" for model in _MODELS})
        for context in CONTEXTS
    ),
    caveat="Small-scale evidence: 1.31 to 1.32 million parameters, two million bytes of the Python "
    "standard library, 8,192 in each update, one recipe for all; Mamba is transformers' with our "
    "scan. Differences below the spread over seeds mean nothing.",
    columns=(
        Column("bits per byte", lambda result: result.measured["bits_per_byte"], 3),
        Column("loss of the last half", _last_octave, 3),
        Column("training, s", lambda result: result.seconds, 0, is_time=True),
    ),
    unit="tokens",
    losses="both without label smoothing",
    examine=measure_positions,
    draw=position_figure,
)
