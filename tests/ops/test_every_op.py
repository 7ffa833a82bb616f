"""What holds for every op and backend of the table: numbers, machinery of PyTorch, refusals.

With TRITON_INTERPRET=1 in the environment the tests of Triton's backends run, and no others.
"""

import functools
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hostile_calls import ARGUMENTS, PUBLIC, Sizes, backward_arguments, bare_results
from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import _native, _triton, use_backend
from vision_ttt.ops._op import Op
from vision_ttt.ops._table import TABLE

SIZES = {
    "small": Sizes(),
    "one token": Sizes(3, 1, 1, 1, 16, 16, 1, 1),
    "ragged, ungated": Sizes(1, 13, 11, 3, 32, 48, 5, 16, gated=False),
    "several chunks": Sizes(2, 10, 29, 2, 64, 64, 3, 16),
}
INTERPRETED = _triton.INTERPRETED
NO_GPU = not torch.cuda.is_available()


def device_of(backend: str) -> str:
    return "cuda" if backend == "triton" and not INTERPRETED else "cpu"


def backend_parameter(op: Op, backend: str, *marks: pytest.MarkDecorator):
    if backend == "triton":
        marks = (*marks, pytest.mark.interpreted if INTERPRETED else pytest.mark.gpu)
    return pytest.param(op, backend, id=f"{op.name} by {backend}", marks=marks)


def parameters(*slow: tuple[str, str]):
    """Every op by every backend, of which the `slow` (op, backend) are marked so."""
    return pytest.mark.parametrize(
        ("op", "backend"),
        [
            backend_parameter(op, backend, *[pytest.mark.slow] * ((op.name, backend) in slow))
            for op in TABLE.values()
            for backend in op.backends
        ],
    )


every_backend = parameters()
# The interpreter takes seconds for scans, and PyTorch's machinery is the same for every op.
_LEARNERS = ("ttt_linear", "ttt_mlp")
_SCANS = (*_LEARNERS, "selective_scan", "fused_mamba")
every_backend_in_pytorch = parameters(*[(name, "triton") for name in _SCANS if INTERPRETED])
every_op = pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in TABLE.items()])


def arguments_of(op: Op, backend: str = "cpu", sizes: Sizes = SIZES["small"]) -> list:
    torch.manual_seed(0)
    device = device_of(backend)
    return [x.to(device) if isinstance(x, Tensor) else x for x in ARGUMENTS[op.name](sizes)]


def changed(arguments: list, function) -> list:
    return [function(x) if isinstance(x, Tensor) else x for x in arguments]


def leaves(arguments: list, dtype: torch.dtype | None = None) -> list:
    return changed(arguments, lambda x: x.detach().to(dtype or x.dtype).requires_grad_())


def results_of(out) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def first_of(function):
    """A function's first result."""
    return lambda *arguments: results_of(function(*arguments))[0]


def solve(function, arguments: list) -> list[Tensor]:
    """The results, and the gradients of a fixed projection of them for every tensor argument."""
    results = results_of(function(*arguments))
    generator, loss = torch.Generator().manual_seed(1), 0
    for x in results:
        weights = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        loss = loss + (x.double() * weights.to(x.device)).sum()
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    return [x.detach() for x in results] + list(torch.autograd.grad(loss, tensors))


def by(op: Op, backend: str):
    """The op on arguments side by side, by this backend and no other."""

    def run(*arguments):
        with use_backend(backend):
            inputs = op.inputs(*arguments)
            assert op.choose(inputs) == backend
            return op(inputs)

    return run


def bare(op: Op, backend: str):
    """The custom op, which takes any strides."""

    def run(*arguments):
        with use_backend(None if op.backend_at_runtime else backend):
            extra = () if op.kept is None else (True, backend) if op.backend_at_runtime else (True,)
            return results_of(op.forward_op(*arguments, *extra))[: op.results]

    return run


