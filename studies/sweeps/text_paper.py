"""Experiments of the TTT-layers paper at nano scale: Table 1, Fig. 8, and Figs. 11, 12 and 19."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, Sweep, Variant
from studies.sweeps.text_contexts import TOKENS_PER_UPDATE, measure_positions
from studies.sweeps.text_figures import batch_figure, flops_figure, perplexity_figure
from vision_ttt.bench.complexity import macs_of_pass
from vision_ttt.layers import TTTLinear
from vision_ttt.ops import ttt_linear
from vision_ttt.tasks.language.ablations import ABLATIONS

if TYPE_CHECKING:
    from vision_ttt.engine.train import TrainResult

_NANO = "1.3 million parameters, two million bytes of the Python standard library"
_BASE = {"units": 2_000_000, "warmup": 100_000, "evaluate_every": 61}
_PARTS = ("use_gate", "share_qk", "pre_conv")
_PERPLEXITY = Column("perplexity per byte", lambda result: result.measured["perplexity"], 3)


def measure_perplexity(trained: TrainResult) -> dict[str, Any]:
    """Return perplexity, and the loss by positions."""
    return {"perplexity": trained.evaluation.metrics["perplexity"], **measure_positions(trained)}


TEXT_ABLATION = Sweep(
    name="text-ablation",
    title=TITLES["text-ablation"],
    recipe="text",
    base=_BASE,
    rows=tuple(
        Variant(name, {"arguments": row.keywords}, published=row.perplexity)
        for name, row in ABLATIONS.items()
    ),
    panels=(
        Panel(
            "Table 1",
            {name.replace("_", " "): name for name in ABLATIONS if name not in _PARTS},
            in_steps=True,
        ),
        Panel(
            "parts of the Mamba backbone",
            {"none": "learnable_eta", **{part: part for part in _PARTS}, "all": "mamba_backbone"},
        ),
    ),
    caveat=f"Small-scale evidence: {_NANO}; differences below the spread over seeds mean nothing.",
    published_unit="perplexity per token of 125M parameters on the Pile",
    columns=(_PERPLEXITY, Column("training, s", lambda result: result.seconds, 0, is_time=True)),
    unit="tokens",
    losses="both without label smoothing",
    examine=measure_perplexity,
    draw=perplexity_figure,
)


def measure_batch(trained: TrainResult) -> dict[str, Any]:
    """Return perplexity, and the milliseconds of an inner learner's forward pass by parts.

    As in the right half of the paper's Fig. 8: in the dual form by PyTorch's matrix products, for
    the states after each mini-batch alone and for the outputs, too.
    """
    perplexity = measure_perplexity(trained)
    model, context = trained.model.cpu(), trained.config.data.context
    layer = next(each for each in model.modules() if isinstance(each, TTTLinear))
    x = torch.randn(1, context, model.config.hidden_size)
    with torch.inference_mode():
        problem = layer.inner_problem(x)
        milliseconds = {
            "states": _milliseconds(lambda: states_after_batches(problem)),
            "total": _milliseconds(lambda: ttt_linear(**problem, backend="dual")),
        }
    return {**perplexity, "milliseconds": milliseconds}


def states_after_batches(problem: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return W [B, H, d, d] and b [B, H, 1, d] after the last mini-batch, without any output."""
    k, v, eta = (problem[name].transpose(1, 2) for name in ("k", "v", "eta"))
    w, b = problem["w0"], problem["b0"].unsqueeze(1)
    gain, offset = (problem[name].unsqueeze(1) for name in ("ln_weight", "ln_bias"))
    size, scale = problem["mini_batch_size"], problem["position_scale"]
    for k_t, v_t, eta_t in zip(*(x.split(size, dim=2) for x in (k, v, eta)), strict=True):
        z = k_t @ w + b
        centred = z - z.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + problem["eps"]).sqrt()
        normal = centred / deviation
        g = (k_t + normal * gain + offset - v_t) * gain
        g = g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True)
        step = eta_t.unsqueeze(-1) * g / deviation
        p = scale[:, k_t.shape[2] - 1, None, None]
        w = w - p * k_t.transpose(-1, -2) @ step
        b = b - p * step.sum(2, keepdim=True)
    return w, b


