"""Checkpoints of every task whose metadata somebody changed: one line in every command."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vision_ttt.cli.main import main
from vision_ttt.dense import build_detector, build_segmenter
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.engine.tensor_files import CheckpointError
from vision_ttt.tasks import load_model
from vision_ttt.tasks.dino.config import DinoSection
from vision_ttt.tasks.distill.model import build_student
from vision_ttt.tasks.images.models import data_config
from vision_ttt.tasks.language.models import build_language_model
from vision_ttt.tasks.masked_images.model import build_masked_image_model

NAME = "vittt_nano_patch4_32"
NANO = {"embed_dim": 32, "depth": 1, "num_heads": 1, "img_size": 16}
PLAIN = {"embed_dim": 48, "depth": 4, "num_heads": 3, "patch_size": 8, "img_size": 32}
DENSE = {"adapter": {"conv_width": 8, "heads": 3}, "channels": 16}
INPUT = {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}
LLAMA = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
CLASSES = ["dark", "light"]


def _classification() -> tuple[torch.nn.Module, ModelMetadata]:
    arguments = {"num_classes": 2, **NANO}
    model = build_model(NAME, arguments)
    carried = {"classes": CLASSES, "input": data_config(model, 16)}
    return model, ModelMetadata({"name": "classification"}, NAME, arguments, carried)


def _diffusion() -> tuple[torch.nn.Module, ModelMetadata]:
    arguments = {
        **{"num_classes": 2, "depth": 1, "hidden_size": 32, "num_heads": 2, "img_size": 16}
    }
    model = build_model("dit3_nano_patch4_32", arguments)
    process = {"objective": "noise", "schedule": "linear", "steps": 100}
    carried = {"classes": CLASSES, "input": data_config(model), "process": process}
    return model, ModelMetadata({"name": "diffusion"}, "dit3_nano_patch4_32", arguments, carried)


def _detection() -> tuple[torch.nn.Module, ModelMetadata]:
    arguments = {"num_classes": 2, "dense": {**DENSE, "box_features": 16}, **PLAIN}
    arguments["dense"]["mask_channels"] = [16]
    carried = {
        **{"classes": CLASSES, "category_ids": [3, 7], "input": INPUT, "ids_in_names": True},
        **{"shorter_side": 64, "longer_side": 96},
    }
    model = build_detector(NAME, **arguments)
    return model, ModelMetadata({"name": "detection"}, NAME, arguments, carried)


def _pretraining(
    task: dict[str, Any], build: Callable[..., torch.nn.Module], **own: Any
) -> tuple[torch.nn.Module, ModelMetadata]:
    arguments = {"num_classes": 2, **NANO}
    model = build(NAME, arguments)
    carried = {"classes": CLASSES, "input": data_config(model, 16), **own}
    return model, ModelMetadata(task, NAME, arguments, carried)


def _dino() -> tuple[torch.nn.Module, ModelMetadata]:
    from vision_ttt.tasks.dino.model import build_dino

    section = DinoSection(outputs=8, hidden_dim=8, bottleneck_dim=8)
    return _pretraining(asdict(section), partial(build_dino, section=section))


def _segmentation() -> tuple[torch.nn.Module, ModelMetadata]:
    arguments = {"num_classes": 2, "dense": {"maps": "tokens"}, **NANO}
    shown = {"longer_side": 96, "test_shorter_side": 64, "evaluation": "whole"}
    shown |= {"window": 64, "stride": 32, **INPUT}
    carried = {"classes": CLASSES, "palette": [[0, 0, 0], [255, 0, 0]], "input": shown}
    model = build_segmenter(NAME, **arguments)
    return model, ModelMetadata({"name": "segmentation"}, NAME, arguments, carried)


def _language() -> tuple[torch.nn.Module, ModelMetadata]:
    carried = {"tokenizer": "bytes", "vocab_size": 257, "context": 32}
    model = build_language_model("llama", LLAMA)
    return model, ModelMetadata({"name": "language"}, "llama", LLAMA, carried)


MAKERS = {
    "classification": _classification,
    "detection": _detection,
    "distill": partial(
        *(_pretraining, {"name": "distill", "teacher": "x"}),
        partial(build_student, match="tokens", widths=[8]),
        widths=[8],
    ),
    "diffusion": _diffusion,
    "language": _language,
    "masked-images": partial(_pretraining, {"name": "masked-images"}, build_masked_image_model),
    "segmentation": _segmentation,
    **({"dino": _dino} if find_spec("lightly") else {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TASK.safetensors of each task."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for name, make in MAKERS.items():
        model, metadata = make()
        save_weights(folder / f"{name}.safetensors", model.state_dict(), metadata)
    return folder


def _changed(folder: Path, task: str, place: str, value: Any, to: Path) -> Path:
    """Write a copy of a task's checkpoint whose metadata have another value at a.b.0."""
    source = folder / f"{task}.safetensors"
    with safe_open(source, "pt") as file:
        metadata = json.loads(file.metadata()["vision_ttt"])
    *way, last = [int(key) if key.isdecimal() else key for key in place.split(".")]
    owner = metadata
    for key in way:
        owner = owner[key]
    owner[last] = copy.deepcopy(value)
    save_file(load_file(source), to, {"vision_ttt": json.dumps(metadata)})
    return to


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