def exactly(op: Op, arguments: list) -> list[Tensor]:
    """The same by the definition in float64."""
    return solve(lambda *a: op.definition(op.inputs(*a)), leaves(arguments, torch.float64))


@functools.cache
def exact_results(name: str, sizes: Sizes) -> list[Tensor]:
    """Results and gradients of an op's arguments of these sizes, in float64.

    For many tokens a learner's dual form stands in for the definition, to which it is equal to ten
    digits.
    """
    op = TABLE[name]
    arguments = arguments_of(op, sizes=sizes)
    if sizes is SIZES["several chunks"] and op.backend_at_runtime:
        return solve(by(op, "dual"), leaves(arguments, torch.float64))
    return exactly(op, arguments)


def compare(op: Op, got: list[Tensor], wanted: list[Tensor], dtype=torch.float32) -> None:
    for index, (x, exact) in enumerate(zip(got, wanted, strict=True)):
        table = FORWARD if index < op.results else GRADIENT
        if exact.abs().max() < 1e-12:  # of what is not used, as a convolution's taps on one token
            assert x.abs().max() < 1e-6, index
        else:
            assert_close(x, exact, table[dtype], f"{op.name} {index}")


def equal(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@every_backend
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(op, backend, sizes):
    many = [SIZES["several chunks"], *[SIZES["ragged, ungated"]] * (op.name in _LEARNERS)]
    if INTERPRETED and sizes in many:
        pytest.skip("takes minutes; the learners' kernels have tests of their own")
    got = solve(by(op, backend), leaves(arguments_of(op, backend, sizes)))
    compare(op, got, [x.to(device_of(backend)) for x in exact_results(op.name, sizes)])


@pytest.mark.parametrize(("op", "gated"), [(TABLE[n], g) for n in _LEARNERS for g in (True, False)])
def test_gradcheck_of_what_takes_float64(op, gated):
    """PyTorch's own finite differences, of the results and of the last state."""
    torch.manual_seed(0)
    sizes = Sizes(1, 1, 4, 2, 2, mini_batch=3, gated=gated)
    arguments = leaves(ARGUMENTS[op.name](sizes), torch.float64)
    given = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]

    def function(*tensors):
        placed = list(arguments)
        for i, x in zip(given, tensors, strict=True):
            placed[i] = x
        return by(op, "dual")(*placed)

    assert torch.autograd.gradcheck(function, tuple(arguments[i] for i in given))


@every_backend_in_pytorch
@pytest.mark.parametrize(
    "plain", [pytest.param(True, marks=[pytest.mark.slow] * INTERPRETED), False]
)
def test_opcheck(op, backend, plain):
    """The schema, the shapes without content, the gradient under tracing.

    Once more without optional tensors, of strides that must not be passed on, and where autocast
    casts, of the dtype that it casts to.
    """
    arguments = arguments_of(op, backend, SIZES["small"]._replace(gated=plain))
    if not plain:
        arguments = changed(arguments, turned)
        inputs = op.inputs(*arguments)
        given = {name: getattr(inputs, name) for name in op.autocast}
        inputs = inputs._replace(**{n: x.bfloat16() for n, x in given.items() if x is not None})
        if op.backends[backend].refusal(inputs) is None:
            arguments = list(inputs)
    extra = () if op.kept is None else (True, backend) if op.backend_at_runtime else (True,)
    with use_backend(None if op.backend_at_runtime else backend):
        torch.library.opcheck(op.forward_op, (*leaves(arguments), *extra))
        if op.backward_op is not None:
            further = backward_arguments(op, arguments)
            further = [*further[:-1], backend] if op.backend_at_runtime else further
            # Autograd would hide a wrong dtype: it casts gradients to their tensors'.
            kinds = ("test_schema", "test_faketensor")
            torch.library.opcheck(op.backward_op, further, test_utils=kinds)


