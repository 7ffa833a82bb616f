"""The sweep text-contexts: equal size and tokens, and what a run of it keeps."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from studies.sweeps import SWEEPS
from studies.sweeps.definition import Sweep
from studies.sweeps.one_run import Task, perform
from studies.sweeps.position_figure import position_figure
from studies.sweeps.results import Result
from studies.sweeps.tables import markdown
from studies.sweeps.text_contexts import TOKENS_PER_UPDATE
from vision_ttt.errors import UserError
from vision_ttt.recipes import change
from vision_ttt.tasks.language.evaluation import token_losses
from vision_ttt.tasks.language.models import build_language_model, model_arguments
from vision_ttt.tasks.language.next_tokens import next_token_logits


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return SWEEPS["text-contexts"]


def test_models_are_of_equal_size_and_see_equal_tokens(sweep: Sweep, tmp_path: Path) -> None:
    sizes = {}
    for row in sweep.rows:
        config = sweep.config(row, 0, tmp_path)
        data, optimisation = config.data, config.optimisation
        assert optimisation.batch_size * data.context == TOKENS_PER_UPDATE
        assert optimisation.length == ("units", 2_000_000)
        arguments = model_arguments(
            config.model.name,
            config.model.arguments,
            vocab_size=257,
            end=256,
            context=data.context,
        )
        with torch.device("meta"):
            model = build_language_model(config.model.name, arguments)
        sizes[row.name] = sum(weight.numel() for weight in model.parameters())
    assert len(sizes) == 9
    assert max(sizes.values()) < 1.01 * min(sizes.values())


@pytest.mark.parametrize("name", ["ttt-512", "llama-512", "mamba-512"])
def test_every_model_makes_a_finite_step(sweep: Sweep, tmp_path: Path, name: str) -> None:
    config = sweep.config(sweep.by_name[name], 0, tmp_path)
    own = config.model.arguments
    arguments = model_arguments(config.model.name, own, vocab_size=257, end=256, context=512)
    torch.manual_seed(0)
    model = build_language_model(config.model.name, arguments)
    tokens = torch.randint(0, 257, (2, 40))
    loss = token_losses(next_token_logits(model, tokens), tokens.roll(-1, 1)).mean()
    assert abs(loss.item() - math.log(257)) < 1
    loss.backward()
    for key, weight in model.named_parameters():
        assert weight.grad is not None, key
        assert torch.isfinite(weight.grad).all(), key


def _tiny_run(sweep: Sweep, folder: Path, text: Path) -> Result:
    row = sweep.by_name["llama-512"]
    tiny = {
        "dataset": str(text),
        "pattern": "*.txt",
        "context": 32,
        "batch_size": 2,
        "units": 128,
        "warmup": 0,
        "evaluate_every": 1,
        "arguments": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    }
    config = change(sweep.config(row, 0, folder), tiny)
    return perform(Task(sweep.name, row.name, config, ("vision-ttt", "sweep"), sweep.examine))


def test_a_run_keeps_the_loss_by_position(sweep: Sweep, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("a text of few words; " * 20)
    result = _tiny_run(sweep, tmp_path / "runs", tmp_path)
    assert result.curve["update"] == [1, 2]
    assert result.test_images == 421
    assert result.macs > 32 * 16 * 257
    octaves = result.measured["octaves"]
    assert [(each["first"], each["last"]) for each in octaves] == [(1, 16), (17, 32)]
    page = markdown(sweep, [result])
    assert "| context 512 | row |" in page
    assert "421 test tokens, both without label smoothing" in page
    figure = position_figure(sweep, [result])
    (line,) = figure.axes[0].lines
    assert list(line.get_ydata()) == [each["loss"] for each in result.measured["bands"]]
    assert [axis.get_title() for axis in figure.axes][1:] == ["context 2048", "context 8192"]


def test_results_without_measures_have_no_picture(
    sweep: Sweep, make_result: Callable[..., Result]
) -> None:
    bare = make_result("ttt-512", 0, 1.0, 0.5, sweep=sweep.name)
    with pytest.raises(UserError, match="row 'ttt-512', seed 0, has no measures"):
        position_figure(sweep, [bare])
