"""`vision-ttt demo`: train on real images in minutes, and look at what was learnt."""

import jsonargparse

from vision_ttt.cli.plain_console import plain_console
from vision_ttt.cli.run_report import report
from vision_ttt.engine import train
from vision_ttt.engine.checkpoint import WEIGHTS_FILE


def run(arguments: jsonargparse.Namespace) -> int:
    """Train the recipe `digits`, evaluate, and write the report."""
    result = train(arguments.config, overwrite=True, progress=True)
    report(result, "vision-ttt demo: handwritten digits")
    plain_console().say(
        f"next: vision-ttt predict IMAGE --checkpoint {result.run_dir / WEIGHTS_FILE}"
    )
    return 0
