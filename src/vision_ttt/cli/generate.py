"""`vision-ttt generate CHECKPOINT --prompt TEXT`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import jsonargparse

from vision_ttt.cli.device import find_device
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.errors import UserError
from vision_ttt.extras import require
from vision_ttt.shown_text import shown
from vision_ttt.tasks import load_model


def run(arguments: jsonargparse.Namespace) -> int:
    """Write the prompt and what the model adds to it, token by token."""
    require("lm", "vision-ttt generate")
    from vision_ttt.tasks.language.generation import generate
    from vision_ttt.tasks.language.metadata import carried_tokenizer
    from vision_ttt.tasks.language.pretrained import load_pretrained
    from vision_ttt.tasks.language.tokenizers import open_tokenizer

    path, device = Path(arguments.checkpoint), find_device(arguments.device)
    if path.is_dir():
        if arguments.tokenizer is None and not any(path.glob("tokenizer*")):
            raise UserError(f"{path} holds no tokenizer; name one by --tokenizer, such as bytes")
        model, own = load_pretrained(path), partial(open_tokenizer, str(path))
    else:
        model, metadata = load_model(path, task="language")
        own = partial(carried_tokenizer, metadata)
    tokenizer = own() if arguments.tokenizer is None else open_tokenizer(arguments.tokenizer)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model"
            f" {model.config.vocab_size}; it is not the one that the model was trained with"
        )
    _write(arguments.prompt)
    generate(
        model.to(device),
        tokenizer,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        show=_write,
    )
    _write("\n")
    return 0


def _write(text: str) -> None:
    # A file gets the text itself; of a terminal, a model's control characters move no cursor.
    try:
        sys.stdout.write(shown(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        plain_console().on_broken_pipe()
