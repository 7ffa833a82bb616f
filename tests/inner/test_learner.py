"""The generic learner against torch.optim, against plain loops, and against the fast ops."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ttt_linear_problems
import ttt_mlp_problems
from tolerances import assert_close
from vision_ttt.inner import (
    LOSSES,
    MLP,
    DepthwiseConv3x3,
    GatedLinearUnit,
    Learner,
    Linear,
    NormedResidual,
    SimplifiedGLU,
    mse,
    squared_error,
)

GRID = (2, 3)
BATCH, LENGTH, HEADS, DIM = 2, 6, 2, 3
MODELS = {
    "linear": Linear(),
    "mlp": MLP(widening=2),
    "gated linear unit": GatedLinearUnit(),
    "simplified glu": SimplifiedGLU(),
    "convolution": DepthwiseConv3x3(GRID),
    "normed": NormedResidual(Linear(bias=False)),
}
SEPARATE = [name for name in MODELS if name != "convolution"]


def random_problem(model, seed=0, length=LENGTH):
    """q, k, v [B, T, H, d], a state and outer parameters away from their neutral values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    views = tuple(normal(BATCH, length, HEADS, DIM) for _ in range(3))
    initial = model.initial_state(HEADS, DIM), model.outer_parameters(HEADS, DIM)
    state, outer = ({n: x.double() + 0.5 * normal(*x.shape) for n, x in g.items()} for g in initial)
    return *views, state, outer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_training_run_is_that_of_torch_optim(name, loss):
    """For each image and head: mini-batches, epochs and momentum of torch.optim.SGD.

    Tokens have rates of their own, and the last head reads them from the last to the first.
    """
    model = MODELS[name]
    q, k, v, state, outer = random_problem(model)
    eta = torch.rand(BATCH, LENGTH, HEADS, dtype=torch.float64)
    size, reverse = (None, 0) if model.mixes_tokens else (4, 1)
    options = {"learning_rate": 0.05, "momentum": 0.9}
    learner = Learner(model, LOSSES[loss], mini_batch_size=size, epochs=2, **options)
    o, final = learner(q, k, v, state, outer, eta=eta, reverse_heads=reverse, return_state=True)
    for image in range(BATCH):
        for head in range(HEADS):
            own = {n: x[head].clone().requires_grad_() for n, x in state.items()}
            fixed = {n: x[head] for n, x in outer.items()}
            sgd = torch.optim.SGD(own.values(), lr=0.05, momentum=0.9)
            for _ in range(2):
                order = torch.arange(LENGTH)
                order = order.flip(0) if head >= HEADS - reverse else order
                for tokens in order.split(size or LENGTH):
                    part = (image, tokens, head)
                    sgd.zero_grad()
                    prediction = model({**own, **fixed}, k[part])
                    (gradient,) = torch.autograd.grad(
                        LOSSES[loss](prediction, v[part]), prediction, retain_graph=True
                    )
                    prediction.backward(eta[part].unsqueeze(-1) * gradient)
                    sgd.step()
            for n, x in own.items():
                assert_close(final[n][image, head], x, 1e-12, n)
            answers = model({**own, **fixed}, q[image, :, head])
            assert_close(o[image, :, head], answers, 1e-12)


@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.parametrize("loss", ["rmse", "dot_product", "squared_error"])
def test_a_causal_token_has_learnt_from_its_mini_batch_so_far(name, loss):
    """Written as loops: the state of token t depends on the loss of the first t tokens alone."""
    model = MODELS[name]
    q, k, v, state, outer = random_problem(model, length=5)
    rate, momentum = 0.1, 0.5
    options = {"learning_rate": rate, "momentum": momentum, "mini_batch_size": 3}
    learner = Learner(model, LOSSES[loss], causal=True, **options)
    o = learner(q, k, v, state, outer)
    image, head = 1, 0
    fixed = {n: x[head] for n, x in outer.items()}
    own = {n: x[head] for n, x in state.items()}
    velocity = {n: torch.zeros_like(x) for n, x in own.items()}
    for start, stop in ((0, 3), (3, 5)):
        for t in range(start, stop):
            leaves = {n: x.clone().requires_grad_() for n, x in own.items()}
            seen = (image, slice(start, t + 1), head)
            value = LOSSES[loss](model({**leaves, **fixed}, k[seen]), v[seen])
            gradients = torch.autograd.grad(value, list(leaves.values()))
            moved = {n: momentum * velocity[n] + g for n, g in zip(leaves, gradients, strict=True)}
            after = {n: own[n] - rate * moved[n] for n in own}
            answer = model({**after, **fixed}, q[image, t : t + 1, head])
            assert_close(o[image, t, head], answer[0], 1e-12)
        own, velocity = after, moved


