"""Measuring on a GPU."""

from pathlib import Path

import pytest
import torch

from vision_ttt.bench.contenders import find_contenders
from vision_ttt.bench.machine import describe_run
from vision_ttt.bench.models import measure_models
from vision_ttt.bench.protocol import Settings, interleave
from vision_ttt.bench.rows import read_rows
from vision_ttt.cli.main import main

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DEIT, VITTT = "deit_tiny_patch16_224", "vittt_tiny_patch16_224"


def test_the_device_is_timed_and_not_the_host():
    def sleep(cycles: int):
        return lambda: lambda: torch.cuda._sleep(cycles)

    timings = interleave({"a": sleep(10**7), "b": sleep(4 * 10**7)}, Settings(CUDA, repeats=3))
    assert timings["b"].seconds / timings["a"].seconds == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("train", [False, True])
def test_rows_of_models(train: bool):
    run = describe_run(["vision-ttt", "bench"], CUDA)
    settings = Settings(CUDA, dtype=torch.bfloat16, batch_size=4, repeats=2)
    contenders = find_contenders([DEIT, VITTT])
    (rows,) = measure_models(contenders, [224], settings, run, train=train)
    fused, plain, vittt = rows
    assert "attention by" in fused.kernels
    assert plain.kernels == ""
    assert "ttt_linear by" in vittt.kernels
    for row in rows:
        assert row.seconds > 0
        assert 2**20 < row.peak_bytes < 2**32
        assert row.autocast == train
        assert (row.run.device_name, row.run.cuda) == (
            torch.cuda.get_device_name(),
            torch.version.cuda,
        )


def test_running_out_of_memory_ends_nothing():
    run = describe_run(["vision-ttt", "bench"], CUDA)
    # Plain attention of 64 images of 16,384 tokens takes 64 · 3 · 16,384² · 4 bytes, twice.
    settings = Settings(CUDA, batch_size=64, repeats=1)
    contenders = find_contenders([f"{DEIT} (plain attention)", VITTT])
    measured = list(measure_models(contenders, [2048, 224], settings, run, train=False))
    (plain, vittt), small = measured
    assert plain.failure == "out of memory"
    assert vittt.seconds > 0
    assert all(row.seconds > 0 for row in small)


def test_bench_ops(tmp_path: Path):
    output = tmp_path / "ops.csv"
    argv = ["bench", "ops", "--device", "cuda", "--dtype", "bfloat16", "--repeats", "2"]
    assert main([*argv, "--shape", "2", "1000", "4", "64", "--output", str(output)]) == 0
    rows = read_rows(output)
    assert {"dual"} <= {row.contender for row in rows}
    assert all(row.seconds > 0 and row.matmul_share > 0 for row in rows)