def _milliseconds(call: Callable[[], object]) -> float:
    """The least CPU time of twenty calls after one that is not counted: other work only adds."""
    seconds = []
    for _ in range(21):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return 1e3 * min(seconds[1:])


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

TEXT_MINI_BATCH = Sweep(
    name="text-mini-batch",
    title=TITLES["text-mini-batch"],
    recipe="text",
    base=_BASE,
    rows=tuple(Variant(f"b{b}", {"arguments": {"mini_batch_size": b}}) for b in BATCHES),
    panels=(Panel("Fig. 8", {str(b): f"b{b}" for b in BATCHES}, in_steps=True),),
    caveat=f"Small-scale evidence: {_NANO}; times are CPU times of one layer on one thread.",
    columns=(
        _PERPLEXITY,
        Column("states, ms", lambda result: result.measured["milliseconds"]["states"], 1),
        Column("forward, ms", lambda result: result.measured["milliseconds"]["total"], 1),
    ),
    unit="tokens",
    losses="both without label smoothing",
    examine=measure_batch,
    draw=batch_figure,
)

CONTEXTS = (512, 2048, 8192)
SIZES = {
    "s": ({"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}, 500_000),
    "m": ({"hidden_size": 96, "intermediate_size": 264, "num_hidden_layers": 5}, 1_000_000),
    "l": ({"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}, 2_000_000),
}
"""Size → arguments of the model, and tokens to train on, about as many for each parameter."""
_OFF = dict.fromkeys(_PARTS, False)
_NONE = dict.fromkeys(_PARTS)
_MLP = {"ttt_layer_type": "mlp"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear-m": ("TTT-Linear (M)", {}),
    "linear-t": ("TTT-Linear (T)", {"arguments": _OFF}),
    "mlp-m": ("TTT-MLP (M)", {"arguments": _MLP}),
    "mlp-t": ("TTT-MLP (T)", {"arguments": {**_MLP, **_OFF}}),
    "llama": ("Transformer", {"model": "llama", "arguments": _NONE}),
    "mamba": ("Mamba", {"model": "mamba", "arguments": _NONE}),
}


def _of_size(method: str, size: str, context: int) -> Variant:
    changes = dict(METHODS[method][1])
    sizes, tokens = SIZES[size]
    arguments = {**changes.pop("arguments", {}), **sizes}
    if method == "mamba":  # one of its blocks stands for mixer or MLP
        arguments["num_hidden_layers"] *= 2
        arguments |= {"intermediate_size": None, "num_attention_heads": None}
    length = {"units": tokens, "warmup": tokens // 10, "evaluate_every": None}
    if method.startswith("mlp"):
        length["inner_warmup"] = tokens // 10
    batch = {"context": context, "batch_size": TOKENS_PER_UPDATE // context}
    return Variant(
        f"{method}-{size}-{context}", {**changes, "arguments": arguments, **length, **batch}
    )


def measure_flops(trained: TrainResult) -> dict[str, Any]:
    """Return perplexity, and the FLOPs of training: three forward passes' for each token."""
    place = next(trained.model.parameters()).device
    macs = macs_of_pass(trained.model, trained.task.example().to(place))
    tokens = trained.metrics["history"][-1]["update"] * TOKENS_PER_UPDATE
    flops = 6 * macs * tokens / trained.config.data.context
    return {**measure_perplexity(trained), "training_flops": flops}


TEXT_FLOPS = Sweep(
    name="text-flops",
    title=TITLES["text-flops"],
    recipe="text",
    base={},
    rows=tuple(
        _of_size(method, size, context)
        for context, method, size in itertools.product(CONTEXTS, METHODS, SIZES)
    ),
    panels=tuple(
        Panel(
            f"context {context}",
            {
                f"{METHODS[method][0]}, {size}": f"{method}-{size}-{context}"
                for method, size in itertools.product(METHODS, SIZES)
            },
        )
        for context in CONTEXTS
    ),
    caveat="Small-scale evidence: three sizes, 0.5 to 2 million bytes of the Python standard "
    "library, 8,192 in each update, one recipe for all. FLOPs are three times those of the forward "
    "pass.",
    columns=(
        _PERPLEXITY,
        Column("GFLOP", lambda result: result.measured["training_flops"] / 1e9, 0),
    ),
    unit="tokens",
    losses="both without label smoothing",
    examine=measure_flops,
    draw=flops_figure,
)
