"""The measurement of language models: prefill and decode against the context, training steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from studies.bench.language_contenders import (
    LanguageContender,
    cache_bytes,
    copied,
    sizes_of,
)
from vision_ttt.bench.protocol import Advance, Dropouts, Prepare, Settings, interleave
from vision_ttt.bench.rows import DECODE, Row, Run
from vision_ttt.bench.runtimes import TOLERANCES
from vision_ttt.errors import UserError
from vision_ttt.freed_memory import keep_freed_memory
from vision_ttt.language import TTTConfig
from vision_ttt.ops import use_backend

PREFILL, STEP = "prefill", "training step"
"""What is measured beside decode."""

_CHECKED_TOKENS = 33  # on which a packed model is compared with its modules


def steps_of_language(
    readers: Sequence[LanguageContender],
    learners: Sequence[LanguageContender],
    contexts: Sequence[Sequence[int]],
    repeats: int,
) -> int:
    """The most calls of `advance` by :func:`measure_language`, by the contexts of each kind."""
    prefill, decode, train = map(len, contexts)
    prefilling = sum(reader.variant != "static" for reader in readers)
    timed = prefilling * prefill + len(readers) * decode + len(learners) * train
    return timed * (repeats + 1)


def measure_language(
    readers: Sequence[LanguageContender],
    learners: Sequence[LanguageContender],
    size: TTTConfig,
    settings: Settings,
    run: Run,
    *,
    contexts: Sequence[int],
    decode_contexts: Sequence[int],
    decode_tokens: int,
    train_contexts: Sequence[int],
    advance: Advance = lambda _name: None,
) -> Iterator[list[Row]]:
    """Measure language models against each other, one kind of call and one length after the other.

    "prefill" is a call on a context, to the last token's logits and the cache. "decode" is the time
    per token of greedy decoding after a context, which is read before and is not timed; each call
    begins at that context anew. A training step is the forward and backward pass of the loss in
    training mode, with float32 weights under autocast to the dtype, without an optimiser. Weights
    and tokens are random; no call's time depends on them.

    The rows' ``held_bytes`` are the cache's memory: after the context, or after the decoded tokens.

    A packed model is compared with its modules before it is timed, and is not timed where its
    logits are others. One that runs out of memory or of time is not measured at that length or
    above. The row has the reason.

    Args:
        readers: the contenders of prefill and decode. A static cache is measured by decode alone.
        learners: the contenders of training steps.
        size: the models' sizes.
        contexts, decode_contexts, train_contexts: numbers of tokens.
        decode_tokens: the tokens that a call decodes.

    Yields:
        The rows of one kind of call at one length.
    """
    if settings.device.type == "cpu":
        keep_freed_memory()
    measure = functools.partial(_measure, size=size, settings=settings, run=run, advance=advance)
    deployed = {reader: _deployed(reader, size, settings) for reader in readers}
    prefilling = {r: model for r, model in deployed.items() if r.variant != "static"}
    dropouts = Dropouts()
    for tokens in contexts:
        calls = {
            reader: (_prefill(reader, model, size, settings, tokens), failure)
            for reader, (model, failure) in prefilling.items()
        }
        yield measure(PREFILL, tokens, calls, dropouts)
    dropouts = Dropouts()
    for tokens in decode_contexts:
        calls = {
            reader: (_decode(reader, model, size, settings, tokens, decode_tokens), failure)
            for reader, (model, failure) in deployed.items()
        }
        yield measure(DECODE, tokens, calls, dropouts, per_call=decode_tokens)
    del deployed, prefilling
    dropouts = Dropouts()
    trained = {learner: learner.build(size).to(settings.device).train() for learner in learners}
    for tokens in train_contexts:
        calls = {
            learner: (_step(learner, model, size, settings, tokens), "")
            for learner, model in trained.items()
        }
        yield measure(STEP, tokens, calls, dropouts)


class _Call:
    """What prepares a contender's call, and the memory of the cache that it leaves."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.held: int | None = None


