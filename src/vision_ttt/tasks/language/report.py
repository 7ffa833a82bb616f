"""Pictures, tables and a sample of a language model's training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.task import Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.explain import trace_layers
from vision_ttt.explain.report import PageTable, Section, Text
from vision_ttt.tasks.figures import Curves, learning_curves, save
from vision_ttt.tasks.language.evaluation import LanguageEvaluation
from vision_ttt.tasks.language.figures import inner_loss_figure, loss_by_position
from vision_ttt.tasks.language.generation import generate
from vision_ttt.tasks.language.packing import Sequences

if TYPE_CHECKING:
    from vision_ttt.tasks.language.task import Language

_LOSS = Curves("Cross-entropy", "nats per token", {"train_loss": "training", "test_loss": "test"})
_TRACED = 8
"""Test sequences that the inner losses are the mean over."""
_NEXT = ("--prompt", "class ")
_PROMPT, _NEW_TOKENS, _TEMPERATURE = "def ", 400, 0.8


def write_report(task: Language, result: TrainResult) -> Report:
    """Write curves.png, loss_by_position.png and inner_loss.png; return the page's parts.

    Inner losses are of models with TTT layers only; others get the rest.
    """
    metrics, evaluation = result.metrics, result.evaluation
    sections = {
        "curves": Section(
            "Training",
            "Loss on the training tokens since the evaluation before, and on all test tokens.",
            learning_curves(metrics["history"], [_LOSS], against="update"),
        ),
        "loss_by_position": Section(
            "Does more context help?",
            "Mean loss of the test tokens at each position of their sequences, in bands. A model"
            " that uses its context predicts later tokens better (TTT, Fig. 2). A sequence begins"
            " anywhere in a document, and may hold several.",
            loss_by_position(evaluation.by_band()),
        ),
    }
    losses = inner_losses_along(result.model, task.test_set)
    if losses:
        sections["inner_loss"] = Section(
            "What the inner learners have learnt along the sequence",
            f"Inner loss per token, mean over heads and {_TRACED} test sequences at most: of the"
            " initial state W₀, and of the state before the token's mini-batch, which has learnt"
            " from the tokens before (TTT, Figs. 5 and 17).",
            inner_loss_figure(losses, mini_batch_size_of(result.model, next(iter(losses)))),
        )
    # Of other corpora nothing is known that a text could begin with.
    of_python = task.config.data.dataset == "stdlib"
    prompt = _PROMPT if of_python else ""
    # A table of positions ends with the context, of which a document's begin is a token, too.
    room = task.context - len(task.tokenizer.encode(prompt)) - 1
    sample = generate(
        result.model,
        task.tokenizer,
        prompt,
        max_new_tokens=min(_NEW_TOKENS, max(room, 1)),
        temperature=_TEMPERATURE,
        seed=metrics["seed"],
    )
    measured = {
        "test bits per byte": f"{metrics['test_bits_per_byte']:.4f}",
        "best test bits per byte": f"{metrics['best_test_bits_per_byte']:.4f}",
        "test loss": f"{metrics['test_loss']:.4f} nats per token",
        "test perplexity": f"{metrics['test_perplexity']:.3f} per token",
    }
    place = f"after {prompt!r}" if prompt else "at the beginning of a document"
    text = Text(
        "A sample",
        f"What the model writes {place} at temperature {_TEMPERATURE:g}; the first one, not"
        " selected.",
        f"{prompt}{sample}",
    )
    return Report(
        save(sections, result.run_dir),
        measured,
        {},
        ("generate", str(result.run_dir / WEIGHTS_FILE), *(_NEXT if of_python else ())),
        [position_table(evaluation)],
        [text],
    )


def position_table(evaluation: LanguageEvaluation) -> PageTable:
    """Return the loss by octaves of positions as a table of the page."""
    return PageTable(
        "Loss by position",
        "Test tokens. A token at position t is predicted from the t tokens before it in its"
        " sequence; the first of these is the last token of the sequence before.",
        ("positions", "tokens", "nats per token", "perplexity"),
        [
            (
                f"{row['first']:,} to {row['last']:,}",
                f"{row['tokens']:,}",
                f"{row['loss']:.4f}",
                f"{row['perplexity']:.3f}",
            )
            for row in evaluation.by_octave()
        ],
    )


def mini_batch_size_of(model: nn.Module, layer: str) -> int:
    """Return the tokens of a mini-batch of a TTT layer."""
    return model.get_submodule(layer).learner.mini_batch_size


def inner_losses_along(model: nn.Module, sequences: Sequences) -> dict[str, tuple[Tensor, Tensor]]:
    """Return layer's name → inner loss at W₀ and before each mini-batch, [ceil(T / b)] each.

    Means over tokens, heads and some sequences; empty for models without TTT layers.
    """
    # The last sequence is filled up.
    count = min(_TRACED, max(sequences.sequences - 1, 1))
    device = next(model.parameters()).device
    tokens = torch.stack([sequences[index][0] for index in range(count)]).to(device)
    found = {}
    for name, trace in trace_layers(model, tokens).items():
        size = mini_batch_size_of(model, name)
        found[name] = tuple(
            torch.stack([part.float().mean() for part in loss.split(size, dim=1)]).cpu()
            for loss in (trace.initial_loss, trace.loss)
        )
    return found
