"""Run a recipe to its end through a series of kill -9: `python killed_run.py RECIPE KILLS`.

KILLS is a JSON list. A number n stands for death at the n-th moment of one attempt at which a file
is synced, renamed or its folder synced; [n, "half"] for the same with half of the file written; a
text "0.03" for death so many seconds after the attempt's first checkpoint, whatever it then does.
Each attempt resumes what the one before left; the last one is not killed. Prints how many attempts
died, as JSON.

The attempts are forks of this process, which imports everything once and computes nothing.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vision_ttt import recipes
from vision_ttt.engine import train
from vision_ttt.engine.run_directory import checkpoints


def die_at(moment: int, *, half: bool) -> None:
    """Let this process kill itself at the `moment`-th call of os.fsync or os.replace, from 0."""
    moments = iter(range(10**9))

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(first: Any, *more: Any) -> Any:
            if next(moments) == moment:
                if half and call.__name__ == "fsync" and os.fstat(first).st_size > 0:
                    os.ftruncate(first, os.fstat(first).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(first, *more)

        return called

    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)


def alive(child: int) -> bool:
    """Whether a child runs, without taking note of its end."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def attempt(recipe: str, kill: int | list | str | None) -> int:
    """Fork, train in the child, and return the signal it died of, 0 for none."""
    child = os.fork()
    if child:
        if isinstance(kill, str):
            run_dir = Path(recipes.load(recipe).run.output)
            former = checkpoints(run_dir)[:1]
            while checkpoints(run_dir)[:1] == former and alive(child):
                time.sleep(0.002)
            time.sleep(float(kill))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return os.WTERMSIG(status)
        if os.WEXITSTATUS(status):
            sys.exit(f"the attempt with {kill} failed")
        return 0
    try:
        if isinstance(kill, int):
            die_at(kill, half=False)
        elif isinstance(kill, list):
            die_at(kill[0], half=True)
        train(recipes.load(recipe), resume="auto")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    assert threading.active_count() == 1, "a fork keeps one thread only"
    deaths = [attempt(sys.argv[1], kill) for kill in json.loads(sys.argv[2])]
    attempt(sys.argv[1], None)
    sys.stdout.write(json.dumps(sum(death == signal.SIGKILL for death in deaths)))
