"""The sweeps of the TTT-layers paper: their rows, what a run of each keeps, their pictures."""

from pathlib import Path

import pytest
import torch

from studies.sweeps import SWEEPS
from studies.sweeps.one_run import Task, perform
from studies.sweeps.results import Result
from studies.sweeps.tables import markdown
from studies.sweeps.text_paper import METHODS, SIZES, states_after_batches
from vision_ttt.layers import TTTLinear
from vision_ttt.ops import ttt_linear
from vision_ttt.recipes import change
from vision_ttt.tasks.language.models import build_language_model, model_arguments

TINY = {
    "pattern": "*.txt",
    "context": 32,
    "batch_size": 2,
    "units": 128,
    "warmup": 0,
    "arguments": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
}


def _tiny_run(sweep: str, row: str, folder: Path) -> Result:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(4):
        (text / f"{number}.txt").write_text(f"so many tokens in document {number}; " * 9)
    found = SWEEPS[sweep]
    config = found.config(found.by_name[row], 0, folder)
    tiny = {**TINY, "dataset": str(text), "inner_warmup": 0}
    if config.model.name == "mamba":
        tiny["arguments"] = {**TINY["arguments"], "intermediate_size": None}
    return perform(Task(sweep, row, change(config, tiny), ("studies", "sweep"), found.examine))


@pytest.mark.parametrize(
    ("sweep", "rows"),
    [
        ("text-ablation", ["linear_attention", "ttt_equivalence"]),
        ("text-mini-batch", ["b1", "b4"]),
        ("text-flops", ["linear-m-s-512", "mamba-m-2048"]),
    ],
)
def test_runs_are_kept_and_drawn(sweep: str, rows: list[str], tmp_path: Path) -> None:
    found, results = SWEEPS[sweep], [_tiny_run(sweep, row, tmp_path) for row in rows]
    assert all(result.measured["perplexity"] > 1 for result in results)
    assert all(
        f"{result.measured['perplexity']:.3f}" in markdown(found, results) for result in results
    )
    axes = found.draw(found, results).axes
    assert sum(len(axis.lines) for axis in axes) >= len(rows)
    if sweep == "text-mini-batch":
        times = results[0].measured["milliseconds"]
        assert times["states"] > 0
        assert times["total"] > 0


def test_states_without_outputs_are_the_ops() -> None:
    torch.manual_seed(0)
    layer = TTTLinear(32, 2, mini_batch_size=4)
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(torch.randn_like(x) * 0.2)
        problem = layer.inner_problem(torch.randn(2, 22, 32))
        w, b = states_after_batches(problem)
        _, state = ttt_linear(**problem, return_state=True)
    torch.testing.assert_close(w, state.w, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b.squeeze(2), state.b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_contenders_of_a_size_are_of_like_size(method: str, tmp_path: Path) -> None:
    sweep, counts = SWEEPS["text-flops"], []
    for name in (f"{method}-l-2048", "linear-m-l-2048"):
        config = sweep.config(sweep.by_name[name], 0, tmp_path)
        arguments = model_arguments(
            config.model.name, config.model.arguments, vocab_size=257, end=256, context=2048
        )
        with torch.device("meta"):
            model = build_language_model(config.model.name, arguments)
        counts.append(sum(weight.numel() for weight in model.parameters()))
        assert config.optimisation.units == SIZES["l"][1]
    assert 0.85 < counts[0] / counts[1] < 1.3  # inner MLPs have 8 d² weights instead of d²
