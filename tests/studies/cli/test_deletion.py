"""`python -m studies deletion`: checkpoints to rows, tables and a picture."""

from pathlib import Path

import pytest
import torch

from described_models import describe_classifier
from studies.deletion.results import read_deletion_results
from studies.main import main
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.tasks.images.models import data_config

Said = pytest.CaptureFixture[str]
CLASSES = ("dark", "light")


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[str]:
    """Two tiny models' weights."""
    arguments = {"num_classes": 2, "depth": 2, "embed_dim": 32, "num_heads": 1, "img_size": 16}
    arguments["mlp_ratio"] = 2  # of a width that for_inference packs
    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = build_model("vittt_nano_patch4_32", arguments)
        metadata = describe_classifier(
            "vittt_nano_patch4_32", arguments, CLASSES, data_config(model, 16)
        )
        path = tmp_path / f"seed-{seed}" / "last.safetensors"
        path.parent.mkdir()
        save_weights(path, model.state_dict(), metadata)
        paths.append(str(path))
    return paths


def test_checkpoints_to_csv_tables_and_picture(
    checkpoints: list[str], image_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    table, picture, page = (tmp_path / name for name in ("new/r.csv", "new/r.png", "page.md"))
    page.write_text("<!-- bench:deletion-insertion -->\n<!-- /bench -->\n")
    own = ["--methods", "centre", "gradient magnitude, final", "--points", "3", "--draws", "2"]
    own += ["--dataset", str(image_folder), "--results", str(table), "--images", "6"]
    command = ["deletion", *checkpoints, *own, "--fills", "black", "blur"]
    assert main([*command, "--page", str(page)]) == 0
    assert "gradient magnitude, final" in capsys.readouterr().out
    results = read_deletion_results(table)
    assert len(results) == 2 * 3 * 2
    assert [each.checkpoint for each in results] == [c for c in checkpoints for _ in range(6)]
    told = [(each.curves.method, each.curves.fill) for each in results[:3]]
    assert told == [("random", "black"), ("random", "blur"), ("centre", "black")]
    first = results[0]
    assert (first.images, first.tokens, first.seed) == (6, 16, None)
    assert first.data == str(image_folder)
    assert first.curves.shares == (0, 0.5, 1)
    assert first.run.command.endswith("--page " + str(page))
    assert picture.stat().st_size > 10_000
    assert "| black | random |" in page.read_text()

    # One more measurement renews its own rows only, and --table-only none.
    assert main(["deletion", checkpoints[0], *own, "--fills", "black"]) == 0
    renewed = read_deletion_results(table)
    assert renewed[:6] == results[6:]
    assert [each.curves.fill for each in renewed[6:]] == ["black"] * 3
    for new, old in zip(renewed[6:], results[0:6:2], strict=True):
        assert new.curves == old.curves  # the same numbers again
    assert main(["deletion", checkpoints[0], *own, "--fills", "black", "--classes", "dark"]) == 0
    dark = read_deletion_results(table)[-3:]
    assert {each.images for each in dark} == {4}  # of eight
    picture.unlink()
    capsys.readouterr()
    assert main(["deletion", "--table-only", "--results", str(table)]) == 0
    assert "vittt_nano_patch4_32 on images" in capsys.readouterr().out
    assert picture.exists()
    assert read_deletion_results(table) == [*renewed[:6], *dark]


def test_results_on_other_data_are_kept(
    checkpoints: list[str], image_folder: Path, tmp_path: Path
) -> None:
    table, other = tmp_path / "r.csv", tmp_path / "other"
    other.symlink_to(image_folder)
    own = ["--methods", "centre", "--points", "2", "--draws", "1", "--fills", "black"]
    for folder in (image_folder, other, image_folder):
        argv = ["deletion", checkpoints[0], *own, "--dataset", str(folder), "--images", "2"]
        assert main([*argv, "--results", str(table)]) == 0
    assert [each.data for each in read_deletion_results(table)] == [
        *(2 * [str(other)]),
        *(2 * [str(image_folder)]),
    ]


def test_wrong_arguments(checkpoints: list[str], image_folder: Path, capsys: Said) -> None:
    weights = checkpoints[0]
    for argv, message in [
        ([], "name the checkpoints to measure, or give --table-only"),
        ([weights, "--table-only"], "or give --table-only and none"),
        (["--table-only", "--results", "absent.csv"], "absent.csv"),
        (["absent.safetensors"], "absent.safetensors"),
        ([weights, "--images", "0"], "--images is 0; it must be at least 1"),
        ([weights, "--fills", "white"], "it must be one of mean, blur, black"),
        ([weights, "--figure", "figure.doc"], "its suffix must be one of"),
        ([weights, "--results", ""], "--results is empty"),
        ([weights, "--methods", "saliency"], "saliency; "),
        ([weights, "--dataset", str(image_folder), "--classes", "grey"], "are dark, light"),
        ([weights], "does not name its dataset; give --dataset"),
    ]:
        assert main(["deletion", *argv]) == 2, argv
        told = capsys.readouterr().err
        assert message in told, argv
        assert told.count("\n") == 1