NAN = float("nan")
OF_CLASSES = ("classes", ["a"], "classes has 1 entries; 2 are needed")
OF_INPUT = ("input.std", [0, 1, 1], "std[0] is 0; it must be")
# One check serves all tasks: one of them is given every damage, the others show that they call it.
CASES = [
    ("classification", "epoch", "x", "epoch is 'x'; a whole number"),
    ("classification", "update", -1, "update is -1"),
    ("classification", "metrics", [], "metrics must be a mapping"),
    ("classification", "task.name", [1], "unknown task"),
    ("classification", "carried.x", _deep(100), "nested deeper than 64"),
    *(
        ("classification", f"carried.{place}", value, told)
        for place, value, told in (
            ("classes", [1, 2], "classes is [1, 2]; a list of texts"),
            ("classes", "ab", "a list of texts is needed"),
            ("input", None, "damaged"),
            ("input.mean", ["0", 0, 0], "mean is ['0', 0, 0]; a list of numbers"),
            ("input.mean", [NAN, 0, 0], "mean[0] is nan"),
            ("input.std", [1e-320, 1, 1], "std[0] is 1e-320"),
            ("input.std", [1], "std has 1 entries; 3 are needed"),
            ("input.interpolation", "x", "interpolation is 'x'; accepted are nearest, bilinear"),
            ("input.interpolation", None, "interpolation is None"),
            ("input.crop_mode", [], "crop_mode is []; accepted are center"),
            ("input.crop_pct", "1", "crop_pct is '1'; a number is needed"),
            ("input.crop_pct", 1e-9, "would be cut from ones of more than 100,000,000"),
            ("input.crop_pct", 0, "crop_pct is 0"),
            ("input.input_size", [3, 1e9, 16], "a list of whole numbers"),
            ("input.input_size", [3, "a", None], "a list of whole numbers"),
            ("input.input_size", [3, 10**9, 16], "input_size[1] is 1000000000"),
        )
    ),
    *(
        (task, f"carried.{place}", value, told)
        for task in sorted(MAKERS.keys() - {"language"})
        for place, value, told in (OF_CLASSES, OF_INPUT)
    ),
    ("diffusion", "carried.input.interpolation", "x", "interpolation is 'x'; accepted are nearest"),
    ("classification", "carried.input.input_size", [3, 12, 16], "cannot take images of 12 × 16"),
    ("classification", "model_args.depth", 900, "cannot be built"),
    ("classification", "model_args.embed_dim", 60_000, "cannot be built"),
    ("distill", "carried.widths", [8, 8], "1 features and the teacher 2"),
    ("distill", "carried.widths", ["8"], "widths is ['8']; a list of whole numbers"),
    ("distill", "carried.widths", None, "damaged"),
    *([("dino", "task.outputs", 10**9, "outputs is 1000000000")] if "dino" in MAKERS else []),
    ("masked-images", "task.mask_ratio", 2, "mask_ratio is 2"),
    ("detection", "carried.category_ids", ["a", "b"], "category_ids is ['a', 'b']"),
    ("detection", "carried.category_ids", [3], "category_ids has 1 entries; 2 are needed"),
    ("detection", "carried.category_ids", [3, 3], "category_ids has one twice"),
    ("detection", "carried.ids_in_names", 1, "ids_in_names is not true or false"),
    ("detection", "carried.shorter_side", 0, "shorter_side is 0"),
    ("detection", "carried.longer_side", 96.0, "longer_side is 96.0; a whole number"),
    ("detection", "model_args.dense.channels", 10**9, "channels is 1000000000; accepted"),
    ("detection", "model_args.dense.channels", 20_000, "it would have more than"),
    ("detection", "model_args.dense.mask_resolution", 10**5, "accepted: above 0, at most 256"),
    ("diffusion", "carried.process", {"steps": 10**9}, "noise_steps is 1000000000"),
    ("diffusion", "carried.process", {"objective": "x"}, "objective is 'x'"),
    ("language", "carried.context", 10**9, "context is 1000000000"),
    ("language", "carried.vocab_size", "257", "vocab_size is '257'"),
    ("language", "carried.tokenizer", 1, "tokenizer is not a name"),
    ("language", "model_args.num_hidden_layers", 10**6, "it would have more than"),
    ("language", "model_args.hidden_size", 10**30, "cannot be built"),
    ("segmentation", "carried.palette", [[0, 0, 0]], "palette does not have a colour for each"),
    ("segmentation", "carried.palette.1", [0, 0, 256], "palette[1][2] is 256"),
    ("segmentation", "carried.palette.1", [0, 0, 0.5], "a list of whole numbers"),
    ("segmentation", "carried.input.window", 10**9, "window is 1000000000"),
    ("segmentation", "carried.input.stride", 99, "stride is 99; it must be at most window"),
    ("segmentation", "carried.input.evaluation", "half", "evaluation is 'half'"),
]


