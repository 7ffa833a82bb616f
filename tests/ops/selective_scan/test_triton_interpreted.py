"""The Triton kernels of selective_scan, interpreted, against the definition in float64.

Most tests have chunks of 8 tokens, not 64, because the interpreter takes tens of milliseconds for
a token.
"""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import selective_scan
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.selective_scan import contract, triton_backend

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted

OP = TABLE["selective_scan"]
TRITON = OP.backends["triton"]
TOKENS = ("u", "delta", "z")
SHAPES = [  # B, T, D, N, groups (0: no such axis), reverse channels
    (1, 1, 1, 1, 0, 0),
    (2, 13, 6, 3, 0, 2),
    (1, 10, 4, 16, 2, 2),
    (1, 12, 70, 2, 0, 3),
    (1, 9, 4, 5, 1, 4),
    pytest.param(1, 11, 72, 16, 2, 36, marks=pytest.mark.slow),
    pytest.param(2, 30, 3, 130, 0, 1, marks=pytest.mark.slow),
    pytest.param(3, 27, 6, 4, 3, 4, marks=pytest.mark.slow),
]


@pytest.fixture
def _short_chunks(monkeypatch):
    set_chunk(monkeypatch, 8)


def set_chunk(monkeypatch, tokens):
    for module in (contract, triton_backend):
        monkeypatch.setattr(module, "CHUNK_TOKENS", tokens)


@pytest.fixture
def _segments(monkeypatch):
    """As on a GPU with room for many programs: every chunk has its own."""
    monkeypatch.setattr(triton_backend, "_processors", lambda x: 1000)


def surrounded(x):
    """A copy of x amid NaN: what is read beyond an edge shows."""
    room = torch.full([size + 4 for size in x.shape], float("nan"), dtype=x.dtype)
    return room[tuple(slice(2, -2) for _ in x.shape)].copy_(x)


def make_problem(batch, length, channels, n, groups, reverse, dtype=torch.float32, plain=False):
    """Arguments by name: tensors and options; without the optional ones if ``plain``."""
    torch.manual_seed(0)
    rows = (batch, length, groups, n) if groups else (batch, length, n)
    shapes = {
        "u": (batch, length, channels),
        "delta": (batch, length, channels),
        "A": (channels, n),
        "B": rows,
        "C": rows,
        "D": (channels,),
        "z": (batch, length, channels),
        "delta_bias": (channels,),
        "initial_state": (batch, channels, n),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["A"] = -4 * torch.rand(channels, n)
    if plain:
        tensors = {name: x for name, x in tensors.items() if name in ("u", "delta", "A", "B", "C")}
        tensors["delta"] = tensors["delta"].abs()
    like = (*TOKENS, "B", "C")
    tensors = {k: surrounded(x.to(dtype) if k in like else x) for k, x in tensors.items()}
    return tensors, {"delta_softplus": not plain, "reverse_channels": reverse}


def solve(tensors, options, backend="triton", function=selective_scan):
    """Both results, and the gradients of a fixed projection of them."""
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    results = function(**tensors, **options, return_state=True, backend=backend)
    generator, loss = torch.Generator().manual_seed(1), 0
    for x in results:
        weights = torch.randn(x.shape, generator=generator).bfloat16()  # exact in every dtype
        loss = loss + (x * weights.to(x.dtype)).sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()))
    return dict(zip(("y", "state", *tensors), (*results, *gradients), strict=True))


def check(tensors, options):
    """Against the definition in float64; the arguments stay as they are.

    A result in float32 is that exact whatever the tokens' dtype.
    """
    before = {name: x.clone() for name, x in tensors.items()}
    got = solve(tensors, options)
    exact = {name: x.double() for name, x in tensors.items()}
    wanted = solve(exact, options, "reference")
    dtype = tensors["u"].dtype
    for name, x in got.items():
        assert x.dtype == (tensors[name].dtype if name in tensors else x.dtype)
        gradient = 1e-5 if x.dtype == torch.float32 else GRADIENT[x.dtype]
        assert_close(x, wanted[name], gradient if name in tensors else FORWARD[x.dtype], name)
    assert got["y"].dtype == dtype
    assert got["state"].dtype == torch.float32
    assert all(torch.equal(x, tensors[name]) for name, x in before.items())


@pytest.mark.parametrize(("batch", "length", "channels", "n", "groups", "reverse"), SHAPES)
@pytest.mark.usefixtures("_short_chunks")
def test_values_and_all_gradients(batch, length, channels, n, groups, reverse):
    check(*make_problem(batch, length, channels, n, groups, reverse))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.usefixtures("_short_chunks", "_segments")
def test_segments_side_by_side(plain):
    """Three of them, the last one ragged."""
    check(*make_problem(1, 19, 3, 4, 0, 1, plain=plain))


@pytest.mark.usefixtures("_segments")
def test_more_segments_than_the_carry_takes_at_a_time(monkeypatch):
    set_chunk(monkeypatch, 4)
    check(*make_problem(1, 66, 1, 1, 0, 0))


