"""What the benchmark's tests share."""

import pytest


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of this machine are no matter here, and take a second or more each time."""
    monkeypatch.setattr("vision_ttt.bench.rates._TURNS", 2)
