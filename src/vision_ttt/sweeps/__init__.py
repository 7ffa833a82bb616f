"""Many small training runs, compared: what a design choice brings, with its spread over seeds."""

from vision_ttt.sweeps.ablation import ABLATION_DIGITS
from vision_ttt.sweeps.definition import Panel, Sweep, Variant
from vision_ttt.sweeps.design_space import DESIGN_SPACE_DIGITS

SWEEPS = {sweep.name: sweep for sweep in (ABLATION_DIGITS, DESIGN_SPACE_DIGITS)}

__all__ = ["SWEEPS", "Sweep", "Variant", "Panel"]
