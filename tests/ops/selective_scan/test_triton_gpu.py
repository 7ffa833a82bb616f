"""The Triton backend of selective_scan on a GPU: values, PyTorch's machinery, size, memory."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import selective_scan
from vision_ttt.ops._table import TABLE

pytestmark = pytest.mark.gpu

OP = TABLE["selective_scan"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS = ("u", "delta", "B", "C", "z")


def make_problem(batch, length, channels, n=16, groups=0, dtype=torch.bfloat16):
    """Tensors by name; δ and A as Mamba initialises them."""
    torch.manual_seed(0)
    rows = (batch, length, groups, n) if groups else (batch, length, n)
    tokens = (batch, length, channels)
    shapes = {"u": tokens, "delta": tokens, "A": (channels, n), "B": rows, "C": rows}
    shapes |= {"D": (channels,), "z": tokens, "delta_bias": (channels,)}
    shapes |= {"initial_state": (batch, channels, n)}
    tensors = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    tensors["A"] = -torch.arange(1.0, n + 1, device="cuda").repeat(channels, 1)
    tensors["delta_bias"] -= 4
    return {
        name: x.to(dtype if name in TOKENS else x.dtype).requires_grad_()
        for name, x in tensors.items()
    }


def solve(tensors, reverse=0, backend="triton", function=selective_scan):
    """Both results, and the gradients of a fixed projection of them."""
    options = {"delta_softplus": True, "reverse_channels": reverse, "return_state": True}
    results = function(**tensors, **options, backend=backend)
    generator, loss = torch.Generator().manual_seed(1), 0
    for x in results:
        loss = loss + (x * torch.randn(x.shape, generator=generator).to(x)).sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()))
    return dict(zip(("y", "state", *tensors), (*results, *gradients), strict=True))


def as_float64(tensors):
    return {name: x.detach().double().requires_grad_() for name, x in tensors.items()}


def check(tensors, reverse=0):
    """Against the dual form in float64, which is the definition to ten digits."""
    got, wanted = solve(tensors, reverse), solve(as_float64(tensors), reverse, "dual")
    dtype = tensors["u"].dtype
    for name, value in wanted.items():
        table = GRADIENT if name in tensors else FORWARD
        assert_close(got[name], value, table[dtype], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "length", "channels", "n", "groups", "reverse"),
    [
        (1, 1, 1, 1, 0, 0),
        (3, 197, 384, 16, 0, 192),
        (2, 64, 70, 16, 0, 70),
        (1, 6400, 384, 16, 2, 192),
        (128, 196, 768, 16, 2, 384),
        (2, 130, 96, 5, 3, 32),
        (2, 300, 64, 64, 0, 32),
        (1, 200, 40, 256, 0, 8),
    ],
)
def test_values_and_all_gradients(dtype, batch, length, channels, n, groups, reverse):
    """One image, whose segments run side by side, and so many that none are."""
    check(make_problem(batch, length, channels, n, groups, dtype), reverse)


def test_it_is_what_serves_by_default(monkeypatch):
    runs = []
    kernel = OP.backends["triton"]
    counted = kernel._replace(forward=lambda *a: (runs.append(1), kernel.forward(*a))[1])
    monkeypatch.setitem(OP.backends, "triton", counted)
    solve(make_problem(1, 70, 32), backend=None)
    solve(as_float64(make_problem(1, 70, 32)), backend=None)  # dual's
    assert len(runs) == 1


@pytest.mark.parametrize("offset", [0, 1, 8, 384])
def test_views_of_one_projection_without_a_copy(offset):
    """Wherever they begin: the compiler must have been told what is aligned."""
    batch, length, channels = 16, 3136, 384
    given = {name: x.detach() for name, x in make_problem(batch, length, channels).items()}
    fused = torch.randn(batch, length, 2 * channels, device="cuda", dtype=torch.bfloat16)
    view = fused[..., offset : offset + channels]
    wanted = selective_scan(**given | {"u": view.contiguous()}, delta_softplus=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = selective_scan(**given | {"u": view}, delta_softplus=True)
    peak = torch.cuda.max_memory_allocated() - before
    assert torch.equal(y, wanted)
    assert peak <= 1.2 * y.numel() * y.element_size()


@pytest.mark.parametrize("backend", [None, "triton"])
def test_compiles_as_one_graph_and_for_any_length(backend):
    compiled = torch.compile(selective_scan, fullgraph=True, dynamic=True)
    for length in (83, 16, 197):
        tensors = make_problem(2, length, 64)
        wanted = solve(tensors, 32, backend)
        got = solve(tensors, 32, backend, compiled)
        for name, value in wanted.items():
            assert_close(got[name], value, 1e-2, name)


def test_cuda_graph_of_a_training_step():
    """Captured once, replayed on other numbers: the same as without a graph."""
    tensors = make_problem(2, 197, 64)
    weights = torch.randn_like(tensors["u"])

    def step():
        y = selective_scan(**tensors, delta_softplus=True, reverse_channels=32)
        return y, *torch.autograd.grad((y * weights).sum(), list(tensors.values()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles the kernels, which a capture cannot
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for name in TOKENS:
            tensors[name].copy_(torch.randn_like(tensors[name]))
    graph.replay()
    replayed = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


def test_gradients_are_equal_to_the_bit_twice():
    tensors = make_problem(8, 1600, 384)
    first, second = (solve(tensors, 192) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_memory_of_a_training_step_is_of_the_order_of_its_tensors():
    """One unit is u in bfloat16; the saved states take half of one for N = 16."""
    tensors = make_problem(8, 6400, 768)
    one = tensors["u"].numel() * 2

    def step():
        y = selective_scan(**tensors, delta_softplus=True, reverse_channels=384)
        kept = torch.cuda.memory_allocated()
        return kept, torch.autograd.grad(y, list(tensors.values()), torch.ones_like(y))

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept, _ = step()
    assert kept - before <= 1.7 * one  # y and the states
    # y, its gradient, the states, ∂u ∂δ ∂z, two units of shares of ∂B and ∂C, one of tiles' states
    assert torch.cuda.max_memory_allocated() - before <= 9 * one


def test_large_inputs_and_long_sequences_give_no_nan():
    tensors = make_problem(1, 100_000, 64)
    large = {
        n: (x.detach() * (100 if n in TOKENS else 1)).requires_grad_() for n, x in tensors.items()
    }
    results = solve(large, 32)
    assert not any(x.isnan().any() for x in results.values())


def test_offsets_beyond_32_bits():
    """B·T·D > 2³¹: the last image equals the same computed alone."""
    batch, length, channels = 44, 65_536, 768
    assert batch * length * channels > 2**31
    x = torch.randn(batch, length, channels, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(batch, length, 16, device="cuda", dtype=torch.bfloat16)
    a = -torch.arange(1.0, 17, device="cuda").repeat(channels, 1)
    for last in (x, x[-1:]):
        u = last.detach().requires_grad_()
        options = {"delta_softplus": True, "reverse_channels": 384}
        b = rows[-last.shape[0] :]
        y = selective_scan(u, last, a, b, b, **options, backend="triton")
        (du,) = torch.autograd.grad(y, u, last)
        if last is x:
            wanted = y[-1:].detach().clone(), du[-1:].clone()
        del u
    # Alone, the image has segments, hence other roundings.
    assert_close(y, wanted[0], 1e-2)
    assert_close(du, wanted[1], 2e-2)
