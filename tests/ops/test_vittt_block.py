"""A whole block as one op against its modules one after the other."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tolerances import FORWARD, assert_close
from vision_ttt import TTTLinear, VitttBlock, VitttMixer
from vision_ttt.layers import DirectionalConv1d, whole_block
from vision_ttt.ops import use_backend
from vision_ttt.ops.vittt_block import cpu

VITTT = {"bidirectional": True, "share_qk": True, "gate": True, "conv_kernel_size": 4}
LAYOUTS = {
    "vittt": VITTT,
    "one direction": VITTT | {"bidirectional": False},
    "own q": VITTT | {"share_qk": False},
    "no gate": VITTT | {"gate": False},
    "shared state": VITTT | {"learnable_states": 1},
    "fixed state": VITTT | {"learnable_states": 0},
    "large steps": VITTT | {"base_learning_rate": 4.0},
    "long convolution": VITTT | {"conv_kernel_size": 6},
    "small mini-batches": VITTT | {"mini_batch_size": 5},
}


def make_block(dim=64, heads=2, hidden=48, **layout):
    torch.manual_seed(0)
    mixer = VitttMixer(dim, ttt=TTTLinear(dim, heads, **(layout or VITTT)))
    block = VitttBlock(mixer, dim, hidden).eval()
    for name, parameter in block.named_parameters():  # none at a value that hides a term
        if parameter.ndim < 3:
            nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.1, 0.2)
    return block


@pytest.fixture
def calls(monkeypatch):
    """How often a block runs as one op."""
    count, original = [], whole_block.vittt_block
    monkeypatch.setattr(
        whole_block, "vittt_block", lambda *a, **k: count.append(1) or original(*a, **k)
    )
    return count


@torch.no_grad()
def assert_same(block, y, grid):
    before = y.clone()
    exact = copy.deepcopy(block).double()(y.double(), grid)
    assert_close(block(y, grid), exact, FORWARD[torch.float32])
    assert torch.equal(y, before)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout, calls):
    assert_same(make_block(**layout), torch.randn(2, 35, 64), (5, 7))
    assert len(calls) == 1  # not in float64


@pytest.mark.parametrize("grid", [(1, 1), (1, 17), (9, 1), (14, 14)])
@pytest.mark.parametrize(("dim", "heads", "hidden"), [(16, 1, 16), (192, 3, 512), (128, 1, 32)])
def test_sizes(grid, dim, heads, hidden, calls):
    block = make_block(dim, heads, hidden)
    assert_same(block, torch.randn(1, grid[0] * grid[1], dim), grid)
    assert calls


def test_an_mlp_in_parts(calls):
    assert_same(make_block(32, 1, 16), torch.randn(2, 48 * 60, 32), (48, 60))
    assert calls


def test_convolution_of_another_size(calls):
    block = make_block()
    block.mixer.conv2d = type(block.mixer.conv2d)(64, kernel_size=5)
    assert_same(block, torch.randn(2, 35, 64), (5, 7))
    assert calls


def test_each_norm_has_its_own_epsilon(calls):
    block = make_block()
    norms = block.mixer.norm, block.mixer.ttt.learner, block.mixer.ttt.merge, block.norm
    for i, norm in enumerate(norms):
        norm.eps = 0.1 * 2**i
    assert_same(block, torch.randn(2, 35, 64), (5, 7))
    assert calls


@torch.no_grad()
def test_a_nan_among_the_position_offsets_shows():
    block = make_block()
    block.mixer.ttt.learner.position_offset[0, 0] = float("nan")
    assert block(torch.randn(2, 35, 64), (5, 7)).isnan().any()


@torch.no_grad()
def test_strides_threads_and_stale_memory_change_no_bit():
    block, y = make_block(192, 3, 512), torch.randn(3, 70, 192)
    wanted = block(y, (7, 10))
    assert torch.equal(block(y.transpose(0, 1).contiguous().transpose(0, 1), (7, 10)), wanted)
    strided = copy.deepcopy(block)
    for parameter in strided.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.mT.contiguous().mT
    assert torch.equal(strided(y, (7, 10)), wanted)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = block(y, (7, 10))
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        assert torch.equal(block(y, (7, 10)), one)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    # PyTorch's matrix products may round differently with another number of threads.
    assert_close(one, wanted, 1e-6)


@torch.no_grad()
def test_a_kernel_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu, "call_kernel", lambda *_: 1)
    with pytest.raises(MemoryError, match="no memory for the scratch"):
        make_block()(torch.randn(2, 35, 64), (5, 7))


@torch.no_grad()
def test_the_op_refuses_heads_that_no_kernel_takes(monkeypatch):
    monkeypatch.setattr(whole_block, "fits", lambda *_: True)
    with pytest.raises(ValueError, match="takes no heads of 8 channels"):
        make_block(64, 8)(torch.randn(2, 35, 64), (5, 7))


class OtherLinear(nn.Linear):
    pass


class OtherTensor(torch.Tensor):
    pass


def replaced(block):
    block.mlp.fc1 = OtherLinear(64, 96, bias=False)


def patched(block):
    forward = block.mlp.fc2.forward
    block.mlp.fc2.forward = lambda x: forward(x) * 2


def watched(block):
    block.mixer.ttt.conv_q.register_forward_hook(lambda *_: None)


def watched_before(block):
    block.mixer.ttt.merge.register_forward_pre_hook(lambda *_: None)


def of_another_mixer(block):
    class Mixer(VitttMixer):
        def forward(self, y, grid, extra=()):
            return 2 * super().forward(y, grid, extra)

    block.mixer.__class__ = Mixer


def without_conv2d(block):
    block.mixer.conv2d = None


def in_another_norm(block):
    block.norm = nn.RMSNorm(64)


def with_another_scan(block):
    block.mixer.ttt.conv_k = DirectionalConv1d(128, 4, reverse_channels=0)


def with_more_taps(block):
    block.mixer.ttt.conv_k = DirectionalConv1d(128, 6, reverse_channels=64)


def with_bias(block):
    block.mlp.fc1 = nn.Linear(64, 96)


def of_odd_width(block):
    block.mlp = type(block.mlp)(64, 40)


def of_large_mini_batches(block):
    block.mixer.ttt = TTTLinear(64, 2, **VITTT, mini_batch_size=65)


def of_small_heads(block):
    block.mixer.ttt = TTTLinear(64, 8, **VITTT)


def of_another_tensor(block):
    weight = block.mlp.fc1.weight.detach().as_subclass(OtherTensor)
    block.mlp.fc1.weight = nn.Parameter(weight)


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        patched,
        watched,
        watched_before,
        of_another_mixer,
        without_conv2d,
        in_another_norm,
        with_another_scan,
        with_more_taps,
        with_bias,
        of_odd_width,
        of_large_mini_batches,
        of_small_heads,
        of_another_tensor,
    ],
)
def test_a_changed_block_calls_its_modules(change, calls):
    block = make_block()
    change(block)
    with torch.no_grad():
        block(torch.randn(2, 35, 64), (5, 7))
    assert not calls


@torch.no_grad()
@pytest.mark.parametrize("to", [torch.bfloat16, "meta"])
def test_parameters_that_are_not_float32_on_the_cpu_are_not_read_as_such(to, calls):
    block = make_block()
    block.norm.to(to)
    with pytest.raises(RuntimeError):
        block(torch.randn(2, 35, 64), (5, 7))
    assert not calls


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 35, 32), (2, 35, 128), (35, 35)])
def test_tokens_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"must have shape|tokens do not fill"):
        make_block()(torch.randn(shape), (5, 7))


@torch.no_grad()
@pytest.mark.parametrize(
    ("part", "width"),
    [("mixer.ttt.in_proj", (64, 200)), ("mlp.fc1", (64, 64)), ("mlp.fc2", (64, 64))],
)
def test_parameters_of_other_shapes_are_refused(part, width):
    block = make_block()
    block.set_submodule(part, nn.Linear(*width, bias=False))
    with pytest.raises(ValueError, match=r"vittt_block: (in_proj|fc2) must have"):
        block(torch.randn(2, 35, 64), (5, 7))


def test_where_modules_are_called_instead(calls):
    block, y, grid = make_block(), torch.randn(2, 35, 64), (5, 7)
    block(y, grid)  # gradients may be asked for
    with torch.no_grad():
        block(torch.cat([y, y[:, :1]], 1), grid, extra=(35,))
        with use_backend("dual"):
            block(y, grid)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            block(y, grid)
        copy.deepcopy(block).bfloat16()(y.bfloat16(), grid)
        torch.func.vmap(lambda x: block(x[None], grid)[0])(y)
        torch.compile(block, backend="eager", fullgraph=True)(y, grid)
        handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
        block(y, grid)
        handle.remove()
        with pytest.raises(ValueError, match="35 tokens do not fill"):
            block(y, (5, 8))
        with pytest.raises(ValueError, match="35 tokens do not fill"):
            block(y, grid, extra=(34,))
        block(y.as_subclass(OtherTensor), grid)
        assert not calls
        with use_backend("cpu"):
            block(y, grid)
    assert len(calls) == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_a_hook_on_any_part_fires(gradients):
    block, fired = make_block(), []
    names = [name for name, _ in block.named_modules()]
    for name in names:
        with torch.set_grad_enabled(gradients):
            handle = block.get_submodule(name).register_forward_hook(
                lambda *_, name=name: fired.append(name)
            )
            block(torch.randn(2, 35, 64), (5, 7))
            handle.remove()
    assert fired == names


@torch.no_grad()
def test_parameters_of_a_functional_call_are_the_ones_used(calls):
    block, other = make_block(), make_block().requires_grad_(False)
    for parameter in other.parameters():
        parameter.mul_(0.5)
    y = torch.randn(2, 35, 64)
    wanted = other(y, (5, 7))
    parameters = {name: x.detach() for name, x in other.named_parameters()}
    assert torch.equal(torch.func.functional_call(block, parameters, (y, (5, 7))), wanted)
    assert len(calls) == 2


@torch.no_grad()
def test_a_block_made_without_conv2d(calls):
    block = VitttBlock(VitttMixer(64, 2, conv2d=False), 64, 48)
    assert_same(block, torch.randn(2, 35, 64), (5, 7))
    assert not calls


def test_dropped_paths_call_modules(calls):
    from timm.layers import DropPath

    for place in ("mixer", ""):
        block = make_block()
        block.get_submodule(place).drop_path = DropPath(0.5)
        with torch.no_grad():
            block.train()(torch.randn(2, 35, 64), (5, 7))
            assert not calls
            block.eval()(torch.randn(2, 35, 64), (5, 7))
            assert len(calls) == 1
            calls.clear()
            block.get_submodule(place).drop_path.register_forward_hook(lambda *_: None)
            block(torch.randn(2, 35, 64), (5, 7))
        assert not calls


@pytest.fixture
def arguments(monkeypatch):
    """Those of the op for a block, its input and its grid."""
    captured, op = [], cpu.vittt_block_op
    monkeypatch.setattr(
        "vision_ttt.ops.vittt_block.api.vittt_block_op",
        lambda *args: captured.append(args) or op(*args),
    )

    @torch.no_grad()
    def capture(block, y, grid):
        block(y, grid)
        return captured.pop()

    return capture


def test_flops_are_those_of_the_modules(arguments):
    block, y = make_block(), torch.randn(2, 35, 64)
    whole = arguments(block, y, (5, 7))
    with torch.no_grad(), FlopCounterMode(display=False) as one:
        cpu.vittt_block_op(*whole)
    with torch.no_grad(), FlopCounterMode(display=False) as modules:
        block(y, (5, 7))  # the counter listens to modules
    assert one.get_total_flops() == modules.get_total_flops()
    assert set(one.get_flop_counts()["Global"]) == {torch.ops.vision_ttt.vittt_block}


@pytest.mark.parametrize("y", [torch.randn(2, 35, 64), torch.randn(35, 2, 64).transpose(0, 1)])
def test_the_op_itself(y, arguments):
    whole = arguments(make_block(), y, (5, 7))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(cpu.vittt_block_op, whole, test_utils=tests)
