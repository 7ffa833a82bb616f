"""How a backend is chosen: the call, the context manager, the environment, the op's preference."""

import ast
import os
import re
import subprocess
import sys

import pytest
import torch

from vision_ttt.ops import _backend, ttt_linear
from vision_ttt.ops._backend import requested, use_backend


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    monkeypatch.setattr(_backend, "_override", None)
    monkeypatch.setattr(_backend, "_outside", (None, ""))


def test_nobody_is_asked_for():
    assert requested(None)[0] is None


def test_a_request_goes_before_an_override():
    with use_backend("slow"):
        assert requested(None)[0] == "slow"
        assert requested("slower") == ("slower", "backend=")


def test_overrides_nest_and_end():
    with use_backend("slower"):
        with use_backend(None):
            assert requested(None)[0] is None
        assert requested(None)[0] == "slower"
        with pytest.raises(KeyError), use_backend("slow"):
            raise KeyError
        assert requested(None)[0] == "slower"
    assert requested(None)[0] is None


def test_blocks_that_overlap_end_each_for_itself():
    """As two threads would have them: A in, B in, A out, B out."""
    first, second = use_backend("slow"), use_backend("slower")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert requested(None)[0] == "slower"
    second.__exit__(None, None, None)
    assert requested(None)[0] is None


@pytest.mark.parametrize("source", ["backend=", "use_backend()"])
def test_an_explicit_backend_that_cannot_serve_raises(source):
    views = torch.randn(3, 1, 4, 2, 24).unbind()
    others = torch.rand(1, 4, 2), torch.randn(2, 24, 24), torch.zeros(2, 24)
    given = source == "backend="
    message = re.escape(f"ttt_linear: backend 'cpu' (from {source}) does not support this call")
    with use_backend("dual" if given else "cpu"), pytest.raises(ValueError, match=message):
        ttt_linear(*views, *others, backend="cpu" if given else None)


@pytest.fixture(scope="module")
def fresh_process():
    """A process with an override that imports the package, then calls an op."""
    code = "import sys, vision_ttt\nprint([m for m in sys.modules if m.startswith('vision_ttt')])\n"
    code += "import torch\nvision_ttt.ops.swiglu(torch.zeros(1, 6))"
    environment = os.environ | {"VISION_TTT_BACKEND": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_the_environment_variable_overrides(fresh_process):
    assert fresh_process.returncode == 1
    message = "backend 'cpu' (from the environment variable VISION_TTT_BACKEND) does not support"
    assert message in fresh_process.stderr


def test_triton_kernels_are_not_imported_before_they_are_needed(fresh_process):
    imported = [name for name in ast.literal_eval(fresh_process.stdout) if ".triton_" in name]
    assert imported
    assert all(name.endswith(".triton_backend") for name in imported)
