"""Measuring the op: its inputs and arithmetic, and the check that comes first."""

from functools import partial

import pytest
import torch

from vision_ttt.bench.correctness import find_error
from vision_ttt.bench.kernels import kernels_run
from vision_ttt.bench.machine import describe_run
from vision_ttt.bench.names import OPS
from vision_ttt.bench.op_contenders import op_contenders, refusal
from vision_ttt.bench.ops import measure_ops, steps_of_ops
from vision_ttt.bench.problems import Problem
from vision_ttt.bench.protocol import Settings
from vision_ttt.ops import _native
from vision_ttt.ops._table import TABLE

CPU = torch.device("cpu")
PROBLEM = Problem(batch=1, tokens=50, heads=4, dim=16, mini_batch_size=8)

BACKENDS = [
    "dual",
    pytest.param("cpu", marks=pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")),
    "reference",
]


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """How often freed memory is kept, which would hold for all tests of this process."""
    calls = []
    monkeypatch.setattr("vision_ttt.bench.ops.keep_freed_memory", lambda: calls.append(1))
    return calls


def test_multiply_adds_are_the_formula():
    # Vision-TTT, Eq. 13: 3 d² + 2 b d per token and head.
    full = PROBLEM._replace(tokens=48)
    assert full.macs(backward=False) == 48 * 4 * (3 * 16 * 16 + 2 * 8 * 16)
    assert full.macs(backward=True) > 3 * full.macs(backward=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_right_backends_pass_the_check(backend: str, op: str, dtype: torch.dtype):
    assert find_error(backend, PROBLEM._replace(op=op), dtype, CPU) is None


def test_the_check_draws_the_same_numbers_each_time(monkeypatch):
    """And leaves the random state as it was."""
    seen = []

    def note(*_):
        seen.append(torch.rand(()).item())

    monkeypatch.setattr("vision_ttt.bench.correctness._find_error", note)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    find_error("cpu", PROBLEM, torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    find_error("cpu", PROBLEM, torch.float32, CPU)
    assert seen[0] == seen[1]


def _changed(kernel, field: str, index: int):
    """A kernel that gets one result wrong by a thousandth."""
    function = getattr(kernel, field)

    def wrong(*args):
        results = list(function(*args))
        results[index] = results[index] * 1.001
        return tuple(results)

    return kernel._replace(**{field: wrong})


@pytest.mark.parametrize(
    ("field", "index", "told"),
    [
        ("forward", 0, "output o"),
        ("forward", 1, "final state w0"),
        ("backward", 3, "gradient of eta"),
        ("backward", 8, "gradient of position_scale"),
    ],
)
def test_a_wrong_result_is_named(field: str, index: int, told: str, monkeypatch):
    wrong = _changed(TABLE["ttt_linear"].backends["dual"], field, index)
    monkeypatch.setitem(TABLE["ttt_linear"].backends, "wrong", wrong)
    assert told in find_error("wrong", PROBLEM, torch.float32, CPU)


def test_not_a_number_is_an_error(monkeypatch):
    dual = TABLE["ttt_linear"].backends["dual"]
    nan = dual._replace(forward=lambda *args: tuple(x * float("nan") for x in dual.forward(*args)))
    monkeypatch.setitem(TABLE["ttt_linear"].backends, "nan", nan)
    assert "off by inf" in find_error("nan", PROBLEM, torch.float32, CPU)


def test_an_error_of_our_own_is_not_hidden(monkeypatch):
    def broken(*args):
        raise RuntimeError("a bug of ours")

    kernel = TABLE["ttt_linear"].backends["dual"]._replace(forward=broken)
    monkeypatch.setitem(TABLE["ttt_linear"].backends, "broken", kernel)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        find_error("broken", PROBLEM, torch.float32, CPU)


def test_rows_of_ops(kept):
    advanced = []
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    problems = [PROBLEM]
    run = describe_run(["vision-ttt", "bench"], CPU)
    measured = list(
        measure_ops(["dual", "reference"], problems, settings, run, advance=advanced.append)
    )
    assert kept
    assert len(advanced) == steps_of_ops(2, 1, repeats=1)
    for problem, rows in zip(problems, measured, strict=True):
        assert [(row.contender, row.measured) for row in rows] == [
            ("dual", "forward"),
            ("dual", "forward + backward"),
            ("reference", "forward"),
            ("reference", "forward + backward"),
        ]
        for row in rows:
            assert (row.tokens, row.dim, row.mini_batch_size) == (problem.tokens, 16, 8)
            assert row.macs == problem.macs(backward="backward" in row.measured)
            assert row.matmul_share > 0


def test_rows_of_another_op_say_so():
    problem = PROBLEM._replace(op="ttt_mlp", tokens=48)
    # 28 d² + 10 b d per token and head.
    assert problem.macs(backward=False) == 48 * 4 * (28 * 16 * 16 + 10 * 8 * 16)
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    run = describe_run(["vision-ttt", "bench"], CPU)
    (rows,) = measure_ops(["dual"], [problem], settings, run)
    assert {row.case for row in rows} == {"ttt_mlp"}
    assert rows[0].macs == problem.macs(backward=False)


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float32, "cpu"), (torch.float64, "dual")])
@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
def test_the_backend_that_runs_is_told(dtype: torch.dtype, backend: str):
    problem = PROBLEM._replace(op="ttt_mlp")
    call = partial(
        problem.function,
        **problem.inputs(dtype, CPU, requires_grad=False),
        **problem.options(None),
    )
    assert kernels_run(call) == [f"ttt_mlp by {backend}"]


