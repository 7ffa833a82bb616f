"""`vision-ttt demo`: train on real images in minutes, and look at what was learnt."""

import jsonargparse

from vision_ttt.cli.run_report import report
from vision_ttt.engine import train


def run(arguments: jsonargparse.Namespace) -> int:
    """Train the recipe `digits`, evaluate, and write the report."""
    report(train(arguments.config, overwrite=True, progress=True))
    return 0
