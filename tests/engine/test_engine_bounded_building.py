"""A model is built for weights, and stopped where it grows far beyond them."""

import threading

import pytest
from torch import nn

from vision_ttt.engine.bounded_building import LargerModelError, no_larger_than


def test_building_stops_before_values_are_made() -> None:
    weights = nn.Linear(4, 4).state_dict()
    with no_larger_than(weights):
        nn.Linear(4, 4)
    with no_larger_than(weights), pytest.raises(LargerModelError, match="there are weights for 2"):
        nn.Linear(1 << 13, 1 << 13)
    made = []
    with no_larger_than(weights), pytest.raises(LargerModelError):
        made.extend(nn.Linear(1, 1) for _ in range(10_000))
    assert len(made) < 200
    nn.Linear(1 << 13, 1 << 12)  # the bound ends with the context


def test_other_threads_build_what_they_like() -> None:
    built = []
    with no_larger_than({}):
        thread = threading.Thread(
            target=lambda: built.append(nn.ModuleList(nn.Linear(1, 1) for _ in range(300)))
        )
        thread.start()
        thread.join()
    assert len(built) == 1


def test_parameters_that_a_model_has_twice_are_no_larger_model() -> None:
    table = nn.Embedding(1 << 12, 1 << 13, device="meta")
    with no_larger_than(table.state_dict()):
        head = nn.Linear(1 << 13, 1 << 12, bias=False, device="meta")
        head.weight = table.weight
