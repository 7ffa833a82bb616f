"""`vision-ttt demo`, cut short: everything it promises lies in its folder."""

import json
import re

import pytest
from safetensors import safe_open

from vision_ttt import recipes
from vision_ttt.cli.main import main
from vision_ttt.tasks import load_model


def test_demo_leaves_everything(tmp_path, capsys):
    output = tmp_path / "a demo"
    assert main(["demo", "--output", str(output), "--epochs", "1"]) == 0
    said = capsys.readouterr().out
    assert "test accuracy" in said
    assert f"vision-ttt predict IMAGES --checkpoint '{output}/last.safetensors'" in said
    metrics = json.loads((output / "metrics.json").read_text())
    assert 0 < metrics["test_accuracy"] <= 1
    assert metrics["test_images"] == 500
    assert metrics["parameters"] <= 1_000_000
    (epoch,) = metrics["history"]
    assert epoch["train_loss"] > 0
    assert len(epoch["inner_losses"]["blocks.0.mixer.ttt"]) == 4
    assert metrics["seconds"] > 0
    assert metrics["seed"] == 0
    assert metrics["versions"]["torch"]
    for name in ("curves", "confusion", "inner_loss", "gradient_maps"):
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (output / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 8  # each figure for wide and for narrow screens
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "Training does not minimise the inner loss" in page
    with safe_open(output / "last.safetensors", "pt") as file:
        assert "head.weight" in file.keys()  # noqa: SIM118 (not a mapping)
    model, _ = load_model(output / "last.safetensors")
    assert model.num_classes == 10
    assert recipes.load(str(output / "config.yaml"), {}).optimisation.epochs == 1


@pytest.mark.slow
def test_demo_reaches_98_percent(tmp_path):
    assert main(["demo", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["test_accuracy"] >= 0.98
