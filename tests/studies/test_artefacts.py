"""Accuracies from tokens by their norm."""

import pytest
import torch

from studies.artefacts import OWN, share_accuracies
from studies.main import main
from vision_ttt.models import create_model


def test_a_share_of_the_tokens_by_their_norm():
    """Tokens of large norm that say class 1, all others class 0; the mean is of them all."""
    torch.manual_seed(0)
    model = create_model("vittt_nano_patch4_32", num_classes=2, depth=1).eval()
    images = torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        x, context = model.embed(images)
        x = model.run_blocks(x, context)
        order = x.norm(dim=-1).argsort(1, descending=True)
        tokens = model.norm(x).take_along_dim(order[..., None], 1)
        wanted = {
            OWN: tokens.mean(1),
            "all tokens": tokens.mean(1),
            "top 20 %": tokens[:, :13].mean(1),
            "top 10 %": tokens[:, :6].mean(1),
            "top 5 %": tokens[:, :3].mean(1),
            "lowest 80 %": tokens[:, 13:].mean(1),
        }
        for name, feature in wanted.items():
            classes = model.head(feature).argmax(1)
            for classes_given, right in ((classes, 1.0), (1 - classes, 0.0)):
                batches = [(images[:4], classes_given[:4]), (images[4:], classes_given[4:])]
                assert share_accuracies(model, batches)[name] == right, name


def test_models_without_such_a_head_are_refused():
    with pytest.raises(ValueError, match="takes 384 channels, and a token has 96"):
        share_accuracies(create_model("mambar_nano_patch4_32", num_classes=2), [])
    with pytest.raises(TypeError, match="got ResNet"):
        share_accuracies(create_model("resnet18"), [])


def test_the_command(capsys):
    command = ["artefacts", "vittt_nano_patch4_32.digits", "--images", "50"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "top 5 %" in shown
    own = next(line for line in shown.splitlines() if OWN in line)
    assert float(own.split("│")[2].strip(" %")) > 90
    assert main(["artefacts", "nowhere.safetensors"]) == 2