def test_chunks_of_64_tokens():
    check(*make_problem(1, 66, 1, 2, 0, 1, plain=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("_short_chunks")
def test_half_precision(dtype):
    check(*make_problem(1, 13, 4, 4, 0, 2, dtype))


@pytest.mark.usefixtures("_short_chunks")
def test_parameters_have_dtypes_of_their_own():
    tensors, options = make_problem(1, 9, 4, 4, 0, 2, torch.bfloat16)
    tensors["A"], tensors["D"] = tensors["A"].half(), tensors["D"].bfloat16()
    check(tensors, options)


@pytest.mark.usefixtures("_short_chunks")
def test_other_strides():
    tensors, options = make_problem(2, 9, 4, 4, 0, 2)
    tensors["u"] = tensors["u"].transpose(1, 2).contiguous().transpose(1, 2)
    tensors["B"] = tensors["B"][:1].expand(2, -1, -1)
    wide = torch.randn(2, 9, 3 * 4)
    tensors["delta"], tensors["z"] = wide[..., :4], wide[..., 8:]
    tensors["A"] = tensors["A"].t().contiguous().t()
    check(tensors, options)


@pytest.mark.usefixtures("_short_chunks", "_segments")
def test_every_number_is_written(monkeypatch):
    empty = triton_backend._Call.empty

    def poisoned(self, *shape, dtype=torch.float32):
        return empty(self, *shape, dtype=dtype).fill_(float("nan"))

    monkeypatch.setattr(triton_backend._Call, "empty", poisoned)
    check(*make_problem(1, 19, 3, 3, 0, 1))


@pytest.mark.usefixtures("_short_chunks")
def test_state_continues_where_it_stopped():
    tensors, options = make_problem(1, 14, 3, 4, 0, 0)
    whole, last = selective_scan(**tensors, **options, return_state=True, backend="triton")
    outputs, state = [], tensors["initial_state"]
    for part in (slice(0, 9), slice(9, 14)):
        own = {k: x[:, part] if k in (*TOKENS, "B", "C") else x for k, x in tensors.items()}
        own["initial_state"] = state
        y, state = selective_scan(**own, **options, return_state=True, backend="triton")
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), whole, 1e-6)
    assert_close(state, last, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("_short_chunks")
def test_large_inputs_give_no_nan(dtype):
    tensors, options = make_problem(1, 17, 3, 4, 0, 1, dtype)
    large = {name: x * 100 if name in (*TOKENS, "A") else x for name, x in tensors.items()}
    results = solve(large, options)
    assert not any(x.isnan().any() for x in results.values())


def test_step_sizes_keep_their_digits():
    """softplus(x) is near e^x for a small δ, which the logarithm of 1 + e^x would round away."""
    x = torch.linspace(-30, 30, 61, dtype=torch.float32)
    token = torch.ones(1, 1, 61)
    options = {"delta_softplus": True, "return_state": True}
    rows = torch.ones(1, 1, 1)
    a = torch.zeros(61, 1)
    _, state = selective_scan(token, x.view(1, 1, 61), a, rows, rows, **options, backend="triton")
    wanted = torch.logaddexp(x.double(), torch.zeros(1, dtype=torch.float64))
    assert ((state.flatten() - wanted) / wanted).abs().max() < 2e-6  # of which x's rounding is most


@pytest.mark.usefixtures("_short_chunks")
def test_the_kept_states_are_those_of_the_dual_form(monkeypatch):
    from vision_ttt.ops.selective_scan import dual

    monkeypatch.setattr(dual, "CHUNK_TOKENS", 8)
    tensors, options = make_problem(1, 19, 3, 4, 0, 1)
    inputs = OP.inputs(*tensors.values(), *options.values())
    for got, wanted in zip(
        TRITON.forward(inputs, True), OP.backends["dual"].forward(inputs, True), strict=True
    ):
        assert_close(got, wanted, 1e-6)
    *_, none = TRITON.forward(inputs, False)
    assert none.shape == (0, 1, 3, 4)


@pytest.mark.parametrize("strides", [(2**30, 8, 1), (8, 2**30, 1)])
def test_offsets_beyond_32_bits(strides):
    """Of the strides only: the memory between the tokens is never touched."""
    room = torch.empty(2**31 + 64, dtype=torch.float16)
    far = room.as_strided((3, 3, 8), strides).copy_(torch.randn(3, 3, 8))
    close = far.clone(memory_format=torch.contiguous_format)
    outcomes = []
    for x in (far, close):
        x = x.detach().requires_grad_()
        y = selective_scan(x, x, -torch.ones(8, 8), x, x, z=x, reverse_channels=4, backend="triton")
        outcomes.append((y, *torch.autograd.grad(y, x, x.detach())))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_no_image_at_all():
    tensors, options = make_problem(0, 5, 3, 4, 0, 1)
    results = solve(tensors, options)
    assert results["y"].shape == (0, 5, 3)
    assert not results["A"].any()


def test_a_state_that_does_not_fit_registers_is_refused():
    tensors, options = make_problem(1, 2, 1, 257, 0, 0, plain=True)
    with pytest.raises(ValueError, match="a state of 257 numbers per channel is over 256"):
        selective_scan(**tensors, **options, backend="triton")