def test_a_wrong_kernel_of_another_op_is_named(monkeypatch):
    wrong = _changed(TABLE["ttt_mlp"].backends["dual"], "forward", 3)
    monkeypatch.setitem(TABLE["ttt_mlp"].backends, "wrong", wrong)
    assert "final state w2" in find_error(
        "wrong", PROBLEM._replace(op="ttt_mlp"), torch.float32, CPU
    )


def test_the_shared_case_is_marked_and_representable():
    shared = PROBLEM._replace(shared=True)
    settings = Settings(CPU, dtype=torch.bfloat16, repeats=1, shortest_repeat=0)
    run = describe_run(["vision-ttt", "bench"], CPU)
    (rows,) = measure_ops(["dual"], [shared], settings, run)
    assert {row.case for row in rows} == {"all heads forwards, one learning rate"}
    assert PROBLEM.case == ""
    assert (PROBLEM.options("dual")["reverse_heads"], shared.options("dual")["reverse_heads"]) == (
        2,
        0,
    )
    inputs = shared.inputs(torch.bfloat16, CPU, requires_grad=False)
    assert inputs["eta"].unique().numel() == 1
    for name in ("eta", "ln_weight", "ln_bias", "position_scale"):
        assert inputs[name].dtype == torch.float32
        assert torch.equal(inputs[name], inputs[name].bfloat16().float()), name


def test_an_op_without_memory_is_a_row(monkeypatch):
    dual = TABLE["ttt_linear"].backends["dual"]

    def greedy(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setitem(TABLE["ttt_linear"].backends, "greedy", dual._replace(backward=greedy))
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    run = describe_run(["vision-ttt", "bench"], CPU)
    problems = [PROBLEM, PROBLEM._replace(tokens=60)]
    rows, longer = measure_ops(["greedy", "dual"], problems, settings, run)
    assert [row.failure for row in rows] == ["", "out of memory", "", ""]
    assert [row.failure for row in longer] == ["", "out of memory at 50 tokens", "", ""]
    assert [row.seconds is None for row in rows] == [False, True, False, False]
    assert rows[1].peak_bytes is rows[1].matmul_share is None


def test_who_takes_part_unless_named():
    for op in ("ttt_linear", "ttt_mlp", "selective_scan"):
        assert op_contenders(op) == ["cpu", "triton", "dual"]


def test_refusals():
    assert refusal("dual", PROBLEM, torch.float16, CPU) is None
    assert "float16" in refusal("cpu", PROBLEM, torch.float16, CPU)
    assert refusal("reference", PROBLEM, torch.float16, CPU) is None


def test_rows_of_the_scan():
    """Half of the channels backwards, with B and C of their own, or all forwards."""
    problem = PROBLEM._replace(op="selective_scan")
    assert problem.inputs(torch.float32, CPU, requires_grad=False)["B"].shape == (1, 50, 2, 8)
    assert problem.macs(backward=False) == 50 * 64 * 7 * 8 // 2
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    run = describe_run(["vision-ttt", "bench"], CPU)
    (rows,) = measure_ops(["dual"], [problem], settings, run)
    assert {row.case for row in rows} == {"selective_scan"}
    shared = problem._replace(shared=True)
    assert shared.case == "selective_scan, all channels forwards"
    assert shared.inputs(torch.float32, CPU, requires_grad=False)["B"].shape == (1, 50, 8)
    assert shared.options("dual")["reverse_channels"] == 0
