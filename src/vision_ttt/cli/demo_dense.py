"""`vision-ttt demo-dense`: segmentation and detection, learnt on rendered scenes in minutes."""

from __future__ import annotations

import logging
from pathlib import Path

import jsonargparse

from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.cli.run_report import is_reported, report
from vision_ttt.data.scenes import SceneSettings, render_scenes
from vision_ttt.engine import Preempted, train
from vision_ttt.engine.locks import alone_in
from vision_ttt.errors import UserError

_LOGGER = logging.getLogger(__name__)


def run(arguments: jsonargparse.Namespace) -> int:
    """Render, and train what is not finished yet; each run has a report of its own."""
    output = Path(arguments.output)
    try:
        with alone_in(output, wait=False):
            render(output, scene_settings(arguments))
            for config in () if arguments.render_only else arguments.runs:
                if is_reported(config):
                    _LOGGER.info("finished before: %s", config.run.output)
                    continue
                _LOGGER.info("%s: %s", config.task.name, config.run.output)
                report(train(config, resume="auto", progress=True))
    except BlockingIOError:
        raise UserError(
            f"another demo is at work in {output}; wait for it, or choose another output"
        ) from None
    except Preempted as preemption:
        _LOGGER.info("%s", preemption)
    return 0


def scene_settings(arguments: jsonargparse.Namespace) -> SceneSettings:
    """Return the scenes that the command line asks for."""
    counts = ("train_images", "test_images", "train_objects", "test_objects")
    return SceneSettings(**{name: arguments[name] for name in counts})


def render(output: Path, settings: SceneSettings) -> None:
    """Render the scenes into OUTPUT/scenes, where they are not yet there."""
    folder, total = output / "scenes", settings.train_images + settings.test_images
    with progress_on(plain_console(stderr=True)) as progress:
        bar = progress.add_task("rendering scenes", total=total)
        render_scenes(folder, settings, lambda done: progress.update(bar, completed=done))
    _LOGGER.info("scenes in %s", folder)
