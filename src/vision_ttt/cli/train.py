"""`vision-ttt train RECIPE [--field value …]`."""

import logging
import os
from collections.abc import Mapping, Sequence

import jsonargparse

from vision_ttt import recipes
from vision_ttt.cli.main import CommandParser
from vision_ttt.cli.run_report import show_summary, write_run_report
from vision_ttt.data import LoaderError
from vision_ttt.engine import NonFiniteError, Preempted, TrainConfig, TrainResult, train
from vision_ttt.engine.config import FIELDS
from vision_ttt.engine.run_directory import Resume, is_finished
from vision_ttt.models import DiT3

_LOGGER = logging.getLogger(__name__)
DIVERGED = 3
MACHINE_FAILED = 4
_EXIT_CODES = """Exit codes: 0 finished, or ended by SIGTERM with a checkpoint to go on from; 1 an
error of vision-ttt itself; 2 something to mend in the command, the recipe, the data or the disk;
3 the loss or a gradient was not finite; 4 the processes that load images hang or died; 130 Ctrl-C,
with a checkpoint. After 0 by SIGTERM, 4 and 130 the same command with --resume auto goes on.
torchrun has exit codes of its own: 1 after every signal and every error."""
_UNDER_TORCHRUN = (
    " (torchrun itself ends with 1 after a signal, though its processes end with 0 and the"
    " checkpoint is whole)"
)


def add_arguments(parser: CommandParser) -> None:
    """Declare the recipe, the two ways to treat an existing run, and one flag per field."""
    parser.epilog = _EXIT_CODES
    parser.add_argument(
        "recipe",
        type=str,
        help=f"a packaged recipe ({', '.join(recipes.available())}), one with an ablation, such as"
        " digits+dual, or the path of a .yaml file",
    )
    parser.add_argument(
        "--resume",
        type=str,
        choices=("false", "true", "auto"),
        default="false",
        help="go on with the run in the output directory, from its newest whole checkpoint; auto:"
        " if there is one, else start",
    )
    parser.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="start anew though the output directory holds a run, which moves to former/ in it",
    )
    parser.add_class_arguments(TrainConfig)


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`, leaving out what was not given: the recipe comes before the defaults.

    A bare --resume means --resume true.
    """
    spelt = []
    for position, token in enumerate(argv):
        spelt.append(token)
        follower = argv[position + 1] if position + 1 < len(argv) else ""
        if token == "--resume" and follower not in ("false", "true", "auto"):
            spelt.append("true")
    return parser.parse_command(spelt, defaults=False)


def run(arguments: jsonargparse.Namespace) -> int:
    """Train every stage of the recipe, and say where the results are."""
    if int(os.environ.get("RANK", "0")):  # of several processes the first one speaks
        logging.getLogger("vision_ttt").setLevel(logging.WARNING)
    given = arguments.as_dict()
    overrides = {name: value for name, value in given.items() if name in FIELDS}
    resume = {"false": False, "true": True, "auto": "auto"}[given.get("resume", "false")]
    overwrite = given.get("overwrite", False)
    try:
        _train_stages(recipes.load_stages(arguments.recipe, overrides), resume, overwrite)
    except Preempted as preemption:
        told = _UNDER_TORCHRUN if "TORCHELASTIC_RUN_ID" in os.environ else ""
        _LOGGER.info("%s%s", preemption, told)
        return 0
    except NonFiniteError as error:
        _LOGGER.error("error: %s", str(error))
        return DIVERGED
    except LoaderError as error:
        _LOGGER.error("error: %s", str(error))
        return MACHINE_FAILED
    return 0


def _train_stages(stages: Mapping[str, TrainConfig], resume: Resume, overwrite: bool) -> None:
    for number, (name, config) in enumerate(stages.items()):
        if len(stages) > 1:
            if resume and is_finished(config):
                _LOGGER.info("stage %s is finished: %s", name, config.output)
                continue
            _LOGGER.info("stage %s (%d of %d)", name, number + 1, len(stages))
            # Where the first stage is resumed, a later one may not have begun.
            resume = "auto" if resume and number else resume
        result = train(config, resume=resume, overwrite=overwrite, progress=True)
        if result.is_main:
            _report(result)


def _report(result: TrainResult) -> None:
    if isinstance(result.model, DiT3):
        # Needs diffusers, which classifiers do without.
        from vision_ttt.cli.diffusion_report import show_diffusion_summary, write_diffusion_report

        show_diffusion_summary(result, write_diffusion_report(result))
    else:
        show_summary(result, write_run_report(result))
