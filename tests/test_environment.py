"""Environment variables with values that mean nothing: an error, and in a command one line."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vision_ttt import environment
from vision_ttt.engine.parallel import make_accelerator
from vision_ttt.environment import EnvironmentVariableError
from vision_ttt.ops import _backend, _native
from vision_ttt.ops._table import TABLE

MODELS = ("models", "vit3_nano*")
TRAIN = ("train", "digits", "--output", "/nowhere")


@pytest.mark.parametrize(
    ("variable", "value", "told", "command"),
    [
        ("VISION_TTT_CPU_ISA", "AVX2", "one of baseline, avx2, avx512, avx512bf16, amx", MODELS),
        ("VISION_TTT_BACKEND", "gpu", "one of cpu, triton, dual, reference", MODELS),
        ("RANK", "first", "a whole number", TRAIN),
    ],
)
def test_a_command_says_what_is_accepted(variable, value, told, command):
    done = subprocess.run(
        [sys.executable, "-m", "vision_ttt", *command],
        env={**os.environ, variable: value, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = f"error: the environment variable {variable} must be {told}, got {value!r}"
    assert (done.returncode, done.stderr.strip()) == (2, told)


def test_what_is_unset_or_empty(monkeypatch):
    for value in (None, ""):
        monkeypatch.delenv("VISION_TTT_X", raising=False)
        if value is not None:
            monkeypatch.setenv("VISION_TTT_X", value)
        assert environment.one_of("VISION_TTT_X", ("a", "b")) is None
        assert environment.whole_number("VISION_TTT_X", 3) == 3


def test_the_number_of_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(EnvironmentVariableError, match="WORLD_SIZE must be a whole number, got 't"):
        make_accelerator()


def test_the_backends_that_are_accepted_are_those_of_the_ops():
    assert set(_backend.BACKENDS) == {
        *_backend.PYTORCH,
        *(name for op in TABLE.values() for name in op.backends),
    }


@pytest.mark.parametrize("asked", [*_native.INSTRUCTION_SETS, "AVX2", " avx2"])
def test_the_instruction_set_that_is_asked_for(asked, monkeypatch, recwarn):
    """On a machine with AVX2."""
    most = _native.INSTRUCTION_SETS.index("avx2")
    limit = _native.INSTRUCTION_SETS.index(asked) if asked in _native.INSTRUCTION_SETS else most
    used = _native.INSTRUCTION_SETS[min(limit, most)]

    class Function(SimpleNamespace):
        def __call__(self):
            return used.encode()

    names = ("instruction_set", "chunk_tokens", "sizeof")
    library = SimpleNamespace(**{f"vision_ttt_{name}": Function() for name in names})
    monkeypatch.setattr(_native.ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(_native.Path, "exists", lambda path: True)
    monkeypatch.setenv("VISION_TTT_CPU_ISA", asked)
    if asked not in _native.INSTRUCTION_SETS:
        with pytest.raises(EnvironmentVariableError, match=f"avx512bf16, amx, got '{asked}'"):
            _native._load()
        return
    assert _native._load() is library
    told = f"VISION_TTT_CPU_ISA is {asked}, which this machine lacks: the kernels for avx2 run"
    assert [str(warning.message) for warning in recwarn] == ([told] if limit > most else [])