@pytest.mark.parametrize("name", MODELS)
def test_new_parameters_are_those_of_the_fast_layers(name):
    """Weights are normal, biases zero, and a norm is the identity."""
    model = MODELS[name]
    for key, x in {**model.initial_state(64, 8), **model.outer_parameters(64, 8)}.items():
        if key.startswith("w"):
            assert x.std().item() == pytest.approx(0.02, rel=0.1), key
        else:
            assert (x == (key == "ln_weight")).all(), key


def by_learner(model, names, problem, *, checkpoint=False, reverse_heads=0, mini_batch_size):
    """Solve a fast op's problem by the generic learner; ``names`` are the model's → the op's."""
    outer = {name: problem[name] for name in ("ln_weight", "ln_bias") if name in problem}
    learner = Learner(
        NormedResidual(model) if outer else model,
        squared_error,
        mini_batch_size=mini_batch_size,
        causal=True,
        checkpoint=checkpoint,
    )
    o, state = learner(
        *(problem[name] for name in "qkv"),
        {own: problem[name] for own, name in names.items()},
        outer,
        eta=problem["eta"],
        position_scale=problem.get("position_scale"),
        reverse_heads=reverse_heads,
        return_state=True,
    )
    return o, tuple(state.values())


OPS = {
    "ttt_linear": (ttt_linear_problems, Linear(), {"w": "w0", "b": "b0"}),
    "ttt_mlp": (ttt_mlp_problems, MLP(), {name: name for name in ("w1", "b1", "w2", "b2")}),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [None, "per head", "shared"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_the_fast_ops_are_special_cases(op, norm, scale, checkpoint):
    """Outputs, final states and all gradients of the ops' references: both directions, ragged."""
    problems, model, names = OPS[op]
    for length, size in ((9, 4), (5, 8), (3, 1)):
        problem = problems.make_problem(2, length, 3, 4, size, norm=norm, scale=scale)
        options = {"mini_batch_size": size, "reverse_heads": 1}
        wanted = problems.solve(problem, backend="reference", **options)

        def function(return_state, options=options, **arguments):
            return by_learner(model, names, arguments, checkpoint=checkpoint, **options)

        got = problems.solve(problem, function=function)
        for name, value in wanted.items():
            assert_close(got[name], value, 1e-10, name)


def test_linear_attention_is_a_special_case():
    """W₀ = 0, one full-batch step on the dot product, no bias: o = q Σ kᵀ v / (n √d)."""
    model = Linear(bias=False)
    q, k, v, state, _ = random_problem(model)
    state = {"w": torch.zeros_like(state["w"])}
    o = Learner(model, LOSSES["dot_product"])(q, k, v, state)
    attention = torch.einsum("bthd,bshd->bhts", q, k) / (LENGTH * DIM**0.5)
    assert_close(o, torch.einsum("bhts,bshd->bthd", attention, v), 1e-12)


@pytest.mark.parametrize("axes", [(-2,), (0,)])
def test_soft_clipping_divides_by_one_plus_the_norm(axes):
    model = SimplifiedGLU()
    q, k, v, state, _ = random_problem(model)
    _, plain = Learner(model, mse)(q, k, v, state, return_state=True)
    learner = Learner(model, mse, clip_axes={"w1": axes})
    _, clipped = learner(q, k, v, state, return_state=True)
    gradient = state["w1"] - plain["w1"]
    norm = gradient.norm(dim=-2, keepdim=True)
    assert_close(state["w1"] - clipped["w1"], gradient / (1 + norm), 1e-12)
    assert torch.equal(clipped["w2"], plain["w2"])


def test_soft_clipping_is_differentiable_where_there_is_nothing_to_learn():
    """With v = 0 the gradient of the dot product is 0, where its norm is not differentiable."""
    model = Linear(bias=False)
    q, k, v, state, _ = random_problem(model)
    v = torch.zeros_like(v).requires_grad_()
    Learner(model, LOSSES["dot_product"], clip_axes=model.clip_axes)(
        q, k, v, state
    ).sum().backward()
    assert torch.isfinite(v.grad).all()
    assert v.grad.abs().sum() > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradcheck(causal, checkpoint):
    model = NormedResidual(MLP(widening=2))
    q, k, v, state, outer = random_problem(model, length=3)
    learner = Learner(
        model, mse, 0.5, 0.5, 2, causal=causal, clip_axes=model.clip_axes, checkpoint=checkpoint
    )
    eta = torch.rand(BATCH, 3, HEADS, dtype=torch.float64)
    names = list(state), list(outer)

    def function(q, k, v, eta, *params):
        own = dict(zip(names[0], params, strict=False))
        rest = dict(zip(names[1], params[len(own) :], strict=True))
        o, final = learner(q, k, v, own, rest, eta=eta, return_state=True)
        return o, *final.values()

    tensors = (q, k, v, eta, *state.values(), *outer.values())
    tensors = tuple(x.requires_grad_() for x in tensors)
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    if not checkpoint:
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


class LiveMemory(TorchDispatchMode):
    """Bytes that operations allocate and that live on, in a graph or elsewhere."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def live(self):
        return sum(size for storage, size in self.storages.items() if not storage.expired())


def test_checkpointing_keeps_the_states_between_mini_batches_only():
    model, length, size = MLP(), 60, 6
    q, k, v, state, _ = random_problem(model, length=length)
    state = {n: (0.1 * x).requires_grad_() for n, x in state.items()}
    live, gradients = [], []
    for checkpoint in (True, False):
        learner = Learner(model, mse, mini_batch_size=size, causal=True, checkpoint=checkpoint)
        with LiveMemory() as memory:
            loss = learner(q, k, v, state).square().sum()
        live.append(memory.live())
        gradients.append(torch.autograd.grad(loss, list(state.values())))
    states = length // size * BATCH * 8 * sum(x.numel() for x in state.values())
    views = 5 * 8 * q.numel()
    assert live[0] < 1.5 * (states + views)
    assert live[1] > 5 * (states + views)
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, 1e-12)


def test_checkpointing_does_not_lose_gradients_of_captured_tensors():
    temperature = torch.ones((), dtype=torch.float64, requires_grad=True)

    def model(params, x):
        return x @ params["w"] * temperature

    q, k, v, state, _ = random_problem(Linear(bias=False))
    Learner(model)(q, k, v, state).sum().backward()
    assert temperature.grad.abs() > 0
    with pytest.raises(ValueError, match="pass it in state or outer"):
        Learner(model, checkpoint=True)(q, k, v, state)


def test_checkpointing_where_only_the_test_view_needs_a_gradient():
    q, k, v, state, _ = random_problem(MLP())
    gradients = []
    for checkpoint in (True, False):
        own = q.clone().requires_grad_()
        o = Learner(MLP(), mse, mini_batch_size=4, checkpoint=checkpoint)(own, k, v, state)
        gradients.append(torch.autograd.grad(o.square().sum(), own)[0])
    assert_close(*gradients, 1e-12)


def test_what_is_computed_again_is_not_autocast():
    q, k, v, state, _ = random_problem(MLP())
    state = {name: x.float().requires_grad_() for name, x in state.items()}
    learner = Learner(MLP(), mse, mini_batch_size=4, causal=True, checkpoint=True)

    def gradients():
        o = learner(q.float(), k.float(), v.float(), state)
        return torch.autograd.grad(o.square().sum(), list(state.values()))

    wanted = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients()
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 1e-6)


def test_own_model_is_a_bare_function():
    def square(params, x):
        return (x @ params["w"]).square()

    q, k, v, state, _ = random_problem(Linear(bias=False))
    o, final = Learner(square, mse, 0.1)(q, k, v, state, return_state=True)
    for head in range(HEADS):
        w = state["w"][head].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(mse((k[0, :, head] @ w).square(), v[0, :, head]), w)
        assert_close(final["w"][0, head], w - 0.1 * gradient, 1e-12)
        assert_close(o[0, :, head], (q[0, :, head] @ final["w"][0, head]).square(), 1e-12)


def test_state_continues_where_it_stopped():
    model = MLP()
    q, k, v, state, _ = random_problem(model, length=8)
    learner = Learner(model, mse, mini_batch_size=2, causal=True)
    o, final = learner(q, k, v, state, return_state=True)
    first, middle = learner(q[:, :4], k[:, :4], v[:, :4], state, return_state=True)
    second, last = learner(
        q[:, 4:], k[:, 4:], v[:, 4:], middle, state_per_image=True, return_state=True
    )
    assert_close(torch.cat([first, second], dim=1), o, 1e-12)
    for name, x in final.items():
        assert_close(last[name], x, 1e-12, name)


def test_compiles_as_one_graph():
    """One small mini-batch and no lowering, which takes long: the test is for one graph."""
    model = Linear(bias=False)
    q, k, v, state, _ = random_problem(model, length=2)
    w = state["w"].requires_grad_()
    learner = Learner(model, mse, causal=True)

    def function(q, k, v, w):
        return learner(q, k, v, {"w": w})

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    wanted, got = (f(q, k, v, w) for f in (function, compiled))
    assert_close(got, wanted, 1e-12)
    gradients = [torch.autograd.grad(o.square().sum(), w)[0] for o in (wanted, got)]
    assert_close(gradients[1], gradients[0], 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_in_float32_inside(dtype):
    model = MLP()
    q, k, v, state, _ = random_problem(model)
    state = {name: x.float() for name, x in state.items()}
    rounded = [x.to(dtype) for x in (q, k, v)]
    learner = Learner(model, mse)
    wanted, _ = learner(*(x.float() for x in rounded), state, return_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, final = learner(*rounded, state, return_state=True)
    assert o.dtype == dtype
    assert torch.equal(o, wanted.to(dtype))
    assert all(x.dtype == torch.float32 for x in final.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1.0"),
        ({"learning_rate": float("inf")}, "learning_rate must be at most"),
        ({"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        ({"momentum": float("nan")}, "momentum must be at least 0, got nan"),
        ({"mini_batch_size": 0}, "mini_batch_size must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 2, "causal": True}, "must be 1 in a causal scan, got 2"),
        ({"model": DepthwiseConv3x3(GRID), "causal": True}, "mixes tokens and cannot be causal"),
    ],
)
def test_bad_regimes(arguments, message):
    with pytest.raises(ValueError, match=message):
        Learner(**{"model": Linear(), **arguments})


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"state": {}}, "state must hold at least one tensor"),
        (
            {},
            {"state": {"w": torch.zeros(5, 3, 3)}},
            r"w must have shape \[2, …\], got \[5, 3, 3\]",
        ),
        ({}, {"state_per_image": True}, r"w must have shape \[2, 2, …\], got \[2, 3, 3\]"),
        ({}, {"outer": {"w": torch.zeros(2, 3)}}, r"\['w'\] are in state and outer"),
        ({}, {"eta": torch.ones(2, 6)}, r"eta must have shape \[2, 6, 2\], got \[2, 6\]"),
        ({}, {"position_scale": torch.ones(6)}, "position_scale belongs to a causal scan"),
        (
            {"causal": True, "mini_batch_size": 4},
            {"position_scale": torch.ones(3)},
            r"position_scale must have shape \[4\] or \[2, 4\], got \[3\]",
        ),
        (
            {"causal": True, "mini_batch_size": 4},
            {"position_scale": torch.ones(4, device="meta")},
            "position_scale is on meta, q on cpu",
        ),
        ({}, {"state": {"w": torch.zeros(2, 3, 3, device="meta")}}, "w is on meta, q on cpu"),
        ({}, {"outer": {"u": torch.zeros(2, 3, device="meta")}}, "u is on meta, q on cpu"),
        ({}, {"reverse_heads": 3}, r"reverse_heads must be in 0 … 2, got 3"),
        ({"clip_axes": {"u": (-2,)}}, {}, r"clip_axes names 'u', state has \['w'\]"),
        ({"model": lambda params, x: x[:, :2]}, {}, r"must map \[6, 3\] to \[6, 3\], it gave"),
        ({"model": DepthwiseConv3x3((2, 2))}, {}, "6 tokens do not fill a grid of 2 × 2"),
        ({"model": DepthwiseConv3x3(GRID)}, {"reverse_heads": 1}, "cannot scan in reverse"),
        ({}, {"k": torch.zeros(2, 5, 2, 3).double()}, r"Learner: k must have shape"),
    ],
)
def test_bad_calls(options, arguments, message):
    q, k, v, state, _ = random_problem(Linear(bias=False))
    call = {"q": q, "k": k, "v": v, "state": state, **arguments}
    with pytest.raises(ValueError, match=message):
        Learner(**{"model": Linear(bias=False), **options})(**call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to(torch.complex64), "got torch.strided torch.complex64"),
        (lambda x: x.to_sparse(), "got torch.sparse_coo"),
        (lambda x: x.tolist(), "got list"),
    ],
)
@pytest.mark.parametrize("group", ["state", "outer"])
def test_parameters_of_another_kind(group, change, message):
    q, k, v, state, _ = random_problem(Linear(bias=False))
    call = {"state": state, group: {"x": change(torch.zeros(2, 3, 3))}}
    with pytest.raises(TypeError, match=f"Learner: x must be a strided tensor of .*{message}"):
        Learner(Linear(bias=False))(q, k, v, **call)
