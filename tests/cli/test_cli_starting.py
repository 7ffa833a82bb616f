"""How the command starts: help and refusals without PyTorch, and Ctrl-C before the work begins."""

import json
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import vision_ttt
from vision_ttt.cli.arguments import bench, convert, explain
from vision_ttt.cli.main import COMMANDS

HEAVY = ("torch", "timm", "numpy", "matplotlib", "PIL")

WITHOUT_ARGUMENTS = ("app", "demo", "demo-dense", "models")
"""Commands that begin their work when nothing else is said; the page would wait for visitors."""

HELP = [
    *(["--help"], ["help"], []),
    *([name, "--help"] for name in COMMANDS),
    *(["help", name] for name in COMMANDS),
    *(["bench", kind, "--help"] for kind in bench.KINDS),
    ["help", "bench", "ops"],
    *(["explain", kind, "--help"] for kind in explain.KINDS),
]

REFUSED = [
    ["trian"],
    ["help", "trian"],
    *([name, "--no-such-flag"] for name in COMMANDS),
    *([name] for name in COMMANDS if name not in WITHOUT_ARGUMENTS),
    ["train", "digtis"],
    ["train", "digits", "--epochs", "many"],
    ["train", "digits", "--epochs", "0"],
    ["eval", "absent.safetensors"],
    ["eval", "absent.safetensors", "--split", "none"],
    ["predict", "a.png", "--checkpoint", "/dev/null"],
    ["predict", "a.png", "--checkpoint", "absent", "--topk", "0"],
    ["sample", "--checkpoint", "absent", "--steps", "0"],
    ["convert", "absent", "a.safetensors", "--model", "vit3_tiny_patch16_224"],
    ["export", "absent", "a.pt2"],
    ["explain", "heat"],
    ["explain", "norms", "absent.safetensors", "sample:china", "--output", "out"],
    ["explain", "norms", "vittt_nano_patch4_32", "--output", "out"],
    ["bench", "speed"],
    ["bench", "ops", "--threads", "0"],
    ["bench", "ops", "--op", "attention"],
    ["demo", "--epochs", "0"],
    ["demo-dense", "--seeds", "0"],
    ["demo-dense", "--models", "resnet"],
]

SCRIPT = textwrap.dedent(
    """
    import contextlib, io, json, sys
    from vision_ttt_command import main
    cases, heavy = json.loads(sys.argv[1])
    seen = []
    for argv in cases:
        said, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
            try:
                code = main(argv)
            except SystemExit as ended:
                code = ended.code
        imported = [name for name in heavy if name in sys.modules]
        seen.append([argv, code, said.getvalue(), told.getvalue(), imported])
    json.dump(seen, sys.stdout)
    """
)


@pytest.fixture(scope="module")
def seen() -> list:
    """Arguments, exit code, stdout, stderr and heavy imports of each case, in one process."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([[*HELP, *REFUSED], HEAVY])]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def test_neither_help_nor_refusals_import_pytorch(seen: list) -> None:
    assert [(argv, imported) for argv, *_, imported in seen if imported] == []
    assert len(seen) == len(HELP) + len(REFUSED)


def test_help_says_what_there_is(seen: list) -> None:
    for argv, code, said, told, _ in seen[: len(HELP)]:
        assert (code, told) == (0 if argv else 2, ""), argv
        assert "usage: vision-ttt" in said
        assert "lambda" not in said
    of = {tuple(argv): said for argv, _, said, *_ in seen}
    for name in COMMANDS:
        assert of["help", name] == of[name, "--help"]
        assert " ".join(of["help", name].split()).startswith(f"usage: vision-ttt {name} ")
    assert of["help", "bench", "ops"] == of["bench", "ops", "--help"]
    # The first letter of a summary is made large, and no other made small.
    assert "List the models with parameters and MACs." in of["models", "--help"]
    assert "torch.export or ONNX." in of["export", "--help"]


def test_flags_are_spelt_with_hyphens_everywhere(seen: list) -> None:
    for argv, _, said, told, _ in seen:
        flags = re.findall(r"(?<![\w-])--[\w-]+", f"{said} {told}")
        assert [flag for flag in flags if "_" in flag] == [], argv


def test_refusals_are_one_line(seen: list) -> None:
    for argv, code, said, told, _ in seen[len(HELP) :]:
        assert (code, said) == (2, ""), argv
        assert told.startswith("error: "), argv
        assert told.count("\n") == 1, argv


@pytest.mark.parametrize(
    "code",
    [
        # As while `python -m other.module` imports its package `other`, which imports ours.
        "import sys; sys.argv[0] = '-m'; import vision_ttt\n"
        "assert sys.modules['timm'].is_model('vittt_tiny_patch16_224')",
        "import vision_ttt as v\n"
        "print(v.recipes.load, v.whole.WholePictures, v.data.Digits, v.diffusion.sample)",
    ],
    ids=["models", "packages"],
)
def test_importing_the_package_is_enough(code: str) -> None:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_the_command_has_the_public_names_too() -> None:
    """As this process has, which imports the package and is not the command; at first no others."""
    code = textwrap.dedent(
        """
        import sys, vision_ttt_command, vision_ttt
        assert set(vision_ttt.__all__) <= set(dir(vision_ttt)), dir(vision_ttt)
        assert not hasattr(vision_ttt, "absent") and not {"torch", "timm"} & {*sys.modules}
        from vision_ttt import *
        assert dense is sys.modules["vision_ttt.dense"] and models.Vittt is Vittt
        print(*(f"{name}={globals()[name]!r:.20}" for name in vision_ttt.__all__), sep="\\n")
        """
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stderr == ""
    names = vision_ttt.__all__
    assert process.stdout.splitlines() == [f"{n}={getattr(vision_ttt, n)!r:.20}" for n in names]
    assert set(names) <= set(dir(vision_ttt))


def test_the_module_starts_as_the_script_does() -> None:
    """`python -m vision_ttt` imports the package first, and still not PyTorch."""
    command = [sys.executable, "-X", "importtime", "-m", "vision_ttt", "eval"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    modules = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "vision_ttt.cli.checks" in modules
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("waiting_for", ["vision_ttt.cli.main", "torch"])
def test_ctrl_c_while_importing_is_one_line(waiting_for: str) -> None:
    """The signal comes when a module begins to be imported, seconds before any work."""
    code = textwrap.dedent(
        f"""
        import signal, sys, time
        # Started in the background of a shell, Python ignores interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Tell:
            def find_spec(self, name, path=None, target=None):
                if name == {waiting_for!r}:
                    print("importing", flush=True)
                    time.sleep(30)
        sys.meta_path.insert(0, Tell())
        from vision_ttt_command import main
        sys.exit(main(["models"]))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.05)  # into the import
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told == "interrupted: nothing was written\n"


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from vision_ttt_command import main\n"
        "main(['--version'])\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_help_names_is_what_there_is() -> None:
    """Help may not import these, so it has lists of its own."""
    from vision_ttt.bench import names, problems
    from vision_ttt.convert import FAMILIES

    assert tuple(family.name for family in FAMILIES) == convert.RELEASES
    assert tuple(problems.FUNCTIONS) == names.OPS
