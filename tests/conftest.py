"""The tests that a process runs, and fixtures of several folders: a small image folder, a tiny run.

Triton decides at its import whether kernels are interpreted. Tests of interpreted kernels, marked
`interpreted`, therefore run in a process of their own, with TRITON_INTERPRET=1 in its environment.
"""

import ctypes
import gc
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from forked_python import preparing

if sys.version_info < (3, 11):  # transformers 5.24, which the extra [lm] needs, does not support it
    collect_ignore_glob = [
        "language/*",
        "*/test_language*",
        "cli/test_cli_generate.py",
        "models/test_divided_models.py",
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from going through all modules and tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    if session.config.getoption("numprocesses", default=None):  # others run the tests
        return (yield)
    with preparing():
        return (yield)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind's modules complain if the interpreter does not free them at its end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests marked `interpreted` if Triton's interpreter is on, and else all others."""
    from vision_ttt.ops._triton import INTERPRETED as interpreter

    own, others = [], []
    for item in items:
        marked = item.get_closest_marker("interpreted") is not None
        (own if marked == interpreter else others).append(item)
    items[:] = own
    config.hook.pytest_deselected(items=others)


@pytest.fixture
def load_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Load the compiled kernels for an instruction set, and return the one that they then use.

    They read the environment at their first call only, so a copy of the library is loaded.
    """
    from vision_ttt.ops import _native
    from vision_ttt.ops.packed import (
        mamba_block,
        swiglu_ttt_block,
        vit3_block,
        vittt_blocks,
    )

    def load(isa: str) -> str:
        monkeypatch.setenv("VISION_TTT_CPU_ISA", isa)
        before = _native.LIBRARY
        copy = ctypes.CDLL(shutil.copy(before._name, tmp_path))
        for name, function in vars(before).items():
            if isinstance(function, before._FuncPtr):
                getattr(copy, name).restype = function.restype
        for name, module in list(sys.modules.items()):
            if name.startswith("vision_ttt.ops") and getattr(module, "LIBRARY", None) is before:
                monkeypatch.setattr(module, "LIBRARY", copy)
        forget_layouts()
        return _native.instruction_set()

    def forget_layouts() -> None:
        """Those of packed weights depend on the instruction set, and accepted calls on those."""
        for module in (mamba_block, swiglu_ttt_block, vit3_block, vittt_blocks):
            module.OP.contract._accepted.clear()
            module.BLOCK._describe.cache_clear()

    yield load
    forget_layouts()


def _write_images(folder: Path, count: int, level: int, seed: int) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for index in range(count):
        pixels = np.clip(generator.normal(level, 40, (24, 24, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """A folder with train/ (2 × 8 images) and val/ (2 × 4): class "dark" and class "light"."""
    root = tmp_path / "images"
    for seed, (split, count) in enumerate({"train": 8, "val": 4}.items()):
        _write_images(root / split / "dark", count, 60, 2 * seed)
        _write_images(root / split / "light", count, 190, 2 * seed + 1)
    return root


@pytest.fixture
def tiny_fields(image_folder: Path, tmp_path: Path) -> Callable[..., dict]:
    """Fields of a run of two epochs of four updates on `image_folder`, overridden at will."""
    arguments = {"depth": 1, "embed_dim": 32, "num_heads": 1}

    def fields(**overrides: object) -> dict:
        return {
            "task": "classification",
            "model": "vittt_nano_patch4_32",
            "arguments": arguments,
            "dataset": str(image_folder),
            "drop_path": 0.1,
            "epochs": 2,
            "batch_size": 4,
            "learning_rate": 1e-3,
            "warmup": 1,
            "output": str(tmp_path / "run"),
            **overrides,
        }

    return fields


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `vision-ttt train` draw no report, which takes seconds; tests of reports leave it."""
    monkeypatch.setattr("vision_ttt.cli.train.report", lambda result: None)
