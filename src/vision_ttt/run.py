"""``python -m vision_ttt.run script.py …``: another's script, with this package's models.

As ``python script.py …``, except that vision_ttt was imported before: timm's registry then holds
its models, and PyTorch knows its ops. ``-m MODULE`` runs a module as ``python -m MODULE`` does.
Processes that the script itself spawns, rather than forks, begin without.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import types
from typing import NoReturn

import vision_ttt.models  # noqa: F401  (registers models and ops)

USAGE = "usage: python -m vision_ttt.run (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Run a script or a module as the main one; what it raises is raised here.

    Args:
        arguments: what stands behind ``python -m vision_ttt.run``.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE + "\n")
        return
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:] or [""]
    if not target or target.startswith("-"):
        _refuse(f"{USAGE}\nerror: expected a script, or -m and a module, got {target!r}")
    sys.argv[:] = [target, *rest]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        _run_script(target)


def _run_script(path: str) -> None:
    """Make a file the main module, as Python itself does."""
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        _refuse(f"python -m vision_ttt.run: can't open file {path!r}: {error}")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=os.path.abspath(path), __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module  # stays, for what still runs when the script has ended
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(message + "\n")
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
