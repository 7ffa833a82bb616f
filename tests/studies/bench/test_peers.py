"""Other projects' implementations: what they compute in terms of our ops, from which arguments."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from studies.bench import peers
from studies.bench.peers import flash_linear_attention as peer
from studies.main import main
from tolerances import assert_close
from vision_ttt.bench.correctness import find_error
from vision_ttt.bench.op_contenders import PEERS, op_contender, refusal
from vision_ttt.bench.problems import Problem
from vision_ttt.bench.rows import read_rows
from vision_ttt.ops import ttt_linear

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GOLDEN = Path(__file__).parents[2] / "golden" / "ttt_linear_fla_naive_scale1_T48"
SHARED = Problem(batch=2, tokens=37, heads=3, dim=16, mini_batch_size=16, shared=True)
SHAPE = ["--shape", "1", "40", "2", "16", "--mini-batch-size", "8", "--repeats", "1"]
NAMES = {"h0": "initial_state", "hb0": "initial_state_bias"}


@pytest.fixture(autouse=True)
def _entered() -> Iterator[None]:
    peers.enter()
    yield
    PEERS.clear()


def test_the_definition_is_what_its_naive_form_computes():
    description = json.loads(GOLDEN.with_suffix(".json").read_text())
    tensors = load_file(GOLDEN.with_suffix(".safetensors"))
    leaves = {
        key.removeprefix("input."): x.double().requires_grad_("proj" not in key)
        for key, x in tensors.items()
        if key.startswith("input.")
    }
    arguments = {NAMES.get(key, key): x for key, x in leaves.items() if "proj" not in key}
    size = description["config"]["mini_batch_size"]
    o, (w, b) = peer.by_ttt_linear(**arguments, chunk_size=size)
    results = {"o": o, "ht": w, "hbt": b}
    projections = zip(results.values(), ("proj_o", "proj_h", "proj_hb"), strict=True)
    sum((x * leaves[name]).sum() for x, name in projections).backward()
    tolerance = description["tolerance"]
    for key, got in results.items():
        assert_close(got, tensors[f"output.{key}"], tolerance["forward"], key)
    gradients = [key for key in tensors if key.startswith("output.grad.")]
    assert len(gradients) == 8
    for key in gradients:
        leaf = leaves[key.removeprefix("output.grad.")]
        assert_close(leaf.grad, tensors[key], tolerance["gradients"], key)


def test_batch_elements_and_ragged_ends_are_kept_apart():
    generator = torch.Generator().manual_seed(0)
    shapes = dict.fromkeys("qkv", (2, 9, 3, 16))
    shapes |= {"w": (3, 16), "b": (3, 16), "eta": (2, 9, 3, 1)}
    shapes |= {"initial_state": (2, 3, 16, 16), "initial_state_bias": (2, 3, 1, 16)}
    both = {
        name: 0.3 * torch.rand(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    o, (w, b) = peer.by_ttt_linear(**both, chunk_size=4)
    assert (o.shape, w.shape, b.shape) == ((2, 9, 3, 16), (2, 3, 16, 16), (2, 3, 1, 16))
    second = {name: x if name in ("w", "b") else x[1:] for name, x in both.items()}
    o_second, (w_second, b_second) = peer.by_ttt_linear(**second, chunk_size=4)
    for got, wanted in ((o[1:], o_second), (w[1:], w_second), (b[1:], b_second)):
        assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize("tokens", [32, 37])
def test_our_arguments_and_the_peers_train_the_same_states(tokens: int):
    problem = SHARED._replace(tokens=tokens)
    inputs = problem.inputs(torch.float64, CPU, requires_grad=False)
    o, (w, b, *_) = ttt_linear(**inputs, **problem.options("reference"), return_state=True)
    arguments = peer.arguments(inputs, problem.mini_batch_size)
    o_peer, (w_peer, b_peer) = peer.by_ttt_linear(**arguments, chunk_size=problem.mini_batch_size)
    assert_close(w_peer, w, 1e-12)
    assert_close(b_peer.squeeze(2), b, 1e-12)
    # The outputs differ by the vector that is added to LN(z): z itself, and q.
    normed = o - inputs["q"]
    z = o_peer - normed
    centred = z - z.mean(-1, keepdim=True)
    again = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    assert_close(again * inputs["ln_weight"] + inputs["ln_bias"], normed, 1e-9)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_arguments_are_contiguous_leaves_of_the_kernels_dtypes(requires_grad: bool):
    ours = SHARED.inputs(torch.bfloat16, CPU, requires_grad=requires_grad)
    theirs = peer.arguments(ours, SHARED.mini_batch_size)
    assert {name: tuple(x.shape) for name, x in theirs.items()} == {
        **dict.fromkeys("qkv", (2, 37, 3, 16)),
        "w": (3, 16),
        "b": (3, 16),
        "eta": (2, 37, 3, 1),
        "initial_state": (2, 3, 16, 16),
        "initial_state_bias": (2, 3, 1, 16),
    }
    for name, x in theirs.items():
        assert x.is_leaf
        assert x.is_contiguous()
        assert x.requires_grad == requires_grad
        state = name.startswith("initial")
        assert x.dtype == (torch.float32 if state else torch.bfloat16), name
    # Nothing is lost where the views' dtype is a short one.
    for theirs_name, ours_name in {"w": "ln_weight", "b": "ln_bias", "q": "q"}.items():
        assert torch.equal(theirs[theirs_name].float(), ours[ours_name].float())


def _install(monkeypatch, function) -> list[dict]:
    """Put a package `fla` in place whose op is `function`, and return the options of its calls."""
    calls = []

    def fused_chunk_ttt_linear(*, scale, chunk_size, **tensors):
        calls.append({"scale": scale, "chunk_size": chunk_size})
        return function(**tensors, chunk_size=chunk_size)

    module = ModuleType("fla.ops.ttt")
    module.fused_chunk_ttt_linear = fused_chunk_ttt_linear
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.ttt", module)
    return calls


def _right(*, chunk_size, **tensors):
    exact = {name: x.double() for name, x in tensors.items()}
    o, (w, b) = peer.by_ttt_linear(**exact, chunk_size=chunk_size)
    return o.to(tensors["q"].dtype), w.float(), b.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_right_peer_passes_the_check(dtype: torch.dtype, monkeypatch):
    calls = _install(monkeypatch, _right)
    assert find_error(peer.NAME, SHARED, dtype, CPU) is None
    assert calls == [{"scale": 1.0, "chunk_size": 16}]
    contender = op_contender(peer.NAME, SHARED)
    inputs = contender.inputs(SHARED, dtype, CPU, requires_grad=False)
    assert contender.timed(**inputs).shape == (2, 37, 3, 16)


def test_a_wrong_peer_is_refused(monkeypatch):
    def rate_of_the_key(*, eta, **arguments):
        return _right(eta=eta.flip(1), **arguments)

    _install(monkeypatch, rate_of_the_key)
    assert "is off by" in find_error(peer.NAME, SHARED, torch.float32, CPU)

    def fails(**arguments):
        raise RuntimeError("no kernel image\nis available")

    _install(monkeypatch, fails)
    said = find_error(peer.NAME, SHARED, torch.float32, CPU)
    assert said == "RuntimeError: no kernel image is available"


def test_refusals(monkeypatch):
    large = SHARED._replace(dim=256)
    assert "256 is over 128" in refusal(peer.NAME, large, torch.bfloat16, CUDA)
    odd = SHARED._replace(mini_batch_size=8)
    assert "mini_batch_size 8" in refusal(peer.NAME, odd, torch.bfloat16, CUDA)
    assert "float64" in refusal(peer.NAME, SHARED, torch.float64, CUDA)
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    missing = refusal(peer.NAME, SHARED, torch.bfloat16, CUDA)
    assert missing == "it is not installed; pip install flash-linear-attention"
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: name)
    assert refusal(peer.NAME, SHARED, torch.bfloat16, CUDA) is None


@pytest.mark.gpu
def test_the_peer_itself():
    """In bfloat16: in float16 its gradient of η overflows."""
    pytest.importorskip("fla")
    problem = Problem(2, 6400, 3, 64, mini_batch_size=16, shared=True)
    assert find_error(peer.NAME, problem, torch.bfloat16, CUDA) is None


def test_mambapy_computes_the_same():
    problem = Problem(1, 50, 4, 16, mini_batch_size=8, op="selective_scan", shared=True)
    assert "bfloat16 is not one of" in refusal("mambapy", problem, torch.bfloat16, CPU)
    pytest.importorskip("mambapy")
    assert refusal("mambapy", problem, torch.float32, CPU) is None
    assert find_error("mambapy", problem, torch.float32, CPU) is None


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True])
def test_the_peer_joins_where_it_can(installed: bool, tmp_path: Path, capsys, monkeypatch):
    if installed:
        monkeypatch.setattr(peer, "PEER", peer.PEER._replace(refusal=lambda *_: None))
        monkeypatch.setitem(peers.ALL, "ttt_linear", {peer.NAME: peer.PEER})

    def fused_chunk(problem):
        return lambda **tensors: peer.by_ttt_linear(**tensors, chunk_size=8)[0]

    monkeypatch.setattr(peer, "fused_chunk", fused_chunk)
    output = tmp_path / "ops.csv"
    assert main(["bench", "ops", *SHAPE, "--output", str(output)]) == 0
    told = capsys.readouterr().err
    rows = read_rows(output)
    measured = {row.contender for row in rows}
    cases = {row.case for row in rows}
    assert "dual" in measured
    if installed:
        assert peer.NAME in measured
        assert cases == {"all heads forwards, one learning rate"}
        assert "because of flash-linear-attention: all heads forwards" in told
    else:
        assert peer.NAME not in measured
        assert cases == {""}
        assert "'flash-linear-attention' is left out: its kernels are for cuda" in told


def test_a_peer_that_cannot_serve_is_one_line(capsys):
    assert main(["bench", "ops", "--backends", peer.NAME]) == 2
    assert "for cuda, not cpu" in capsys.readouterr().err
