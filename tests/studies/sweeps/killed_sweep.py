"""Run the sweep "tiny" of a recipe's rows: `python killed_sweep.py RECIPE OUTPUT`.

Row "short" trains one epoch, then row "long" eight, one process at a time.
"""

import sys

from studies.main import main
from studies.sweeps import SWEEPS
from studies.sweeps.definition import Panel, Sweep, Variant


def tiny(recipe: str) -> Sweep:
    """The sweep."""
    rows = (Variant("short", {"epochs": 1}), Variant("long", {"epochs": 8}))
    panels = (Panel("both", {"short": "short", "long": "long"}),)
    return Sweep("tiny", "Tiny", recipe, {"warmup": 0}, rows, panels, "None.")


if __name__ == "__main__":
    SWEEPS["tiny"] = tiny(sys.argv[1])
    sys.exit(main(["sweep", "tiny", "--seeds", "0", "--jobs", "1", "--output", sys.argv[2]]))