def within_nan(x: Tensor) -> Tensor:
    """The same numbers as part of a larger tensor, with NaN all around."""
    room = torch.full([size + 4 for size in x.shape], float("nan"), dtype=x.dtype, device=x.device)
    return room[tuple(slice(2, -2) for _ in x.shape)].copy_(x)


def turned(x: Tensor) -> Tensor:
    """The same numbers, the last axis not contiguous."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def spread(x: Tensor) -> Tensor:
    """The same numbers, every second of rows twice as long."""
    return torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2]


@every_backend_in_pytorch
@pytest.mark.parametrize("how", [within_nan, turned, spread])
def test_strides(op, backend, how):
    """Results and gradients are the same numbers, and nothing is written to the arguments."""
    arguments = arguments_of(op, backend)
    wanted = solve(bare(op, backend), leaves(arguments))
    other = changed(arguments, how)
    got = solve(bare(op, backend), changed(other, lambda x: x.detach().requires_grad_()))
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 1e-6)
    assert all(
        torch.equal(a, b) for a, b in zip(other, arguments, strict=True) if torch.is_tensor(a)
    )


@every_backend_in_pytorch
def test_every_number_of_the_results_is_written(op, backend):
    """New tensors start as NaN: what a kernel forgets to write, or reads too early, shows."""
    arguments = leaves(arguments_of(op, backend, SIZES["ragged, ungated"]))
    wanted = solve(by(op, backend), arguments)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        got = solve(by(op, backend), arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 1e-6 if device_of(backend) == "cpu" else 1e-4)


BY_PYTORCH = {"swiglu_ttt"}
"""Ops whose products on a CPU are PyTorch's own, whose bits depend on the number of threads."""


@every_backend_in_pytorch
def test_the_same_bits_twice_and_whatever_the_threads(op, backend):
    arguments = leaves(
        arguments_of(op, backend, SIZES["several chunks" if not INTERPRETED else "small"])
    )
    wanted = solve(by(op, backend), arguments)
    before = torch.get_num_threads()
    try:
        ours = backend == "cpu" and op.name not in BY_PYTORCH
        for threads in (1, 2, 5) if ours else (before,):
            torch.set_num_threads(threads)
            assert equal(solve(by(op, backend), arguments), wanted)
    finally:
        torch.set_num_threads(before)


@every_backend_in_pytorch
def test_activation_checkpointing(op, backend):
    """Which computes what was saved anew, for whoever reads it first."""
    arguments = leaves(arguments_of(op, backend))
    run = by(op, backend)

    def again(*arguments):
        return checkpoint(run, *arguments, use_reentrant=False)

    pairs = zip(solve(again, arguments), solve(run, arguments), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs)


@every_op
def test_several_python_threads_at_once(op):
    arguments = leaves(arguments_of(op))
    function = functools.partial(solve, PUBLIC[op.name], arguments)
    wanted, results = function(), {}

    def work(index):
        for _ in range(3):
            results[index] = function()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(results[index], wanted) for index in range(4))


@pytest.fixture
def _nothing_compiled():
    """The ops' public functions share code, and PyTorch compiles one code a few times only."""
    torch._dynamo.reset()


# The compiler treats an op alike for all backends, which are an argument of it or run behind it.
@parameters(
    ("ttt_linear", "dual"),
    ("ttt_mlp", "dual"),
    *[(name, "triton") for name in TABLE if INTERPRETED and name != "swiglu"],
)
@pytest.mark.usefixtures("_nothing_compiled")
def test_compiles_as_one_graph_and_for_any_length(op, backend):
    function = PUBLIC[op.name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with use_backend(backend):
        for width in (5, 9):
            arguments = leaves(arguments_of(op, backend, SIZES["small"]._replace(width=width)))
            got, wanted = solve(compiled, arguments), solve(function, arguments)
            for a, b in zip(got, wanted, strict=True):
                assert_close(a, b, 1e-6)


@every_op
@pytest.mark.usefixtures("_nothing_compiled")
def test_what_a_kernel_refuses_compiles_too(op):
    arguments = leaves(arguments_of(op), torch.float64)
    compiled = torch.compile(PUBLIC[op.name], fullgraph=True, backend="eager")
    got, wanted = solve(compiled, arguments), solve(PUBLIC[op.name], arguments)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 1e-9)


