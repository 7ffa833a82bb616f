"""What the page computes: explanations of a picture by offered models, by many visitors at once."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from dense_maps import nano_h_vit3
from tolerances import assert_close
from vision_ttt.app.catalogue import Catalogue, CatalogueError, _short_names
from vision_ttt.app.session import Explanation, _layers, explain
from vision_ttt.data import evaluation_transform
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.engine.tensor_files import CheckpointError
from vision_ttt.explain import gradient_magnitude, inner_loss_course, mean_map, token_norms
from vision_ttt.explain.feature_maps import feature_maps
from vision_ttt.tasks import load_model

Pictures = list[Image.Image]


@pytest.fixture(scope="module")
def catalogue(classifier: Path) -> Catalogue:
    return Catalogue([str(classifier), "test_vit.r160_in1k"])


def _same(one: Explanation, other: Explanation) -> bool:
    """Whether two explanations are equal to the bit."""

    def equal(a: object, b: object) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, tuple):
            return all(map(equal, a, b))
        return a == b

    same_layers = all(
        equal(getattr(a, field.name), getattr(b, field.name))
        for a, b in zip(one.layers, other.layers, strict=True)
        for field in dataclasses.fields(a)
    )
    return same_layers and one.classes == other.classes and one.seen == other.seen


def test_an_explanation_is_what_the_library_computes(
    catalogue: Catalogue, classifier: Path, pictures: Pictures
) -> None:
    seen = explain(catalogue.load(catalogue.names[0]), pictures[0])
    model, metadata = load_model(classifier)
    image = evaluation_transform(metadata.carried["input"])(pictures[0])[None]
    with torch.no_grad():
        probabilities = model(image).softmax(-1)[0]
    expected = dict(zip(("dark", "light", "striped"), probabilities.tolist(), strict=True))
    assert seen.classes == pytest.approx(expected, abs=1e-6)
    assert list(seen.classes) == sorted(expected, key=lambda name: -expected[name])
    magnitude, norms = gradient_magnitude(model, image), token_norms(model, image)
    courses = list(inner_loss_course(model, image).values())
    assert [layer.title for layer in seen.layers] == ["block 1 of 2", "block 2 of 2"]
    for index, layer in enumerate(seen.layers):
        assert layer.gradient.shape == (8, 8)
        assert_close(layer.gradient, mean_map(magnitude[:, [index]])[0], 1e-6)
        assert_close(layer.norms, norms[0, index], 1e-6)
        for got, wanted in zip(layer.losses, courses[index], strict=True):
            assert_close(got, wanted, 1e-6)
    assert seen.seen.size == (32, 32)
    assert not seen.notes


def test_gradients_are_at_the_state_that_is_asked_for(
    catalogue: Catalogue, pictures: Pictures
) -> None:
    loaded = catalogue.load(catalogue.names[0])
    maps = [
        explain(loaded, pictures[0], state).layers[0].gradient
        for state in (None, "initial", "final", "current")
    ]
    assert torch.equal(maps[0], maps[1])
    assert not torch.equal(maps[1], maps[2])
    assert not torch.equal(maps[2], maps[3])


def test_visitors_at_once_get_their_own_results(catalogue: Catalogue, pictures: Pictures) -> None:
    """Maps are watched inside of models that all visitors share."""
    names = [catalogue.names[index % 2] for index in range(len(pictures))]
    alone = [explain(catalogue.load(*n), p) for *n, p in zip(names, pictures, strict=True)]
    with ThreadPoolExecutor(8) as visitors:
        together = list(
            visitors.map(
                lambda name, picture: explain(catalogue.load(name), picture),
                names,
                pictures,
            )
        )
    assert all(map(_same, alone, together))
    assert not _same(together[0], together[2])


def test_a_model_without_inner_learners_shows_its_norms(
    catalogue: Catalogue, pictures: Pictures
) -> None:
    seen = explain(catalogue.load("test_vit.r160_in1k"), pictures[0])
    assert seen.classes is seen.drawn is None
    assert all(layer.gradient is layer.losses is None for layer in seen.layers)
    assert seen.layers[0].norms.shape == (10, 10)
    random, learners = seen.notes
    assert "weights are random" in random
    assert "no TTT layers" in learners


@pytest.mark.parametrize("name", ["vit3_tiny_patch16_224", "hvit3_tiny"])
@pytest.mark.slow
def test_a_vit3_has_its_own_state(name: str, pictures: Pictures) -> None:
    seen = explain(Catalogue().load(name), pictures[0], "final")
    assert "a single step" in seen.notes[1]
    assert len(seen.layers) == {"vit3_tiny_patch16_224": 12, "hvit3_tiny": 17}[name]
    first, last = seen.layers[0], seen.layers[-1]
    grids = {"vit3_tiny_patch16_224": (14, 14), "hvit3_tiny": (56, 56)}
    assert first.gradient.shape == first.norms.shape == grids[name]
    assert last.gradient.shape == last.norms.shape
    assert last.losses is None


@pytest.mark.slow
def test_a_segmenter_draws_what_it_finds(segmenter: Path, pictures: Pictures) -> None:
    catalogue = Catalogue([str(segmenter)])
    seen = explain(catalogue.load(catalogue.names[0]), pictures[0])
    assert seen.classes is None
    assert seen.drawn.height >= pictures[0].height
    assert seen.drawn.width > pictures[0].width  # the legend
    assert len(seen.layers) == 4
    width, height = seen.seen.size
    assert seen.layers[0].gradient.shape == (height // 4, width // 4)
    assert "the backbone alone" in seen.notes[0]


def test_models_are_loaded_once_and_the_longest_unused_dropped(
    classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Catalogue([str(classifier), "test_vit.r160_in1k", "test_vit2.r160_in1k"])
    names = catalogue.names[:3]
    assert not catalogue.kept
    with ThreadPoolExecutor(4) as visitors:
        loaded = list(visitors.map(catalogue.load, [names[0]] * 4))
    assert all(each is loaded[0] for each in loaded)
    generator, random = torch.get_rng_state(), catalogue.load(names[1])
    assert torch.equal(torch.get_rng_state(), generator)
    catalogue.kept_bytes = loaded[0].bytes + random.bytes
    assert catalogue.load(names[0]) is loaded[0]  # now the last one used
    catalogue.load(names[2])
    assert names[2] in catalogue.kept
    assert names[1] not in catalogue.kept
    monkeypatch.setattr(catalogue, "kept_bytes", 0)
    torch.manual_seed(1)
    again = catalogue.load(names[1])
    assert catalogue.kept == (names[1],)
    for one, other in zip(again.model.parameters(), random.model.parameters(), strict=True):
        assert torch.equal(one, other)  # every visitor sees the same random weights


def test_names_tell_checkpoints_apart_without_their_folders(
    classifier: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / run / "seed-0" / "best.safetensors" for run in ("vittt", "deit")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(classifier.read_bytes())
    catalogue = Catalogue([str(path) for path in (*paths, paths[0])])
    assert catalogue.names[:2] == ("vittt/seed-0/best", "deit/seed-0/best")
    assert "vittt_tiny_patch16_224" in catalogue.names
    assert not any(name.startswith("dit3") for name in catalogue.names)
    assert Catalogue([str(paths[0])]).names[0] == "seed-0/best"


def test_what_is_no_model_for_images_is_refused_at_start(tmp_path: Path) -> None:
    def refused(given: str | Path, told: str, kind: type[Exception] = CheckpointError) -> None:
        with pytest.raises(kind, match=told):
            Catalogue([str(given)])

    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors at all, but long enough")
    refused(broken, "broken.safetensors is truncated, corrupt or no safetensors file")
    torch.save({}, tmp_path / "pickle.safetensors")
    refused(tmp_path / "pickle.safetensors", "is a pickle")
    denoiser = tmp_path / "denoiser.safetensors"
    save_weights(denoiser, {}, ModelMetadata({"name": "diffusion"}, "dit3", {}, {}))
    refused(denoiser, "denoiser.safetensors holds a diffusion model", CatalogueError)
    refused("vittt_tiny", "nearest: .*vittt_tiny_patch16_224", CatalogueError)
    refused(tmp_path / "gone.safetensors", "gone", FileNotFoundError)


def test_visitors_open_no_other_file_and_read_no_folder(classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret" / "run" / "best.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(classifier.read_bytes())
    catalogue = Catalogue([str(path)])
    with pytest.raises(CatalogueError, match="is not offered"):
        catalogue.load(str(classifier))
    path.write_bytes(classifier.read_bytes()[:-8])
    with pytest.raises(CatalogueError, match=r"^run/best cannot be loaded: the file ") as refused:
        catalogue.load("run/best")
    assert "secret" not in str(refused.value)
    path.write_bytes(classifier.read_bytes())
    assert catalogue.load("run/best").predictor is not None  # a later try may succeed


def test_stages_of_one_grid_are_told_apart() -> None:
    model = nano_h_vit3().eval()  # of its four stages the last two have a single token
    around, image = SimpleNamespace(model=model, around=model), torch.randn(1, 3, 16, 16)
    layers = _layers(around, image, None)
    maps = feature_maps(model, image)
    blocks = {(1, "1 of 1"), (2, "1 of 1"), (3, "1 of 2"), (3, "2 of 2"), (4, "1 of 1")}
    for index, (layer, (stage, block)) in enumerate(zip(layers, sorted(blocks), strict=True)):
        assert layer.title == f"stage {stage}, block {block}"
        assert_close(layer.norms, maps[stage - 1][0].norm(dim=0), 1e-6)
        wanted = gradient_magnitude(model, image, layers=[index])
        assert_close(layer.gradient, mean_map(wanted)[0], 1e-6)


def test_tokens_may_reach_beyond_a_picture() -> None:
    model = nano_h_vit3().eval()
    around = SimpleNamespace(model=model, around=model)
    layers = _layers(around, torch.zeros(1, 3, 28, 20), None)
    covered = {(*layer.norms.shape, *layer.step) for layer in layers}
    assert covered == {(7, 5, 4, 4), (4, 3, 8, 8), (2, 2, 16, 16), (1, 1, 32, 32)}


def test_checkpoints_of_one_stem_have_names_of_their_own() -> None:
    paths = [Path("runs/a.1"), Path("runs/a.2"), Path("runs/b.safetensors")]
    assert _short_names(paths) == ["runs/a.1", "runs/a.2", "runs/b"]
