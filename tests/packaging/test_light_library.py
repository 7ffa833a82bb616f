"""The library without the packages of the extra [train], and what the workbench says then.

Each script runs in a process of its own, whose Python does not find these packages.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from torch import nn

from vision_ttt import extras
from vision_ttt.cli.main import COMMANDS
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import TrainConfig
from vision_ttt.extras import MissingPackageError, require
from vision_ttt.tasks.dino.config import DinoSection
from vision_ttt.tasks.images.config import ImageData
from vision_ttt.tasks.segmentation.config import SegmentationSection

MODULES = {
    *("accelerate", "jsonargparse", "docstring_parser", "rich", "matplotlib", "tensorboard"),
    *("sklearn", "typeshed_client"),
}
"""What [train] alone brings. PyTorch and timm bring jinja2 and yaml, too."""

HIDE = textwrap.dedent(
    """
    import sys
    from importlib.machinery import PathFinder
    hidden = {hidden!r}
    class Finder:
        find_distributions = PathFinder.find_distributions
        def find_spec(name, path=None, target=None):
            top = name.partition(".")[0]
            return None if top in hidden else PathFinder.find_spec(name, path, target)
    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
    """
)

LIBRARY = """
import importlib, pkgutil, sys
import numpy as np
import timm, torch
import vision_ttt
assert "vision_ttt.bench" not in sys.modules
assert "transformers" not in sys.modules
for name in ("bench", "dense", "engine", "explain", "export", "tasks", "whole"):
    assert getattr(vision_ttt, name) is sys.modules[f"vision_ttt.{name}"]
from vision_ttt import convert, explain, export, acceleration, inner, layers, models, ops
assert "transformers" not in sys.modules

for package in (convert, export, acceleration, inner, layers, models, ops):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.rpartition(".")[2].startswith("triton"):
            importlib.import_module(module.name)
ours = {name: value for name, value in sys.modules.items() if name.startswith("vision_ttt.")}
for module in ours.values():
    assert not {"jinja2", "yaml"} & set(vars(module)), module

torch.manual_seed(0)
model = timm.create_model("vittt_nano_patch4_32", num_classes=3, depth=1).eval()
images = torch.randn(2, 3, 32, 32)
logits = model(images)
torch.testing.assert_close(vision_ttt.for_inference(model)(images), logits, atol=1e-4, rtol=1e-3)
logits.sum().backward()
q, k, v = torch.randn(3, 2, 20, 2, 16)
o = ops.ttt_linear(q, k, v, torch.rand(2, 20, 2), torch.zeros(2, 16, 16), torch.zeros(2, 16))
assert o.shape == (2, 20, 2, 16)
maps = explain.mean_map(explain.gradient_magnitude(model, images))
assert np.asarray(maps).shape[0] == 2
assert explain.inner_losses(model, images)

from pathlib import Path
from vision_ttt.engine import ModelMetadata
arguments = dict(num_classes=3, depth=1)
config = timm.data.resolve_model_data_config(model)
folder = Path(sys.argv[1])
carried = dict(classes=["a", "b", "c"], input=config)
described = ModelMetadata({"name": "classification"}, "vittt_nano_patch4_32", arguments, carried)
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.tasks import load_model
trained = timm.create_model("vittt_nano_patch4_32", **arguments)
save_weights(folder / "last.safetensors", trained.state_dict(), described)
load_model(folder / "last.safetensors")
(folder / "last.safetensors").unlink()
export.export_timm(model, described, folder / "timm")
shapes = export.InputShapes.of(model, config["input_size"])
export.export_program(model, described, folder / "model.pt2", shapes)
print(sorted(file.name for file in folder.iterdir() if file.suffix != '.py'))
"""

COMMAND = """
import contextlib, io, json, sys
from vision_ttt_command import main
seen = []
for argv in json.loads(sys.argv[1]):
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        code = main(argv)
    seen.append([argv, code, said.getvalue(), told.getvalue()])
print(json.dumps(seen))
"""

INTERFACE = """
import importlib, json
seen = []
for module, name in [("engine", "train"), ("data", ""), ("recipes", ""), ("diffusion", "")]:
    try:
        getattr(importlib.import_module(f"vision_ttt.{module}"), name)
    except ImportError as error:
        seen.append(f"{type(error).__name__}: {error}")