@pytest.mark.parametrize(
    ("task", "place", "value", "told"), CASES, ids=lambda each: str(each)[:40].replace("\n", " ")
)
def test_metadata_is_checked_where_it_is_read(
    folder: Path, tmp_path: Path, task: str, place: str, value: Any, told: str
) -> None:
    path = _changed(folder, task, place, value, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(path, task=None)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_checkpoints_themselves_are_read(folder: Path) -> None:
    for task in MAKERS:
        assert load_model(folder / f"{task}.safetensors", task=task)[1].task["name"] == task


def test_every_command_tells_it_in_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(tmp_path / "a.png")
    Path(image).write_bytes(b"")
    commands = {
        "eval": ["PATH"],
        "predict": [image, "--checkpoint", "PATH"],
        "export": ["PATH", str(tmp_path / "o.pt2")],
        "explain": ["norms", "PATH", image, "--output", str(tmp_path / "o")],
        "sample": ["--checkpoint", "PATH", "--output", str(tmp_path / "o.png")],
        "generate": ["PATH", "--prompt", "a"],
    }
    path = str(tmp_path / "c.safetensors")
    text = "[" * 50_000 + "]" * 50_000  # too deep to be written by json
    weights = load_file(folder / "classification.safetensors")
    for metadata in (f'{{"format": 2, "carried": {text}}}', json.dumps({"format": 2}), "[]", "3"):
        save_file(weights, path, {"vision_ttt": metadata})
        for name, arguments in commands.items():
            assert main([name, *(each.replace("PATH", path) for each in arguments)]) == 2
            told = capsys.readouterr().err
            assert told.count("\n") == 1
            assert "damaged vision-ttt metadata" in told


@pytest.mark.parametrize("task", MAKERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_weights_of_another_kind_are_refused(
    folder: Path, tmp_path: Path, task: str, dtype: torch.dtype
) -> None:
    source, path = folder / f"{task}.safetensors", tmp_path / "c.safetensors"
    weights = load_file(source)
    name = next(name for name, x in weights.items() if x.is_floating_point())
    with safe_open(source, "pt") as file:
        metadata = file.metadata()["vision_ttt"]
    save_file({**weights, name: weights[name].to(dtype)}, path, {"vision_ttt": metadata})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, task=None)
    assert f"{name} {dtype} for torch.float32" in str(caught.value)
