"""The recipe as a whole: digits that a classifier of the demo recognises."""

import json
from pathlib import Path

import pytest

from vision_ttt.cli.main import main


@pytest.mark.slow
def test_a_classifier_recognises_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", "--output", str(tmp_path / "classifier")]) == 0
    assert main(["train", "digits-diffusion", "--output", str(tmp_path / "diffusion")]) == 0
    accuracy = {}
    for guidance in ("1", "1.5"):
        folder = str(tmp_path / f"images-{guidance}")
        command = ["sample", "--checkpoint", str(tmp_path / "diffusion" / "last.safetensors")]
        command += ["--guidance", guidance, "--per-class", "20", "--images", folder]
        assert main([*command, "--output", str(tmp_path / f"{guidance}.png")]) == 0
        capsys.readouterr()
        classifier = str(tmp_path / "classifier" / "last.safetensors")
        assert main(["eval", classifier, "--dataset", folder, "--split", "all", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["images"] == 200
        accuracy[guidance] = report["accuracy"]
        assert min(row["accuracy"] for row in report["classes"]) >= 0.6
    assert accuracy["1"] >= 0.8
    assert accuracy["1.5"] >= 0.9
