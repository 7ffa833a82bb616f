"""Where the command `vision-ttt` starts, outside the package and without PyTorch.

Importing `vision_ttt` registers its models with timm, which takes seconds. That this module is
imported tells the package that the process is the command, which imports what it needs when it
needs it: help and refused arguments are there at once.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

USER_ERROR = 2  # exit code, as argparse has it
INTERRUPTED = 130  # exit code, 128 + SIGINT as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `vision-ttt`, see :func:`vision_ttt.cli.main.main`; Ctrl-C before the work ends it.

    Without the packages of the extra [train], one line on stderr says what to install.
    """
    # Elsewhere Ctrl-C is ignored on purpose (nohup) or handled by whoever called.
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, _end)
    from vision_ttt.extras import MissingPackageError, require

    try:
        require("train", "the command vision-ttt")
    except MissingPackageError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR
    from vision_ttt.cli.main import main as run

    def begin_work() -> None:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return run(argv, begin_work=begin_work)


def _end(_signal: int, _frame: FrameType | None) -> None:
    """End the process at once: nothing is written yet, and an import may swallow an exception."""
    sys.stderr.write("interrupted: nothing was written\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
