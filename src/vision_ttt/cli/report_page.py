"""The one page that a training run leaves, whatever was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vision_ttt.engine.files import write_text
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain.report import Section, render_report


def write_page(
    result: TrainResult, measured: Mapping[str, str], sections: Sequence[Section]
) -> Path:
    """Write report.html into the run's directory.

    Args:
        result: of the run.
        measured: name → figure, told before what was trained, how long and by what.
        sections: the figures.

    Returns:
        The page's path.
    """
    metrics = result.metrics
    summary = {
        **measured,
        "model": f"{metrics['model']}, {metrics['parameters']:,} parameters",
        "images": f"{metrics['train_images']:,} for training, {metrics['test_images']:,} for test",
        "epochs": str(len(metrics["epochs"])),
        "training time": f"{metrics['seconds']:.0f} s",
        "seed": str(metrics["seed"]),
        "versions": ", ".join(f"{name} {version}" for name, version in metrics["versions"].items()),
    }
    configuration = (result.run_dir / "config.yaml").read_text(encoding="utf-8")
    title = f"{metrics['model']} on {metrics['dataset']}"
    page = result.run_dir / "report.html"
    write_text(page, render_report(title, summary, sections, configuration))
    return page
