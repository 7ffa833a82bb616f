"""Many small training runs, compared: what a design choice brings, with its spread over seeds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs PyTorch
    from studies.sweeps.definition import Sweep

TITLES = {
    "ablation-digits": "What each design step of Vittt brings, on handwritten digits",
    "design-space-digits": "Ways of inner training, on handwritten digits",
    "design-space-ranges": "Inner models by size, rate, batch and epochs, on handwritten digits",
    "registers-digits": "Registers of Mamba-Reg: accuracy and token norms, on handwritten digits",
    "backbones-digits": "Backbones of equal size, for equal epochs and time, on handwritten digits",
    "backbones-fashion": "Backbones of equal size, for equal epochs and time, on Fashion-MNIST",
    "backbones-elpv": "Backbones of equal size, for equal epochs and time, on solar cells",
    "grades-elpv": "The probability of a defect, by four grades, on solar cells",
    "linearize-fashion": "A DeiT made linear, by training time, on photographs of clothes",
    "linearize-letters": "A DeiT made linear, by training time, on pictures of letters",
    "pretraining-fashion": "Pre-training without labels, by share of labels, on Fashion-MNIST",
    "pretraining-elpv": "Pre-training without labels, by share of labels, on solar cells",
    "text-ablation": "From linear attention to TTT-Linear, on Python sources",
    "text-mini-batch": "Perplexity and time by mini-batch size, on Python sources",
    "text-flops": "Language models by FLOPs of training and context, on Python sources",
    "text-contexts": "Language models of equal size and tokens, by context, on Python sources",
    "letters-rates": "Learning rates of backbones on letters, on a validation split",
    "resolution-letters": "Backbones by resolution, at equal time and images, on letters",
    "letters-sizes": "Letters on larger pictures than those of training",
    "stamps": "Backbones at equal time on cut-outs of photographs, at 512² and 1024²",
    "letters-tiles": "A large picture of letters as a whole, by tiles, and by tiles of a DeiT",
}
"""What the sweeps are, without importing their models."""

_HOMES = {
    "ablation-digits": ("studies.sweeps.ablation", "ABLATION_DIGITS"),
    "design-space-digits": ("studies.sweeps.design_space", "DESIGN_SPACE_DIGITS"),
    "design-space-ranges": ("studies.sweeps.design_ranges", "DESIGN_SPACE_RANGES"),
    "registers-digits": ("studies.sweeps.registers", "REGISTERS_DIGITS"),
    "backbones-digits": ("studies.sweeps.backbones", "BACKBONES_DIGITS"),
    "backbones-fashion": ("studies.sweeps.backbones", "BACKBONES_FASHION"),
    "backbones-elpv": ("studies.sweeps.backbones", "BACKBONES_ELPV"),
    "grades-elpv": ("studies.sweeps.backbones", "GRADES_ELPV"),
    "linearize-fashion": ("studies.sweeps.linearize", "LINEARIZE_FASHION"),
    "linearize-letters": ("studies.sweeps.linearize_letters", "LINEARIZE_LETTERS"),
    "pretraining-fashion": ("studies.sweeps.pretraining", "PRETRAINING_FASHION"),
    "pretraining-elpv": ("studies.sweeps.pretraining", "PRETRAINING_ELPV"),
    "text-ablation": ("studies.sweeps.text_paper", "TEXT_ABLATION"),
    "text-mini-batch": ("studies.sweeps.text_paper", "TEXT_MINI_BATCH"),
    "text-flops": ("studies.sweeps.text_paper", "TEXT_FLOPS"),
    "text-contexts": ("studies.sweeps.text_contexts", "TEXT_CONTEXTS"),
    "letters-rates": ("studies.sweeps.letters", "LETTERS_RATES"),
    "resolution-letters": ("studies.sweeps.letters", "RESOLUTION_LETTERS"),
    "letters-sizes": ("studies.sweeps.letters", "LETTERS_SIZES"),
    "stamps": ("studies.sweeps.stamps", "STAMPS"),
    "letters-tiles": ("studies.sweeps.tiles", "LETTERS_TILES"),
}


class _Sweeps(MutableMapping[str, "Sweep"]):
    """Sweeps by name; those of `TITLES` are imported when they are first asked for."""

    def __init__(self) -> None:
        self._sweeps: dict[str, Sweep | None] = dict.fromkeys(_HOMES)

    def __getitem__(self, name: str) -> Sweep:
        if self._sweeps[name] is None:
            module, constant = _HOMES[name]
            self._sweeps[name] = getattr(importlib.import_module(module), constant)
        return self._sweeps[name]

    def __setitem__(self, name: str, sweep: Sweep) -> None:
        self._sweeps[name] = sweep

    def __delitem__(self, name: str) -> None:
        del self._sweeps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sweeps)

    def __len__(self) -> int:
        return len(self._sweeps)


SWEEPS = _Sweeps()
