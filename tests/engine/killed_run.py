"""Run recipes to their end through series of kill -9, and of full disks.

    python killed_run.py PROCESSES RECIPE KILLS [RECIPE KILLS ...]

A run has as many processes as PROCESSES says, which train together through gloo if there are
several. KILLS is a JSON list with one kill per attempt, which is one of

- a number n: process 0 dies at its n-th moment, from 0: a file is synced, a file or folder renamed,
  a folder synced, or an emptied folder removed;
- [n, "half"]: the same with half of the file that is synced;
- [n, "full"]: at its n-th moment the disk is full; then all processes have to end for that;
- [n, WHAT, p]: the same for process p, WHAT being "whole", "half" or "full";
- a text such as "0.03": all processes die so many seconds after the attempt's first checkpoint.

When one process died, the others are killed too. Each attempt resumes what the one before left; the
last one is not killed. Prints for each recipe how many attempts ended early, as JSON.

The attempts are forks of this process, which imports everything once and computes nothing.
"""

import errno
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vision_ttt import recipes
from vision_ttt.engine import train
from vision_ttt.engine.run_directory import checkpoints

Kill = int | list | str | None
FULL = 28  # exit status


def fail_at(moment: int, what: str) -> None:
    """Let the `moment`-th such call of this process, from 0, kill it or find the disk full."""
    moments = iter(range(10**9))

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(first: Any, *more: Any, **options: Any) -> Any:
            if next(moments) == moment:
                if what == "full":
                    raise OSError(errno.ENOSPC, "No space left on device")
                is_file = call.__name__ == "fsync" and stat.S_ISREG(os.fstat(first).st_mode)
                if what == "half" and is_file:
                    os.ftruncate(first, os.fstat(first).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(first, *more, **options)

        return called

    os.fsync, os.replace, os.rmdir = map(deadly, (os.fsync, os.replace, os.rmdir))


def alive(child: int) -> bool:
    """Whether a child runs, without taking note of its end."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def start(recipe: str, kill: Kill, environment: dict[str, str]) -> int:
    """Fork a process that trains and maybe dies; return its id."""
    child = os.fork()
    if child:
        return child
    os.environ |= environment
    try:
        moment, what, process = [*(kill if isinstance(kill, list) else [kill, "whole"]), 0][:3]
        if isinstance(moment, int) and str(process) == environment.get("RANK", "0"):
            fail_at(moment, what)
        train(recipes.load(recipe), resume="auto")
    except OSError as error:
        os._exit(FULL if error.errno == errno.ENOSPC else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def environments(processes: int) -> list[dict[str, str]]:
    """Return what each of several processes has to know of the others, as torchrun sets it."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    return [{**common, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(processes)]


def attempt(processes: int, recipe: str, kill: Kill) -> bool:
    """Train in forks of this process; return whether they ended early."""
    children = [start(recipe, kill, each) for each in environments(processes)]
    if isinstance(kill, str):
        run_dir = Path(recipes.load(recipe).run.output)
        former = checkpoints(run_dir)[:1]
        while checkpoints(run_dir)[:1] == former and all(map(alive, children)):
            time.sleep(0.002)
        time.sleep(float(kill))
        for child in children:
            os.kill(child, signal.SIGKILL)
    ends = []
    left = list(children)
    while left:
        status = os.waitid(os.P_ALL, 0, os.WEXITED)
        left.remove(status.si_pid)
        ends.append(-status.si_status if status.si_code == os.CLD_KILLED else status.si_status)
        if ends[-1] not in (0, FULL):
            for child in left:
                os.kill(child, signal.SIGKILL)
    if ends[0] not in (0, FULL, -signal.SIGKILL) or (FULL in ends and set(ends) != {FULL}):
        sys.exit(f"the attempt with {kill} failed: {ends}")
    return ends[0] != 0


if __name__ == "__main__":
    assert threading.active_count() == 1, "a fork keeps one thread only"
    number = int(sys.argv[1])
    deaths = []
    for path, kills in zip(sys.argv[2::2], map(json.loads, sys.argv[3::2]), strict=True):
        deaths.append(sum(attempt(number, path, kill) for kill in kills))
        attempt(number, path, None)
    sys.stdout.write(json.dumps(deaths))
