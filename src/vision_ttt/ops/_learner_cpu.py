"""Calls of the compiled CPU kernels of the learner ops, ttt_linear and ttt_mlp.

The structures below mirror csrc/scans/learner/problem.h field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._learner_dual import checkpoint_interval, num_checkpoints, summed, uniform
from vision_ttt.ops._native import contiguous_last, mirrors, pointer, run_kernel
from vision_ttt.ops._registration import Backend

DIMENSIONS = (16, 32, 64, 128)
"""Head dimensions d that the kernels support."""
LARGEST_MINI_BATCH = 64
"""The largest mini-batch size b that the kernels support."""
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of q, k and v that the kernels support."""


@mirrors("Tokens")
class _Tokens(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("batch", c_int64),
        ("token", c_int64),
        ("head", c_int64),
    )


def _tokens(x: Tensor | None) -> tuple[int, ...]:
    """The fields of :class:`_Tokens` for x [B, T, H, d]."""
    return (0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3])


@mirrors("Convolution")
class _Convolution(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


@mirrors("State")
class _State(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("w1", "b1", "w2", "b2"))


def _state(tensors: Sequence[Tensor]) -> list[int]:
    """The fields of :class:`_State` for weight and bias of one or two layers, or of none.

    The pointer to an empty tensor is null.
    """
    return [*(x.data_ptr() for x in tensors), *[0] * (4 - len(tensors))]


@mirrors("TapGradients")
class _TapGradients(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("q", "k"))


@mirrors("Problem")
class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, _Tokens) for name in ("q", "k", "v")),
        *((name, _Convolution) for name in ("conv_q", "conv_k")),
        ("eta", c_void_p),
        ("initial", _State),
        *((name, c_void_p) for name in ("ln_weight", "ln_bias", "scale")),
        *((name, c_int64) for name in ("batch", "length", "heads", "dim")),
        *((name, c_int64) for name in ("mini_batch_size", "reverse_heads", "interval")),
        *((name, c_int64) for name in ("taps", "seen", "scale_heads", "state_batch")),
        *((name, c_int64) for name in ("is_bfloat16", "rounds", "threads")),
        *((name, c_float) for name in ("eps", "rate")),
    )


@mirrors("Outputs")
class _Outputs(ctypes.Structure):
    _fields_ = (("o", _Tokens), ("last", _State), ("kept", _State))


@mirrors("Gradients")
class _Gradients(ctypes.Structure):
    _fields_ = (
        ("o", _Tokens),
        *((name, _State) for name in ("last", "kept")),
        *((name, _Tokens) for name in ("dq", "dk", "dv")),
        ("dtaps", _TapGradients),
        ("deta", c_void_p),
        ("dinitial", _State),
        *((name, c_void_p) for name in ("dln_weight", "dln_bias", "dscale")),
    )


@mirrors("OpenMiniBatch")
class _OpenMiniBatch(ctypes.Structure):
    _fields_ = (
        ("o", _Tokens),
        *((name, _State) for name in ("sums", "last", "next_sums", "next_start")),
        ("positions", c_void_p),
        ("position", c_int64),
    )


def unsuited(dim: int, mini_batch_size: int) -> str | None:
    """The reason why the kernels do not support these sizes, or None if they do."""
    if dim not in DIMENSIONS:
        return f"head dimension {dim} is not one of {DIMENSIONS}"
    if mini_batch_size > LARGEST_MINI_BATCH:
        return f"mini_batch_size {mini_batch_size} is over {LARGEST_MINI_BATCH}"
    return None


def refusal(inputs: Any) -> str | None:
    """The reason why the kernels do not support a learner's inputs, or None if they do."""
    reason = unsuited(inputs.q.shape[-1], inputs.mini_batch_size)
    return reason or _native.refusal(inputs.q, dtypes=DTYPES, may_be_empty=True)


_NO_CONVOLUTIONS = (0, 0, 0, 0)


