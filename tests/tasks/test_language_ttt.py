"""What the task language shows of a TTT model: its inner losses; and training its inner models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vision_ttt.acceleration.composite_linear import CompositeLinear
from vision_ttt.cli.main import main
from vision_ttt.engine import train
from vision_ttt.engine.optimisation import make_optimizer
from vision_ttt.explain import inner_loss_course, trace_layers
from vision_ttt.layers import InnerLearner
from vision_ttt.ops import ttt_linear
from vision_ttt.recipes import load, resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.language import LanguageSection
from vision_ttt.tasks.language.models import build_language_model
from vision_ttt.tasks.language.packing import Packed, Sequences
from vision_ttt.tasks.language.report import inner_losses_along

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mini_batch_size": 8,
}


def _model(**arguments: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_language_model("ttt", {**SIZES, "vocab_size": 257, **arguments}).eval()


def test_inner_losses_are_those_of_the_state_before_the_token() -> None:
    model = _model()
    tokens = torch.randint(0, 257, (2, 20))
    traces = trace_layers(model, tokens)
    assert len(traces) == 2
    name, trace = next(iter(traces.items()))
    layer = model.get_submodule(name)
    given = []
    handle = layer.register_forward_pre_hook(lambda layer, inputs: given.append(inputs[0]))
    with torch.no_grad():
        model(tokens)
        handle.remove()
        problem = layer.inner_problem(given[0])
        head = {key: x[:, :8] for key, x in problem.items() if key in ("q", "k", "v", "eta")}
        _, state = ttt_linear(**{**problem, **head}, return_state=True)
        k, v = problem["k"][:, 8:16].transpose(1, 2), problem["v"][:, 8:16].transpose(1, 2)
        z = k @ state.w + state.b.unsqueeze(2)
        normal = torch.nn.functional.layer_norm(z, z.shape[-1:], eps=problem["eps"])
        weight, bias = (problem[x].unsqueeze(1) for x in ("ln_weight", "ln_bias"))
        loss = 0.5 * (k + normal * weight + bias - v).square().sum(-1).transpose(1, 2)
    torch.testing.assert_close(trace.loss[:, 8:16], loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trace.loss[:, :8], trace.initial_loss[:, :8])


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_inner_losses_along_are_of_both_inner_models(kind: str) -> None:
    model = _model(ttt_layer_type=kind)
    stream = torch.randint(0, 257, (101,)).numpy()
    sequences = Sequences(Packed(stream, 1, 99, ()), context=32, end=256)
    found = inner_losses_along(model, sequences)
    assert len(found) == 2
    for initial, current in found.values():
        assert initial.shape == current.shape == (4,)
        assert initial[0] == current[0]


def test_inner_states_do_not_decay() -> None:
    model = _model()
    config = resolve({"task": "language", "model": "ttt", "weight_decay": 0.1})
    optimizer = make_optimizer(model, config.optimisation)
    decaying = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    learners = [module for module in model.modules() if isinstance(module, InnerLearner)]
    assert learners
    assert not any(id(weight) in decaying for each in learners for weight in each.parameters())
    assert id(model.model.embed_tokens.weight) in decaying


def test_the_recipes_model_is_nano() -> None:
    config = load("text")
    task = config.task.open(config)
    with torch.device("meta"):
        model = task.build_model(config.model.name, task.model_arguments())
    assert sum(weight.numel() for weight in model.parameters()) == 1_305_708
    assert task.context == 2048


def test_a_run_trains_by_composite_ops_and_leaves_a_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.txt").write_text("so many tokens, so little time; " * 30)
    (tmp_path / "1.txt").write_text("and all of them are learnt; " * 30)
    seen, forward = set(), CompositeLinear.forward

    def spy(layer: CompositeLinear, x: torch.Tensor) -> torch.Tensor:
        seen.add(layer.training)
        return forward(layer, x)

    monkeypatch.setattr(CompositeLinear, "forward", spy)
    fields = {"dataset": str(tmp_path), "pattern": "*.txt", "context": 64, "test_share": 0.5}
    length = {"units": 256, "warmup": 0, "batch_size": 2, "output": str(tmp_path / "run")}
    trained = train(load("text", {**fields, **length, "arguments": SIZES}))
    assert True in seen
    model, _ = load_model(str(tmp_path / "run" / "last.safetensors"), task="language")
    for each in (trained.model, model):
        assert not any(isinstance(module, CompositeLinear) for module in each.modules())


def test_the_page_shows_inner_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("so many tokens, so little time; " * 12)
    fields = {
        "dataset": str(tmp_path),
        "pattern": "*.txt",
        "context": 64,
        "arguments": SIZES,
        "units": 512,
        "warmup": 0,
        "batch_size": 2,
        "evaluate_every": 2,
        "output": str(tmp_path / "run"),
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(load("text", fields).as_dict()))
    assert main(["train", str(recipe)]) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "inner_loss.png").exists()
    assert "What the inner learners have learnt" in (tmp_path / "run" / "report.html").read_text()
    capsys.readouterr()
    weights = str(tmp_path / "run" / "last.safetensors")
    assert main(["eval", weights, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert told["bits_per_byte"] == pytest.approx(metrics["test_bits_per_byte"], rel=1e-5)
    assert main(["generate", weights, "--prompt", "so ", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out.startswith("so ")
    explain = ["explain", "inner-loss", weights, "--output", str(tmp_path / "figures")]
    assert main([*explain, "--limit", "3", "--batch-size", "2"]) == 0
    model, metadata = load_model(weights, task="language")
    task = LanguageSection.reopen(metadata, {}, part="test", precision="float32", num_workers=0)
    tokens = torch.stack([task.test_set[index][0] for index in range(3)])
    found = np.load(tmp_path / "figures" / "inner-loss.npz", allow_pickle=False)
    for layer, course in inner_loss_course(model, tokens).items():
        for name, values in course._asdict().items():
            expected = torch.from_numpy(found[f"run/{layer}/{name}"])
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    assert main([*explain[:3], "sample:digit-1", *explain[3:], "--overwrite"]) == 2
    told = capsys.readouterr().err
    assert "run is a language model; only inner-loss explains it, without images" in told
