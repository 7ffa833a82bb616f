"""Sweeps of tiny runs, and results with round numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from studies.sweeps import SWEEPS
from studies.sweeps.definition import Panel, Sweep, Variant
from studies.sweeps.results import Result
from vision_ttt.bench.rows import Run
from vision_ttt.recipes import resolve

RUN = Run(
    *(
        "2026-01-02T03:04:05+00:00",
        "python -m studies sweep tiny",
        "c0ffee",
        "a processor",
        2,
        "avx2",
    ),
    *(1, "a processor", "3.11.7", "2.15.0", "1.0.31", "0.1.0"),
)


@pytest.fixture
def make_sweep(
    tiny_fields: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Sweep]:
    """Makes and registers the sweep "tiny" of rows given as name → changes."""

    def make(**rows: dict) -> Sweep:
        recipe = tmp_path / "tiny.yaml"
        recipe.write_text(yaml.safe_dump(resolve(tiny_fields(epochs=1)).as_dict()))
        sweep = Sweep(
            name="tiny",
            title="A tiny sweep",
            recipe=str(recipe),
            base={"warmup": 0},
            rows=tuple(Variant(name, changes, published=70.5) for name, changes in rows.items()),
            panels=(Panel("all", {f"the {name}": name for name in rows}),),
            caveat="It proves nothing.",
            published_unit="top-1 of a large model",
        )
        monkeypatch.setitem(SWEEPS, "tiny", sweep)
        return sweep

    return make


@pytest.fixture
def make_result() -> Callable[..., Result]:
    """Makes a result of the sweep "tiny"."""

    def make(row: str, seed: int, loss: float, accuracy: float, **others: object) -> Result:
        values = {
            "sweep": "tiny",
            "row": row,
            "seed": seed,
            "model": "vittt_nano_patch4_32",
            "model_args": '{"depth": 1}',
            "epochs": 3,
            "train_images": 1297,
            "test_images": 500,
            "parameters": 1234,
            "macs": 5_600_000,
            "test_accuracy": accuracy,
            "test_loss": loss,
            "train_loss": 1.0,
            "seconds": 2.5,
            "run": RUN,
        }
        return Result(**values | others)

    return make


@pytest.fixture
def results(make_result: Callable[..., Result]) -> list[Result]:
    """Row a with losses 1, 2, 3 and accuracies 0.5, 0.6, 0.7; row b with one seed and no error."""
    losses = enumerate((1.0, 2.0, 3.0))
    return [
        *(make_result("a", seed, loss, 0.4 + loss / 10) for seed, loss in losses),
        make_result("b", 0, 0.25, 1.0),
    ]