class LearnerCall:
    """The kernels' description of one call, which also owns the float32 copies it points to.

    Args:
        inputs: the op's. The state has a weight and a bias per layer.
        rate: if given, eta holds logits and the rates are rate · σ(eta).
        convolutions: if given, the weight [H · d, 1, K] and the bias [H · d] of a depth-wise
            convolution of q, and of one of k, that is causal in scan order. The kernels apply them
            when they load q and k.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        rate: float | None = None,
        convolutions: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        q, k, v, eta, *state, ln_weight, ln_bias, scale, mini_batch_size, reverse_heads, eps = (
            inputs
        )
        batch, length, heads, dim = q.shape
        self.views = [contiguous_last(x) for x in (q, k, v)]
        self.state = [_plain(x) for x in uniform(state, batch)]
        self.others = [None if x is None else _plain(x) for x in (eta, ln_weight, ln_bias, scale)]
        self.taps = [(w.contiguous(), b.contiguous()) for w, b in convolutions or ()]
        self.layers = len(state) // 2
        self.interval = checkpoint_interval(dim, mini_batch_size, self.layers)
        self.mini_batch_size = mini_batch_size
        self.problem = _Problem.pack(
            *(field for view in self.views for field in _tokens(view)),
            *([x.data_ptr() for pair in self.taps for x in pair] or _NO_CONVOLUTIONS),
            self.others[0].data_ptr(),
            *_state(self.state),
            *map(pointer, self.others[1:]),
            *(batch, length, heads, dim, mini_batch_size, reverse_heads, self.interval),
            *(self.taps[0][0].shape[-1] if self.taps else 0, 0),
            1 if scale is None else heads * mini_batch_size // scale.numel(),
            *(self.state[0].ndim == 4, q.dtype == torch.bfloat16, False),  # products do not round
            torch.get_num_threads(),
            *(eps, -1.0 if rate is None else rate),
        )

    def _empty(self, shape: Sequence[int]) -> Tensor:
        """Uninitialised float32 memory. The kernels write float32 for views of any dtype."""
        return self.views[0].new_empty(shape, dtype=torch.float32)

    def _state_shapes(self, *lead: int) -> list[tuple[int, ...]]:
        """Shapes of a state's tensors with the axes ``lead`` before [H, ...]."""
        ranks = (3, 2) * self.layers  # of a weight and of a bias, [H] included
        return [(*lead, *x.shape[-rank:]) for x, rank in zip(self.state, ranks, strict=True)]

    def forward(self, save_states: bool, *, last_state: bool = True) -> tuple[Tensor, ...]:
        """Return what :meth:`results` returns, and the saved states, or N = 0 of them."""
        batch, length, _, dim = self.views[0].shape
        count = num_checkpoints(length, dim, self.mini_batch_size, self.layers)
        kept = [self._empty(s) for s in self._state_shapes(count if save_states else 0, batch)]
        return *self.results(last_state, kept), *kept

    def results(self, last_state: bool, kept: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return o, and with ``last_state`` the last state; states to save are put in ``kept``."""
        q = self.views[0]
        o = q.new_empty(q.shape)
        shapes = self._state_shapes(q.shape[0]) if last_state else ()
        last = [self._empty(shape) for shape in shapes]
        self._run("forward", _Outputs.pack(*_tokens(o), *_state(last), *_state(kept)))
        return o, *last

    def part(
        self, sums: Sequence[Tensor], position: int | Tensor, return_state: bool
    ) -> list[Tensor]:
        """Run tokens of one open mini-batch, whose θ' is the initial state of this call.

        Args:
            sums: Σ η_s ∂ℓ_s/∂θ' over the tokens of the mini-batch before these, [B, H, ...].
            position: the number of tokens of the mini-batch before these, as an int for all
                sequences, or as an int64 tensor [B].
            return_state: whether to return more than o.

        Returns:
            o; with ``return_state`` also θ_T of the last token, the sums after it unless
            ``position`` is an int and these tokens complete the mini-batch, and θ' of the next
            token if ``position`` is a tensor.
        """
        q = self.views[0]
        each = isinstance(position, Tensor)
        full = not each and position + q.shape[1] == self.mini_batch_size
        sums = [_plain(x) for x in sums] if each or position else []
        wanted = return_state, return_state and not full, return_state and each
        shapes = self._state_shapes(q.shape[0])
        o = q.new_empty(q.shape)
        states = [[self._empty(s) for s in shapes] if given else [] for given in wanted]
        open_mini_batch = _OpenMiniBatch.pack(
            *_tokens(o),
            *(field for state in (sums, *states) for field in _state(state)),
            *((position.data_ptr(), 0) if each else (0, position)),
        )
        self._run("part", open_mini_batch)
        return [o, *(x for state in states for x in state)]

    def backward(
        self,
        incoming: Sequence[Tensor],
        kept: Sequence[Tensor],
        views: tuple[Tensor | None, Tensor, Tensor],
    ) -> list[Tensor | None]:
        """Return the gradients of eta, the state, the norm and the scale, per head and image.

        With convolutions, the gradients of q's and of k's taps [B, H, K + 1, d] follow; the last
        tap is the bias.

        Args:
            incoming: gradients of o and of the last state.
            kept: the states that the forward pass saved.
            views: tensors [B, T, H, d] for the gradients of q, k and v. None for q where q is k:
                the gradient of k is then the sum of both.
        """
        q = self.views[0]
        batch, _, heads, dim = q.shape
        o = contiguous_last(incoming[0].to(q.dtype))
        last, kept = ([_plain(x) for x in state] for state in (incoming[1:], kept))
        dstate = [self._empty(shape) for shape in self._state_shapes(batch)]
        shapes = (
            self.others[0].shape,
            *2 * [(batch, heads, dim)],
            (batch, heads, self.mini_batch_size),
        )
        deta, *rest = (
            None if like is None else self._empty(shape)
            for like, shape in zip(self.others, shapes, strict=True)
        )
        taps = [self._empty((batch, heads, w.shape[-1] + 1, dim)) for w, _ in self.taps]
        gradients = _Gradients.pack(
            *_tokens(o),
            *(*_state(last), *_state(kept)),
            *(field for view in views for field in _tokens(view)),
            *([tap.data_ptr() for tap in taps] or (0, 0)),
            pointer(deta),
            *_state(dstate),
            *map(pointer, rest),
        )
        self._run("backward", gradients)
        return [deta, *dstate, *rest, *taps]

    def _run(self, direction: str, results: bytes) -> None:
        op = "ttt_linear" if self.layers == 1 else "ttt_mlp"
        run_kernel(f"vision_ttt_{op}_{direction}", self.problem, results)


def _forward(inputs: Any, save_states: bool) -> tuple[Tensor, ...]:
    return LearnerCall(inputs).forward(save_states)


def _inference(inputs: Any, wanted: int) -> tuple[Tensor, ...]:
    return LearnerCall(inputs).results(last_state=wanted > 1)


def _backward(inputs: Any, *grads_and_kept: Tensor) -> tuple[Tensor, ...]:
    call, q = LearnerCall(inputs), inputs.q
    states = 2 * call.layers
    views = tuple(q.new_empty(q.shape) for _ in range(3))
    shares = call.backward(grads_and_kept[:-states], grads_and_kept[-states:], views)
    tensors = inputs[3:-3]  # all but the views
    return *views, *(summed(*pair, q) for pair in zip(shares, tensors, strict=True))


BACKEND = Backend(_forward, _backward, refusal, _inference)
"""Arguments and results are those of :mod:`vision_ttt.ops._learner_dual`."""


def _plain(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