def _measure(
    measured: str,
    tokens: int,
    calls: Mapping[LanguageContender, tuple[_Call, str]],
    dropouts: Dropouts,
    *,
    size: TTTConfig,
    settings: Settings,
    run: Run,
    advance: Advance,
    per_call: int = 1,
) -> list[Row]:
    """Time the calls in turns; one row per contender, in seconds per call or per its tokens."""
    failed = {
        contender.label: failure or dropouts.reason(contender.label, tokens)
        for contender, (_, failure) in calls.items()
    }
    ready = {contender.label: call.prepare for contender, (call, _) in calls.items()}
    timings = interleave(ready, settings, failed=failed, advance=advance) if ready else {}
    rows = []
    for contender, (call, _) in calls.items():
        timing = timings[contender.label]
        if timing.failure:
            where = f"{tokens:,} tokens, {measured}"
            dropouts.add(contender.label, tokens, where, timing.failure)
        done = timing.seconds is not None
        rows.append(
            Row(
                what="lm",
                contender=contender.label,
                measured=measured,
                tokens=tokens,
                batch_size=settings.batch_size,
                device=settings.device.type,
                dtype=settings.dtype_name,
                compiled=False,
                seconds=timing.seconds / per_call if done else None,
                seconds_spread=None if timing.spread is None else timing.spread / per_call,
                repeats=settings.repeats,
                macs=multiply_adds(contender.name, tuple(sizes_of(size).items()), measured, tokens),
                run=run,
                case=_case(size),
                autocast=measured == STEP and settings.dtype != torch.float32,
                failure=timing.failure,
                held_bytes=call.held,
            )
        )
    return rows


def _case(size: TTTConfig) -> str:
    return (
        f"{size.num_hidden_layers} blocks of {size.hidden_size} and {size.intermediate_size}"
        f" channels, {size.num_attention_heads} heads, {size.vocab_size:,} words"
    )


def remarks(rows: Sequence[Row]) -> list[str]:
    """Sentences on how each row of TTT compares with those of all others, and on their memory."""
    found = throughputs(rows)
    for row in rows:
        beside = (row.measured, row.tokens, row.batch_size, row.run)
        for other in rows:
            same = (other.measured, other.tokens, other.batch_size, other.run) == beside
            if other is row or not same:
                continue
            if None in (row.seconds, other.seconds) or not row.contender.startswith("ttt"):
                continue
            if row.contender.endswith(":dual"):
                continue
            sentence = (
                f"{row.contender}, {row.measured}, {row.tokens:,} tokens: "
                f"{other.seconds / row.seconds:.2f} times as fast as {other.contender}"
            )
            if row.held_bytes is not None and other.held_bytes:
                share = row.held_bytes / other.held_bytes
                sentence += f", its state {share:.2%} of the other's cache"
            found.append(sentence)
    return found


def throughputs(rows: Sequence[Row]) -> list[str]:
    """Sentences on the most tokens per second of each contender, where it ran several batches."""
    groups: dict[tuple[str, str, int | None], list[Row]] = {}
    for row in rows:
        if row.seconds is not None:
            groups.setdefault((row.contender, row.measured, row.tokens), []).append(row)
    found = []
    for (contender, measured, tokens), own in groups.items():
        if len({row.batch_size for row in own}) < 2:
            continue
        per_call = 1 if measured == DECODE else tokens

        def rate(row: Row, per_call: int = per_call) -> float:
            return row.batch_size * per_call / row.seconds

        best = max(own, key=rate)
        found.append(
            f"{contender}, {measured}, {tokens:,} tokens: {rate(best):,.0f} tokens per second at "
            f"batch {best.batch_size}, the largest measured {max(r.batch_size for r in own)}"
        )
    return found


def _deployed(
    contender: LanguageContender, size: TTTConfig, settings: Settings
) -> tuple[nn.Module, str]:
    """A model for inference, and how its packed form differs from its modules, if it does."""
    model = contender.build(size).eval()
    if contender.packs and settings.device.type != "cpu":
        raise UserError(f"{contender.label} is for a CPU; device is {settings.device.type}")
    deployed = contender.deploy(model, settings.dtype).to(settings.device)
    if not contender.packs:
        return deployed, ""
    tokens = _random(size, settings, _CHECKED_TOKENS)
    with torch.inference_mode():
        wanted, _ = contender.read(model, tokens)
        got, _ = contender.read(deployed, tokens)
    error = ((got.float() - wanted).abs().max() / wanted.abs().max()).item()
    tolerance = TOLERANCES[settings.dtype]
    if error <= tolerance:
        return deployed, ""
    return deployed, f"logits are off by {error:.2g} of the largest, over {tolerance:.0e}"


