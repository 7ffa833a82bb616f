"""Many small training runs, compared: what a design choice brings, with its spread over seeds."""

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from vision_ttt._late import offer_late

if TYPE_CHECKING:
    from vision_ttt.sweeps.definition import Panel, Sweep, Variant

TITLES = {
    "ablation-digits": "What each design step of Vittt brings, on handwritten digits",
    "design-space-digits": "Ways of inner training, on handwritten digits",
    "registers-digits": "Registers of Mamba-Reg: accuracy and token norms, on handwritten digits",
    "backbones-digits": "Backbones of equal size, for equal epochs and time, on handwritten digits",
    "text-contexts": "Language models of equal size and tokens, by context, on Python sources",
    "letters-rates": "Learning rates of backbones on letters, on a validation split",
    "resolution-letters": "Backbones by resolution, at equal time and images, on letters",
}
"""What the packaged sweeps are, without importing their models."""

_HOMES = {
    "ablation-digits": ("vision_ttt.sweeps.ablation", "ABLATION_DIGITS"),
    "design-space-digits": ("vision_ttt.sweeps.design_space", "DESIGN_SPACE_DIGITS"),
    "registers-digits": ("vision_ttt.sweeps.registers", "REGISTERS_DIGITS"),
    "backbones-digits": ("vision_ttt.sweeps.backbones", "BACKBONES_DIGITS"),
    "text-contexts": ("vision_ttt.sweeps.text_contexts", "TEXT_CONTEXTS"),
    "letters-rates": ("vision_ttt.sweeps.letters", "LETTERS_RATES"),
    "resolution-letters": ("vision_ttt.sweeps.letters", "RESOLUTION_LETTERS"),
}


class _Sweeps(MutableMapping[str, "Sweep"]):
    """Sweeps by name; the packaged ones are imported when they are first asked for."""

    def __init__(self) -> None:
        self._sweeps: dict[str, Sweep | None] = dict.fromkeys(_HOMES)

    def __getitem__(self, name: str) -> "Sweep":
        if self._sweeps[name] is None:
            module, constant = _HOMES[name]
            self._sweeps[name] = getattr(importlib.import_module(module), constant)
        return self._sweeps[name]

    def __setitem__(self, name: str, sweep: "Sweep") -> None:
        self._sweeps[name] = sweep

    def __delitem__(self, name: str) -> None:
        del self._sweeps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sweeps)

    def __len__(self) -> int:
        return len(self._sweeps)


SWEEPS = _Sweeps()

__all__ = ["SWEEPS", "TITLES", "Sweep", "Variant", "Panel"]

offer_late(__name__, dict.fromkeys(("Sweep", "Variant", "Panel"), "definition"))
