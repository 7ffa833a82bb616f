"""`vision-ttt tokenize DATASET OUTPUT`."""

from __future__ import annotations

import logging
from pathlib import Path

import jsonargparse

from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.data.documents import find_documents
from vision_ttt.extras import require

_LOGGER = logging.getLogger(__name__)


def run(arguments: jsonargparse.Namespace) -> int:
    """Write the tokens of documents, and say how many there are."""
    require("lm", "vision-ttt tokenize")
    from vision_ttt.tasks.language.token_folder import write_token_folder
    from vision_ttt.tasks.language.tokenizers import open_tokenizer

    documents = find_documents(arguments.dataset, arguments.pattern)
    with progress_on(plain_console(stderr=True)) as progress:
        bar = progress.add_task("tokens: 0", total=len(documents.names))

        def between(done: int, tokens: int) -> None:
            progress.update(bar, completed=done, description=f"tokens: {tokens:,}")

        packed = write_token_folder(
            Path(arguments.output),
            documents,
            open_tokenizer(arguments.tokenizer),
            arguments.field,
            skip_bad=arguments.skip_bad,
            between=between,
        )
    for error in packed.damaged:
        _LOGGER.warning("skipped: %s", error)
    plain_console().say(
        f"{arguments.output}: {len(packed.tokens) - 1:,} tokens of {packed.documents:,} documents,"
        f" {packed.bytes:,} bytes"
    )
    return 0