def _random(size: TTTConfig, settings: Settings, tokens: int) -> Tensor:
    return torch.randint(size.vocab_size, (settings.batch_size, tokens), device=settings.device)


def _prefill(
    contender: LanguageContender, model: nn.Module, size: TTTConfig, settings: Settings, tokens: int
) -> _Call:
    def prepare() -> Callable[[], object]:
        ids = _random(size, settings, tokens)

        @torch.inference_mode()
        def call() -> None:
            _, cache = contender.read(model, ids)
            own.held = cache_bytes(cache)

        return call

    own = _Call(prepare)
    return own


def _decode(
    contender: LanguageContender,
    model: nn.Module,
    size: TTTConfig,
    settings: Settings,
    tokens: int,
    count: int,
) -> _Call:
    @functools.cache
    def context() -> tuple[Tensor, Any]:
        """The first token to decode from [B, 1], and the cache after the context."""
        with torch.inference_mode():
            logits, cache = contender.read(model, _random(size, settings, tokens), room=count)
            return logits.argmax(-1), cache

    def prepare() -> Callable[[], object]:
        first, cache = context()
        with torch.inference_mode():
            cache = copied(cache)

        @torch.inference_mode()
        def call() -> None:
            token, state = first, cache
            for _ in range(count):
                logits, state = contender.read(model, token, state)
                token = logits.argmax(-1)
            own.held = cache_bytes(state)

        return call

    own = _Call(prepare)
    return own


def _step(
    contender: LanguageContender, model: nn.Module, size: TTTConfig, settings: Settings, tokens: int
) -> _Call:
    def prepare() -> Callable[[], object]:
        ids = _random(size, settings, tokens)
        model.zero_grad(set_to_none=True)

        def call() -> None:
            low = settings.dtype != torch.float32
            with (
                contender.ops(),
                torch.autocast(settings.device.type, settings.dtype, enabled=low),
            ):
                loss = contender.loss(model, ids)
            with contender.ops():
                loss.backward()

        return call

    return _Call(prepare)


@functools.cache
def multiply_adds(name: str, sizes: tuple[tuple[str, int], ...], measured: str, tokens: int) -> int:
    """The multiply-adds of one sequence's forward pass; of decode, of one token after so many.

    Counted on the meta device, the ops by their formulas, whichever backend a contender runs. Of
    attention the pairs of a token and one up to it count, which is what its fused kernel computes.

    Args:
        name: of a model.
        sizes: the items of :func:`studies.bench.language_contenders.sizes_of`.
        measured: the kind of call.
        tokens: of the call, or before it.
    """
    contender = LanguageContender(name, name, "")
    with torch.device("meta"):
        model = contender.build(TTTConfig(**dict(sizes))).eval()
        ids = torch.zeros(1, tokens, dtype=torch.int64)
    if name == "llama":
        return _llama_multiply_adds(model, measured, tokens)
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), use_backend(None):
        if measured == STEP:
            with counter:
                model(ids, use_cache=False)
        elif measured == PREFILL:
            with counter:
                contender.read(model, ids)
        else:
            _, cache = contender.read(model, ids)
            with counter:
                contender.read(model, ids[:, :1], cache)
    return counter.get_total_flops() // 2


def _llama_multiply_adds(model: nn.Module, measured: str, tokens: int) -> int:
    """As :func:`multiply_adds`: transformers reads tokens' numbers, which meta tensors lack."""
    linear = sum(x.weight.numel() for x in model.modules() if isinstance(x, nn.Linear))
    head = model.lm_head.weight.numel()
    run = 1 if measured == DECODE else tokens
    predicted = tokens if measured == STEP else 1
    pairs = tokens + 1 if measured == DECODE else tokens * (tokens + 1) // 2
    attention = 2 * pairs * model.config.hidden_size * model.config.num_hidden_layers
    return run * (linear - head) + predicted * head + attention