@every_op
@pytest.mark.usefixtures("_nothing_compiled")
def test_the_definition_compiles_as_one_graph(op):
    sizes = Sizes(1, 2, 2, 1, 2, 2, mini_batch=4)
    if op.name == "fused_ttt_linear":
        sizes = sizes._replace(dim=16)
    arguments = arguments_of(op, sizes=sizes)
    # Not lowered: what is in question is the one graph; generated C++ for it takes half a minute.
    public = first_of(PUBLIC[op.name])
    compiled = torch.compile(public, fullgraph=True, backend="eager")
    with use_backend("reference"):
        assert_close(compiled(*arguments), public(*arguments), 1e-5)


@every_op
def test_who_serves_unasked(op):
    arguments = arguments_of(op)
    inputs = op.inputs(*arguments)
    assert op.choose(inputs) == ("auto" if op.backend_at_runtime else "cpu")
    assert op.choose(inputs, running=True) == "cpu"
    exact = op.inputs(*changed(arguments, Tensor.double))
    other = "dual" if "dual" in op.backends else "reference"
    assert op.choose(exact) == ("auto" if op.backend_at_runtime else other)
    assert op.choose(exact, running=True) == other


@every_backend_in_pytorch
def test_autocast(op, backend):
    """A learner's views are cast; state, norm and what is within the op are not, either way."""
    if not op.autocast:
        pytest.skip("left to PyTorch's operations")
    device = device_of(backend)
    arguments = leaves(arguments_of(op, backend))
    casts = {name: getattr(op.inputs(*arguments), name).detach() for name in op.autocast}
    casts = {name: x.bfloat16().requires_grad_() for name, x in casts.items()}
    rounded = list(op.inputs(*arguments)._replace(**casts))
    if op.backends[backend].refusal(op.inputs(*rounded)) is not None:
        pytest.skip("raises: it was asked for and does not take what autocast makes")
    wanted = solve(by(op, backend), rounded)

    def run(function):
        def under_autocast(*arguments):
            with torch.autocast(device, dtype=torch.bfloat16):
                return function(*arguments)

        return solve(under_autocast, arguments)

    for got in (run(by(op, backend)), run(bare(op, backend))):
        assert got[0].dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for x in got[1 : op.results])
        assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(got, wanted, strict=True))
    with torch.autocast(device, dtype=torch.bfloat16):  # its backward pass, too
        assert equal(solve(by(op, backend), rounded), wanted)


def test_the_instruction_set_that_is_asked_for_is_in_use():
    sets = _native.INSTRUCTION_SETS
    most = sets.index(os.environ.get("VISION_TTT_CPU_ISA") or sets[-1])
    assert _native.instruction_set() in sets[: most + 1]


@pytest.mark.skipif(sys.platform != "linux", reason="tile registers are asked for on Linux only")
def test_tile_registers_are_used_where_the_processor_has_them():
    flags = Path("/proc/cpuinfo").read_text().split()
    if "amx_bf16" not in flags or "VISION_TTT_CPU_ISA" in os.environ:
        pytest.skip("this machine has none, or another instruction set is asked for")
    assert _native.instruction_set() == "amx"


@pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in TABLE.items()])
@pytest.mark.parametrize(
    # All other tests run this machine's own.
    "isa",
    [isa for isa in _native.INSTRUCTION_SETS if isa != _native.instruction_set()],
)
def test_other_instruction_sets_compute_the_same(isa, op, load_kernels):
    if load_kernels(isa) != isa:
        pytest.skip(f"this machine has no {isa}")
    for sizes in SIZES.values():
        got = solve(by(op, "cpu"), leaves(arguments_of(op, sizes=sizes)))
        compare(op, got, exact_results(op.name, sizes))


