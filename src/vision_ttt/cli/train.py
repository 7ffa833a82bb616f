"""`vision-ttt train RECIPE [--field value …]`."""

import logging
import os
from collections.abc import Mapping

import jsonargparse

from vision_ttt.cli.run_report import is_reported, report
from vision_ttt.engine import NonFiniteError, Preempted, TrainConfig, train
from vision_ttt.engine.run_directory import Resume
from vision_ttt.errors import Interrupted

_LOGGER = logging.getLogger(__name__)
DIVERGED = 3
_UNDER_TORCHRUN = (
    " (torchrun itself ends with 1 after a signal, though its processes end with 0 and the"
    " checkpoint is whole)"
)


def run(arguments: jsonargparse.Namespace) -> int:
    """Train every stage of the recipe, and say where the results are."""
    given = arguments.as_dict()
    resume = {"false": False, "true": True, "auto": "auto"}[given.get("resume", "false")]
    overwrite = given.get("overwrite", False)
    try:
        _train_stages(arguments.stages, resume, overwrite)
    except Preempted as preemption:
        note = _UNDER_TORCHRUN if "TORCHELASTIC_RUN_ID" in os.environ else ""
        _LOGGER.info("%s%s", preemption, note)
        return 0
    except NonFiniteError as error:
        _LOGGER.error("error: %s", str(error))
        return DIVERGED
    return 0


def _train_stages(stages: Mapping[str, TrainConfig], resume: Resume, overwrite: bool) -> None:
    for number, (name, config) in enumerate(stages.items()):
        if len(stages) > 1:
            if resume and is_reported(config):
                _LOGGER.info("stage %s is finished: %s", name, config.run.output)
                continue
            _LOGGER.info("stage %s (%d of %d)", name, number + 1, len(stages))
            # Where the first stage is resumed, a later one may not have begun.
            resume = "auto" if resume and number else resume
        try:
            result = train(config, resume=resume, overwrite=overwrite, progress=True)
        except Interrupted as error:
            if len(stages) == 1:
                raise
            raise type(error)(
                f"{error}. To run the later stages as well, repeat the recipe's command with"
                " --resume auto"
            ) from None
        if result.is_main:
            report(result)
