"""The committed segmenters of letters: for timm, and for commands, as their cards say."""

import json
from pathlib import Path

import pytest
import timm
import torch
from timm.models import PretrainedCfg
from torch import nn

from studies.letters import WEIGHTS
from studies.letters.dataset import LetterImages
from studies.letters.images import ALPHABET, LetterSettings, render_letters
from studies.main import main
from tolerances import assert_close
from vision_ttt.engine.checkpoint import read_metadata, read_weights
from vision_ttt.models.image_size import positions_for
from vision_ttt.models.packaged_weights import weights_cfg
from vision_ttt.tasks.segmentation.evaluation import SegmentationEvaluation, measured

VITTT, VIT3 = (f"{each}_nano_patch8_256" for each in ("vittt", "vit3"))
of_each = pytest.mark.parametrize("name", [VITTT, VIT3])


def path_of(name: str) -> Path:
    return WEIGHTS / f"{name}.letters.safetensors"


def loaded(name: str, **options: object) -> nn.Module:
    """The backbone with its head, as timm loads it."""
    with torch.device("meta"):
        config = timm.create_model(name).pretrained_cfg
    described = PretrainedCfg(**{**config, **weights_cfg(str(path_of(name)))})
    return timm.create_model(name, pretrained=True, pretrained_cfg=described, **options).eval()


@of_each
def test_tokens_name_letters_about_as_well_as_the_card_says(name: str) -> None:
    """On the first test pictures, as timm loads the model and shows images to it."""
    model, pictures = loaded(name, global_pool=""), LetterImages(LetterSettings(), "test", 4)
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    with torch.inference_mode():
        logits = model(torch.stack([transform(pictures[i].image) for i in range(4)]))
    assert logits.shape == (4, 1024, 11)
    grids = logits.mT.unflatten(-1, (32, 32))
    both = [measured(grids[i], torch.from_numpy(pictures[i].labels)) for i in range(4)]
    counts, loss = (sum(each) for each in zip(*both, strict=True))
    evaluation = SegmentationEvaluation(*counts, loss.item() / int(counts[2].sum()), images=4)
    committed = read_metadata(path_of(name)).metrics
    assert evaluation.metrics["miou"] == pytest.approx(committed["test_miou"], abs=0.1)
    assert evaluation.metrics["pixel_accuracy"] == pytest.approx(
        committed["test_pixel_accuracy"], abs=0.01
    )
    assert model.pretrained_cfg["label_names"] == pictures.classes


def test_positions_become_those_of_larger_pictures() -> None:
    weights, _ = read_weights(path_of(VITTT))
    larger = loaded(VITTT, img_size=512).pos_embed
    positions = weights["maps.backbone.pos_embed"].float()
    assert_close(larger, positions_for((64, 64), positions, (32, 32)), 1e-6)


@pytest.mark.slow
@of_each
def test_eval_gives_the_figures_of_all_pictures(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(path_of(name)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == 64
    for key, value in read_metadata(path_of(name)).metrics.items():
        assert told[key.removeprefix("test_")] == pytest.approx(value, rel=1e-3)


def test_predict_names_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = render_letters(LetterSettings(), "test", 0)
    picture.image.save(tmp_path / "a.png")
    argv = ["predict", str(tmp_path / "a.png"), "--checkpoint", str(path_of(VITTT)), "--json"]
    assert main(argv) == 0
    (told,) = json.loads(capsys.readouterr().out)["predictions"]
    named = {each["class"] for each in told["segments"] if each["share"] > 0.005}
    true = {ALPHABET[letter.label] for letter in picture.letters if letter.counts}
    assert len(named & true) > len(true) / 2
    assert told["segments"][0]["class"] == "background"
