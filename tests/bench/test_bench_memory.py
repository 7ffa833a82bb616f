"""Peak memory against allocations of known size."""

import ctypes
import functools
import os
import signal

import pytest
import torch
from torch import nn

from vision_ttt.bench import memory

CPU = torch.device("cpu")
MIB = 2**20

linux = pytest.mark.skipif(not memory.can_measure(CPU), reason="needs Linux's record of the peak")


class _Widening(nn.Module):
    """x [N] → scalar through two intermediates of `mebibytes`, alive at once."""

    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.count = mebibytes * MIB // 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.new_ones(self.count)
        doubled = wide * 2
        return doubled.sum()


def _peak(call) -> float:
    call()
    return memory.peak_memory(lambda: call, CPU) / MIB


@linux
@pytest.mark.parametrize("mebibytes", [16, 64])
def test_intermediates_count_at_their_peak(mebibytes):
    model, x = _Widening(mebibytes), torch.zeros(1)
    with torch.no_grad():
        peaks = [_peak(lambda: model(x)) for _ in range(2)]
    for peak in peaks:  # the second is no smaller: what the first freed was handed back
        assert 2 * mebibytes <= peak + 1 < 2 * mebibytes + 9


@linux
def test_small_blocks_that_the_heap_kept_count_again():
    kept = []

    def call():
        blocks = [torch.ones(4096) for _ in range(2048)]
        kept.append(blocks[-1])  # so that the heap cannot shrink by itself

    assert _peak(call) > 31


@linux
def test_neither_inputs_nor_a_former_peak_count():
    def prepare():
        x = torch.ones(32 * MIB // 4)
        return x.sum

    prepare()()
    assert memory.peak_memory(prepare, CPU) < 8 * MIB


@linux
def test_memory_outside_the_tensor_allocator_counts():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def call():
        scratch = libc.malloc(48 * MIB)
        ctypes.memset(scratch, 1, 48 * MIB)
        libc.free(scratch)

    assert 48 <= _peak(call) + 1 < 56


@linux
def test_gradients_count():
    weights = torch.ones(32 * MIB // 4, requires_grad=True)

    def prepare():
        weights.grad = None
        return lambda: weights.sum().backward()

    prepare()()
    assert memory.peak_memory(prepare, CPU) > 31 * MIB


def _prepare_widening(mebibytes: int, kept: int):
    """A call with intermediates of 2 · `mebibytes` that keeps a buffer of `kept` from the first."""
    model, x, buffers = _Widening(mebibytes), torch.zeros(1), []

    def call():
        if not buffers:
            buffers.append(torch.ones(kept * MIB // 4))
        with torch.no_grad():
            return model(x)

    return lambda: call


@pytest.mark.slow
@linux
def test_fresh_processes_tell_the_median_peak_and_what_is_held():
    build = functools.partial(_prepare_widening, 16, 24)
    got, failure = memory.memory_in_processes(build, CPU, runs=2)
    assert failure == ""
    assert 32 <= got.peak / MIB + 1 < 41
    assert 24 <= got.held / MIB + 1 < 33
    assert memory.memory_in_processes(build, CPU, runs=0) == (memory.Memory(), "")


def _no_memory():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


@linux
@pytest.mark.parametrize("build", [_no_memory, _killed])
def test_a_process_that_gets_no_memory_ends_nothing(build):
    assert memory.memory_in_processes(build, CPU, runs=1) == (memory.Memory(), "out of memory")


def test_unknown_systems_measure_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "absent")
    assert not memory.can_measure(CPU)
    assert memory.peak_memory(lambda: pytest.fail, CPU) is None


@pytest.mark.gpu
def test_cuda():
    device = torch.device("cuda")
    model, x = _Widening(64), torch.zeros(1, device=device)
    peak = memory.peak_memory(lambda: lambda: model(x), device)
    assert 128 * MIB <= peak < 129 * MIB