@every_op
def test_a_storage_freed_between_both_passes(op):
    """As FSDP frees parameters'; the backward pass must not read what is left."""
    arguments = leaves(arguments_of(op))
    out = first_of(PUBLIC[op.name])(*arguments)
    arguments[0].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory: its storage has been freed"):
        out.sum().backward()


REFUSED = {  # op, backend: what is changed in its arguments' sizes, and the reason
    ("deformable_attention", "cpu"): ({"dim": 24}, "24 channels are no multiple of 16"),
    ("depthwise_conv2d", "cpu"): ({"channels": 24}, "24 channels are no multiple of 16"),
    ("depthwise_correlation", "cpu"): ({"channels": 24}, "24 channels are no multiple of 16"),
    ("directional_conv1d", "cpu"): ({"channels": 24}, "24 channels are no multiple of 16"),
    ("gated_norm", "cpu"): ({"channels": 24}, "24 channels are no multiple of 16"),
    ("linear", "cpu"): ({"channels": 24}, "24 channels are no multiple of 16"),
    ("selective_scan", "cpu"): ({"channels": 24}, "24 channels are no multiple of 16"),
    ("swiglu", "cpu"): ({"channels": 24}, "24 channels are no multiple of 16"),
    ("swiglu_mlp", "cpu"): ({"dim": 4}, "8 channels are no multiple of 16"),
    ("swiglu_ttt", "cpu"): ({"dim": 24}, "24 channels are no multiple of 16"),
    ("ttt_linear", "cpu"): ({"dim": 24}, r"head dimension 24 is not one of \(16, 32"),
    ("ttt_mlp", "cpu"): ({"mini_batch": 65}, "mini_batch_size 65 is over 64"),
}
ONLY = [op for op in TABLE.values() if op.composition is None]
"""Those that have no other ops to leave a call to."""


@pytest.mark.parametrize(
    ("op", "sizes", "reason"),
    [(TABLE[op], sizes, reason) for (op, _), (sizes, reason) in REFUSED.items()],
    ids=[op for op, _ in REFUSED],
)
def test_sizes_that_a_kernel_refuses(op, sizes, reason):
    arguments = arguments_of(op, sizes=SIZES["small"]._replace(**sizes))
    message = (
        rf"{op.name}: backend 'cpu' \(from use_backend\(\)\) does not support this call: {reason}"
    )
    with use_backend("cpu"), pytest.raises(ValueError, match=message):
        PUBLIC[op.name](*arguments)
    compare(op, solve(lambda *a: op(op.inputs(*a)), leaves(arguments)), exactly(op, arguments))


def test_there_is_such_a_case_for_every_kernel():
    assert {op for op, _ in REFUSED} == {op.name for op in ONLY}


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in ONLY])
def test_a_backend_that_is_asked_for_and_cannot_serve_raises(op, monkeypatch):
    """Whatever the reason; and unasked the definition or another backend serves."""
    arguments = arguments_of(op)
    exact = changed(arguments, torch.Tensor.double)
    public = first_of(PUBLIC[op.name])
    wanted = results_of(op.definition(op.inputs(*exact)))[0]

    def refuses(backend, reason, arguments):
        message = rf"{op.name}: backend '{backend}' .*does not support this call: {reason}"
        with use_backend(backend), pytest.raises(ValueError, match=message):
            public(*arguments)

    refuses("cpu", r"dtype torch.float64 is not", exact)
    assert_close(public(*exact), wanted, 1e-9)
    meta = changed(arguments, lambda x: x.to("meta"))
    refuses("cpu", "a tensor is on meta|tensors are on meta", meta)
    assert public(*meta).shape == wanted.shape
    if "triton" in op.backends:
        refuses("triton", "tensors are on cpu, and TRITON_INTERPRET=1 is not set", arguments)
        with monkeypatch.context() as patch:
            patch.setattr(_triton, "FOUND", False)
            refuses("triton", "Triton is not installed", arguments)
    with monkeypatch.context() as patch:
        patch.setattr(_native, "LIBRARY", None)
        _native.warn_if_missing.cache_clear()
        refuses("cpu", "the compiled kernels are missing", arguments)
        if op.backend_at_runtime:
            with pytest.warns(RuntimeWarning, match="compiled CPU kernels are missing"):
                got = public(*arguments)
        else:
            got = public(*arguments)
        assert_close(got, wanted, FORWARD[torch.float32])
    _native.warn_if_missing.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if not op.autocast:
            refuses("cpu", "autocast is on", arguments)
        assert_close(public(*arguments), wanted, 3e-2)


