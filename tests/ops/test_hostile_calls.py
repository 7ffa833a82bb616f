"""Whatever an op is called with: an error, or the definition's numbers. Never a crash.

`make sanitize` runs this under AddressSanitizer, where reading beside a tensor is a crash, too.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hostile_calls import NAMES, NUMBERS, SPOILS, Sizes, exactly, make_calls, spoilt

ERRORS = (TypeError, ValueError, RuntimeError, OverflowError)
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
TOLERANCE[torch.int32] = 1e-2  # a packed block's words: one word for all makes errors larger

SIZES = st.builds(
    Sizes,
    batch=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 15),
    heads=st.integers(1, 3),
    dim=st.sampled_from([4, 16, 32]),
    channels=st.sampled_from([5, 16, 32, 48]),
    taps=st.sampled_from([1, 3, 5]),
    mini_batch=st.sampled_from([1, 4, 16, 70]),
    gated=st.booleans(),
)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 99), st.sampled_from(list(SPOILS)), st.integers(0, 3),
        st.sampled_from(NUMBERS),
    ),
    min_size=1, max_size=2,
)  # fmt: skip


def tensors_of(outcome) -> list[Tensor]:
    return [outcome] if isinstance(outcome, Tensor) else list(outcome)


def distance(x: Tensor, exact: Tensor) -> Tensor:
    """The largest error, relative to the largest number."""
    return (x.double() - exact).abs().max() / (exact.abs().max() + 1e-3)


def assert_error_or_definition(name, sizes, changes, seed=0):
    torch.manual_seed(seed)
    call = make_calls(sizes)[name]()
    arguments = list(call.arguments)
    for place, how, axis, number in changes:
        place %= len(arguments)
        try:
            arguments[place] = spoilt(arguments[place], how, axis, number)
        except (RuntimeError, IndexError):  # no such tensor can be made
            return
    unreadable = any(isinstance(x, Tensor) and x.is_meta for x in arguments)
    errors = (*ERRORS, AttributeError) if unreadable else ERRORS  # of a shape function
    try:
        got = tensors_of(call.op(*arguments))
    except errors:
        assert changes, "the unspoilt call is refused"
        return
    if call.definition is None or unreadable:
        return
    wanted = tensors_of(call.definition(*map(exactly, arguments)))
    dtypes = [a.dtype for a in arguments if isinstance(a, Tensor)]
    for place, (x, exact) in enumerate(zip(got, wanted, strict=True)):
        assert x.shape == exact.shape
        if exact.numel() and exact.isfinite().all():
            tolerance = max(TOLERANCE.get(dtype, 0) for dtype in (*dtypes, x.dtype))
            error = distance(x, exact)
            if not error < tolerance and changes and torch.float64 not in dtypes:
                # An inner learning rate of 2^40 amplifies the definition's rounding errors, too.
                given = [x if isinstance(x, Tensor) else exactly(x) for x in arguments]
                rounded = tensors_of(call.definition(*given))[place]
                if not distance(rounded, exact) < tolerance / 10:
                    return
            assert error < tolerance, f"{name}: off by {error}"


@pytest.mark.parametrize("name", NAMES)
def test_unspoilt(name):
    for sizes in (Sizes(), Sizes(channels=5, dim=4, gated=False), Sizes(1, 13, 11, 3, 32, 48)):
        if sizes.channels == 5 and "backward" in name:
            continue  # only the kernels' sizes
        assert_error_or_definition(name, sizes, [])


@pytest.mark.parametrize("name", NAMES)
def test_freed_storages(name):
    """Also of a call that has been served before, and of a view into a storage."""
    torch.manual_seed(0)
    call = make_calls(Sizes())[name]()
    call.op(*call.arguments)
    flat = [y for x in call.arguments for y in (x if isinstance(x, list) else [x])]
    for place, x in enumerate(flat):
        if isinstance(x, Tensor) and x.numel():
            whole = torch.zeros(7 + x.numel(), dtype=x.dtype)
            given = flat.copy()
            given[place] = whole[7:].view(x.shape)
            whole.untyped_storage().resize_(0)
            rest = iter(given)
            arguments = [
                [next(rest) for _ in a] if isinstance(a, list) else next(rest)
                for a in call.arguments
            ]
            with pytest.raises(ValueError, match="has no memory: its storage has been freed"):
                call.op(*arguments)


# Without shrinking: an example is two changes of one call already.
PLAIN = settings(
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(PLAIN, max_examples=150, derandomize=True)
@given(name=st.sampled_from(NAMES), sizes=SIZES, changes=CHANGES)
def test_spoilt(name, sizes, changes):
    assert_error_or_definition(name, sizes, changes)


@pytest.mark.slow
@settings(PLAIN, max_examples=5000, print_blob=True)
@given(name=st.sampled_from(NAMES), sizes=SIZES, changes=CHANGES)
def test_spoilt_many_times(name, sizes, changes):
    assert_error_or_definition(name, sizes, changes)


def test_every_op_of_the_namespace_is_among_them():
    registered = torch._C._dispatch_get_all_op_names()
    known = {name.split("::")[1].split(".")[0] for name in registered if "vision_ttt::" in name}
    assert known
    assert known <= {name.split(" ")[0] for name in NAMES}
