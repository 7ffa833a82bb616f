"""Rows of a model and of an op, to be changed."""

import dataclasses

from vision_ttt.bench.rows import Row, Run

RUN = Run(
    started="2026-01-02T03:04:05+00:00",
    command="vision-ttt bench models --models 'a, \"b\"'",
    commit="",
    processor="A Processor, 3 GHz",
    cores=2,
    instruction_set="avx2",
    threads=2,
    device_name="A Processor, 3 GHz",
    python="3.11.0",
    torch="2.15.0",
    timm="1.0.0",
    vision_ttt="0.1.0",
)
DEIT, VITTT = "deit_tiny_patch16_224", "vittt_tiny_patch16_224"
MODEL = Row(
    what="models",
    contender="deit (fused attention)",
    measured="inference",
    resolution=224,
    tokens=None,
    heads=None,
    dim=None,
    mini_batch_size=None,
    batch_size=4,
    device="cpu",
    dtype="float32",
    compiled=True,
    seconds=0.1,
    seconds_spread=0.002,
    repeats=5,
    macs=1_250_000_000,
    peak_bytes=3 * 2**20,
    matmul_macs_per_second=None,
    run=RUN,
)
OP = dataclasses.replace(
    MODEL,
    what="ops",
    contender="cpu",
    measured="forward",
    resolution=None,
    tokens=6400,
    heads=6,
    dim=64,
    mini_batch_size=16,
    batch_size=2,
    compiled=False,
    peak_bytes=None,
    macs=10**9,
    matmul_macs_per_second=2e10,
)


def timed(contender: str, seconds: float | None, failure: str = "", **changes: object) -> Row:
    """MODEL of another contender, time and failure."""
    changes = {"contender": contender, "seconds": seconds, "failure": failure, **changes}
    return dataclasses.replace(MODEL, **changes)