print(json.dumps(seen))
"""

Without = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def without(tmp_path: Path) -> Without:
    """Run Python where it finds none of some modules."""

    def run(modules: set[str], *argv: str) -> subprocess.CompletedProcess:
        (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=modules))
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, *argv],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def test_the_installed_extras_are_those_of_this_source() -> None:
    """A stale installation knows other extras: install anew."""
    names = {*MODULES, "jinja2", "yaml"} - {"typeshed_client"}
    own = {each.name for each in extras._requirements("train")}
    assert {extras._MODULES.get(name, name.replace("-", "_")) for name in own} == names


def test_the_library_runs(without: Without, tmp_path: Path) -> None:
    done = without(MODULES, "-c", LIBRARY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['model.pt2', 'timm']"


def test_every_command_says_what_to_install(without: Without) -> None:
    cases = [[], ["--help"], ["--version"], *([name] for name in COMMANDS)]
    cases += [["train", "digits"], ["train", "--help"], ["models", "--help"]]
    done = without(MODULES, "-c", COMMAND, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    for argv, code, said, told in json.loads(done.stdout):
        assert (code, said) == (2, ""), argv
        assert told.startswith("error: the command vision-ttt needs accelerate, "), argv
        assert told.endswith(": pip install 'vision-ttt[train]'\n"), argv
        assert told.count("\n") == 1, argv


def test_the_dense_demo_says_what_to_install(without: Without) -> None:
    done = without({"faster_coco_eval"}, "-c", COMMAND, json.dumps([["demo-dense"]]))
    told = "error: vision-ttt demo-dense needs faster-coco-eval: pip install 'vision-ttt[dense]'\n"
    assert json.loads(done.stdout) == [[["demo-dense"], 2, "", told]]


def test_the_module_says_what_to_install(without: Without) -> None:
    done = without({"rich"}, "-m", "vision_ttt", "train", "digits")
    message = "the command vision-ttt needs rich: pip install 'vision-ttt[train]'"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


def test_the_interface_says_what_to_install(without: Without) -> None:
    done = without({"accelerate", "sklearn", "diffusers"}, "-c", INTERFACE)
    assert done.returncode == 0, done.stderr
    needed = "needs accelerate, scikit-learn: pip install 'vision-ttt[train]'"
    assert json.loads(done.stdout) == [
        f"MissingPackageError: vision_ttt.engine.train {needed}",
        f"MissingPackageError: vision_ttt.data {needed}",
        f"MissingPackageError: vision_ttt.recipes {needed}",
        "MissingPackageError: diffusion needs diffusers: pip install 'vision-ttt[diffusion]'",
    ]


def test_an_extra_is_its_own_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "torch>=2",
        'absent_one[all]>=1; extra == "train"',
        "absent-two ; python_version > '3' and extra == 'train'",
        'json; extra == "train"',
        'absent-three; extra == "export"',
        'vision-ttt[train]; extra == "export"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    with pytest.raises(MissingPackageError, match=r"^It needs absent_one, absent-two: pip"):
        require("train", "It")
    with pytest.raises(MissingPackageError, match=r"^It needs absent-three: .*\[export\]'$"):
        require("export", "It")
    require("none such", "It")


def test_a_version_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        'rich>=999; extra == "train"',
        'pyyaml>=5; extra == "train"',
        "absent; python_version < '3' and extra == 'train'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    told = r"^It needs rich>=999 \(1[0-9.]+ is installed\): pip install"
    with pytest.raises(MissingPackageError, match=told):
        require("train", "It")
    monkeypatch.setattr(metadata, "version", {"rich": "999.1.dev0", "pyyaml": "6"}.__getitem__)
    require("train", "It")


def test_self_distillation_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ['lightly; extra == "ssl"'])
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    needed = r"needs lightly: pip install 'vision-ttt\[ssl\]'$"
    with pytest.raises(MissingPackageError, match=f"^the task dino {needed}"):
        DinoSection().open(TrainConfig(DinoSection(), ImageData()))
    metadata_of_run = ModelMetadata({"name": "dino"}, "vittt_nano_patch4_32", {}, {})
    with pytest.raises(MissingPackageError, match=f"^a backbone trained by .* {needed}"):
        DinoSection.rebuild(metadata_of_run)


def test_predicting_segments_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ['faster-coco-eval; extra == "dense"'])
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    metadata_of_run = ModelMetadata({"name": "segmentation"}, "vittt_nano_patch4_32", {}, {})
    needed = r"^segmentation needs faster-coco-eval: pip install 'vision-ttt\[dense\]'$"
    with pytest.raises(MissingPackageError, match=needed):
        SegmentationSection.predictor(nn.Identity(), metadata_of_run)


def test_without_metadata_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    require("train", "It")
