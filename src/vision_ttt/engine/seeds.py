"""All randomness of a run is a function of its seed and of where in the run it is drawn."""

from collections.abc import Sequence

import numpy as np
from accelerate.utils import set_seed


def seed_pass(place: Sequence[int]) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices) by a tuple of counters."""
    set_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