@every_op
def test_an_unknown_backend_is_named_with_those_that_there_are(op):
    arguments = arguments_of(op)
    message = r"unknown backend 'magic' \(from use_backend\(\)\); available: \['cpu', 'dual'"
    with use_backend("magic"), pytest.raises(ValueError, match=message):
        PUBLIC[op.name](*arguments)


@every_op
@pytest.mark.parametrize("backend", ["dual", "reference"])
def test_pytorch_s_operations_may_be_asked_of_every_op(op, backend):
    arguments = arguments_of(op)
    with use_backend(backend):
        got = solve(PUBLIC[op.name], leaves(arguments, torch.float64))
    wanted = exactly(op, arguments)
    compare(op, got[:1], wanted[:1], torch.float64)


@every_op
def test_transforms_and_forward_derivatives_are_the_definition_s(op):
    """A kernel has nothing for them to see: their derivative through it would be zero, silently."""
    arguments = arguments_of(op)
    first, *rest = arguments
    tangent = torch.randn_like(first)

    def of_first(function, rest):
        return lambda x: results_of(function(x, *rest))[0]

    _, got = torch.func.jvp(of_first(PUBLIC[op.name], rest), (first,), (tangent,))
    definition = of_first(lambda *a: op.definition(op.inputs(*a)), changed(rest, Tensor.double))
    _, wanted = torch.func.jvp(definition, (first.double(),), (tangent.double(),))
    assert_close(got, wanted, 1e-5)
    if op.composition is None:
        message = r"torch\.func transforms .* need the backend 'reference'"
        with use_backend("cpu"), pytest.raises(ValueError, match=message):
            torch.func.jvp(of_first(PUBLIC[op.name], rest), (first,), (tangent,))


@every_op
def test_a_program_runs_where_no_kernel_serves(op, monkeypatch):
    """Exported with kernels, run without: inference by PyTorch, and no wrong gradient."""
    arguments = arguments_of(op)
    wanted = bare_results(op, arguments)
    monkeypatch.setattr(_native, "LIBRARY", None)
    _native.warn_if_missing.cache_clear()
    if op.backend_at_runtime:
        with pytest.warns(RuntimeWarning, match="compiled CPU kernels"):
            got = bare_results(op, arguments)
    else:
        got = bare_results(op, arguments)
    _native.warn_if_missing.cache_clear()
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, FORWARD[torch.float32])
    if op.backward_op is None or "dual" in op.backends:
        return
    with pytest.raises(ValueError, match=r"no backend supports .*compiled kernels are missing"):
        op.backward_op(*_backward_of(op, arguments))


def _backward_of(op: Op, arguments: list) -> list:
    """Arguments of the backward op, by shapes: nothing here can compute what was kept."""
    fake = op.fake(op.inputs(*arguments), *(() if op.kept is None else (True,)))
    zeros = [torch.zeros_like(x) for x in results_of(fake)]
    grads, kept = zeros[: op.results], zeros[op.results :]
    return [*grads, *arguments[: op.tensors], *kept, *arguments[op.tensors :]]
