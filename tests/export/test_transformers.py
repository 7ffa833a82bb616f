"""timm's folder in transformers: its automatic classes, its pipeline and its Trainer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from vision_ttt.export import export_timm
from vision_ttt.tasks import load_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["linear", "mlp"])
def exported(
    request: pytest.FixtureRequest, make_model: Callable, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, Path]:
    """A model and its folder; TTT-MLP keeps something in memory that no file holds."""
    model, metadata = make_model(inner_model=request.param)
    folder = tmp_path_factory.mktemp("transformers") / "exported"
    export_timm(model, metadata, folder)
    return model, folder


def images() -> torch.Tensor:
    return torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))


def test_automatic_classes(exported: tuple[torch.nn.Module, Path]) -> None:
    model, folder = exported
    x = images()
    for loader in (
        transformers.TimmWrapperForImageClassification,
        transformers.AutoModelForImageClassification,
    ):
        loaded = loader.from_pretrained(folder).eval()
        assert loaded.config.id2label == {0: "cat", 1: "dog", 2: "émeu"}
        torch.testing.assert_close(loaded(x).logits, model(x), rtol=0, atol=1e-6)
    features = transformers.AutoModel.from_pretrained(folder).eval()(x)
    tokens = model.forward_features(x)
    torch.testing.assert_close(features.last_hidden_state, tokens, rtol=0, atol=1e-6)
    pooled = model.forward_head(tokens, pre_logits=True)
    torch.testing.assert_close(features.pooler_output, pooled, rtol=0, atol=1e-6)


def test_pipeline(exported: tuple[torch.nn.Module, Path]) -> None:
    model, folder = exported
    image = Image.fromarray((127 * (images()[0] + 1)).clamp(0, 255).byte().permute(1, 2, 0).numpy())
    found = transformers.pipeline("image-classification", model=str(folder))(image)
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    prepare = timm.data.create_transform(**timm.data.resolve_data_config(model=loaded))
    wanted = model(prepare(image.convert("RGB"))[None]).softmax(-1)[0]
    scores = {each["label"]: each["score"] for each in found}
    for label, score in zip(("cat", "dog", "émeu"), wanted.tolist(), strict=True):
        assert scores[label] == pytest.approx(score, abs=1e-4)


def test_trainer(exported: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    _, folder = exported
    loaded = transformers.AutoModelForImageClassification.from_pretrained(
        folder, num_labels=5, ignore_mismatched_sizes=True
    )
    before = {key: x.clone() for key, x in loaded.state_dict().items()}
    data = [{"pixel_values": x, "labels": label} for x, label in zip(images(), (4, 1), strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    trainer = transformers.Trainer(model=loaded, args=arguments, train_dataset=data)
    assert trainer.train().training_loss > 0
    changed = {key for key, x in loaded.state_dict().items() if not torch.equal(x, before[key])}
    assert {"timm_model.head.weight", "timm_model.pos_embed"} < changed
    trainer.save_model(tmp_path / "trained")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "trained")
    x = images()
    torch.testing.assert_close(again.eval()(x).logits, loaded.eval()(x).logits, rtol=0, atol=1e-6)
    ours, metadata = load_model(tmp_path / "trained")
    assert len(metadata.carried["classes"]) == 5
    torch.testing.assert_close(ours(x), loaded(x).logits, rtol=0, atol=1e-6)
