"""`python -m vision_ttt.run`: another's script as the main program, with our models."""

import json
import sys
from pathlib import Path

import pytest

import forked_python
from vision_ttt import run

SCRIPT = """\
import argparse, json, pickle, sys, timm
import beside  # from the script's own folder


class Kept:  # pickles by the name __main__.Kept
    pass


def annotated(x: int):
    return annotated.__annotations__


parser = argparse.ArgumentParser()
parser.add_argument("-m", "--model")
parser.add_argument("rest", nargs="*")
if __name__ == "__main__":
    arguments = parser.parse_args()
    print(json.dumps({
        "argv": sys.argv,
        "model": type(timm.create_model(arguments.model, depth=1)).__name__,
        "rest": arguments.rest,
        "file": __file__,
        "path": sys.path[0],
        "beside": beside.NAME,
        "pickled": type(pickle.loads(pickle.dumps(Kept()))) is sys.modules["__main__"].Kept,
        "annotation": str(annotated(1)["x"]),
    }))
    sys.exit(7)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_runs_as_by_python_itself(tmp_path: Path, as_module: bool) -> None:
    folder = tmp_path / "their scripts"
    folder.mkdir()
    script = folder / "validate.py"
    script.write_text(SCRIPT)
    (folder / "beside.py").write_text("NAME = __name__\n")
    target = ["-m", "validate"] if as_module else ["their scripts/validate.py"]
    arguments = ["-m", "vittt_nano_patch4_32", "--", "--help"]
    done = forked_python.run(
        ["-m", "vision_ttt.run", *target, *arguments],
        cwd=folder if as_module else tmp_path,
        timeout=120,
    )
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == {
        "argv": [str(script) if as_module else target[0], *arguments],
        "model": "Vittt",
        "rest": ["--help"],
        "file": str(script),
        "path": str(folder),
        "beside": "beside",
        "pickled": True,
        "annotation": "<class 'int'>",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script, or -m and a module, got ''"),
        (["-m"], "expected a script, or -m and a module, got ''"),
        (["--model", "x"], "expected a script, or -m and a module, got '--model'"),
        (["nowhere.py"], "can't open file 'nowhere.py': [Errno 2]"),
        (["."], "can't open file '.': [Errno 21]"),
    ],
)
def test_what_is_no_script_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m vision_ttt.run")
