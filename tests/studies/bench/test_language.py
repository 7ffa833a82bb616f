"""bench lm: language models beside a Llama, on small ones."""

import dataclasses
from pathlib import Path

import pytest
import torch

from studies.bench.names import LANGUAGE_MODELS, LANGUAGE_VARIANTS, LEARNING, READING
from vision_ttt.acceleration.composite_linear import CompositeLinear
from vision_ttt.bench.machine import describe_run
from vision_ttt.bench.protocol import Settings
from vision_ttt.bench.rows import append_rows, read_rows
from vision_ttt.bench.tables import tabulate
from vision_ttt.errors import UserError

language = pytest.importorskip("studies.bench.language", exc_type=ImportError)
contenders = pytest.importorskip("studies.bench.language_contenders", exc_type=ImportError)
find = contenders.find_language_contenders

SETTINGS = Settings(torch.device("cpu"), repeats=1, shortest_repeat=0.0)
ALL = [
    label
    for name, variants in LANGUAGE_VARIANTS.items()
    for label in (name, *(f"{name}:{variant}" for variant in variants))
]


@pytest.fixture
def run():
    return describe_run(["vision-ttt", "bench", "lm"], torch.device("cpu"))


@pytest.fixture
def size():
    from vision_ttt.language import TTTConfig

    return TTTConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )


def measure(readers, learners, size, run, settings=SETTINGS, **lengths):
    names = ("contexts", "decode_contexts", "train_contexts")
    lengths = {name: lengths.get(name, []) for name in names}
    found = language.measure_language(
        find(readers), find(learners), size, settings, run, decode_tokens=3, **lengths
    )
    return [row for rows in found for row in rows]


@pytest.mark.slow
def test_every_contender_is_measured(run, size, tmp_path: Path):
    readers = [label for label in ALL if not label.endswith(":for_training")]
    learners = ["ttt-linear:for_training", "ttt-mlp-mamba:dual", "llama"]
    lengths = {"contexts": [20], "decode_contexts": [32, 48], "train_contexts": [20]}
    rows = measure(readers, learners, size, run, **lengths)
    kinds = [(row.measured, row.tokens) for row in rows]
    still = [
        label for label in readers if label != "llama:static"
    ]  # which has no prefill of its own
    assert [r.contender for r in rows] == [*still, *readers, *readers, *learners]
    counts = (len(still), len(readers), len(readers), len(learners))
    calls = (("prefill", 20), ("decode", 32), ("decode", 48), ("training step", 20))
    assert kinds == [call for call, n in zip(calls, counts, strict=True) for _ in range(n)]
    assert [row.failure for row in rows if row.failure] == []
    assert all(row.seconds > 0 and row.macs > 0 for row in rows)
    path = tmp_path / "lm.csv"
    append_rows(path, rows)
    assert read_rows(path) == rows
    headings, lines = tabulate(rows)
    assert headings[:3] == ["contender", "pass", "tokens"]
    assert lines[0][:3] == [readers[0], "prefill", "20"]


def test_states_stay_as_large_and_keys_and_values_grow(run, size):
    names = ["ttt-linear", "ttt-mlp-mamba", "mamba", "llama"]
    rows = measure(names, [], size, run, decode_contexts=[32, 48])
    short, long = rows[:4], rows[4:]
    for name, a, b in zip(names, short, long, strict=True):
        if name == "llama":
            assert b.held_bytes - a.held_bytes == 16 * 2 * 2 * size.hidden_size * 4
            assert b.macs - a.macs == 16 * 2 * 2 * size.hidden_size
        else:
            assert a.held_bytes == b.held_bytes
            assert a.macs == b.macs
        assert a.per_second == pytest.approx(1 / a.seconds)
    weights, biases = 2 * 2 * 16 * 16, 2 * 2 * 16
    assert short[0].held_bytes == 3 * (weights + biases) * 4  # W', b', sums, and both after them


def test_throughput_is_the_largest_over_batches(run, size):
    (row,) = measure(["mamba"], [], size, run, contexts=[16])
    rows = [
        dataclasses.replace(row, batch_size=batch, seconds=seconds)
        for batch, seconds in ((1, 1.0), (2, 1.0), (4, 4.0), (8, None))
    ]
    said = "mamba, prefill, 16 tokens: 32 tokens per second at batch 2, the largest measured 4"
    assert language.throughputs(rows) == [said]
    assert language.throughputs([row]) == []


def test_remarks_compare_with_the_others(run, size):
    names = ["ttt-linear:for_inference", "ttt-linear:dual", "llama"]
    said = language.remarks(measure(names, [], size, run, contexts=[16]))
    assert len(said) == 2
    assert said[1].startswith("ttt-linear:for_inference, prefill, 16 tokens: ")
    assert "times as fast as llama, its state " in said[1]


def test_a_packed_model_with_other_logits_is_not_timed(run, size, monkeypatch):
    monkeypatch.setitem(language.TOLERANCES, torch.float32, -1.0)
    rows = measure(["llama", "llama:for_inference"], [], size, run, contexts=[16])
    assert [row.seconds is None for row in rows] == [False, True]
    assert "of the largest, over -1e+00" in rows[1].failure


def test_decoding_leaves_the_context_as_it_was(size):
    tokens = torch.randint(64, (1, 9))
    for contender in find(["llama", "llama:static", "ttt-linear-mamba"]):
        model = contender.build(size).eval()
        with torch.inference_mode():
            logits, cache = contender.read(model, tokens, room=2)
            before = contenders.cache_bytes(cache)
            own = contenders.copied(cache)
            for _ in range(2):
                _, own = contender.read(model, logits.argmax(-1), own)
            whole, _ = contender.read(model, torch.cat([tokens, logits.argmax(-1)], dim=1), room=2)
            again, _ = contender.read(model, logits.argmax(-1), contenders.copied(cache))
        assert cache.get_seq_length() == 9
        assert contenders.cache_bytes(cache) == before
        torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-5)


def test_the_variant_for_training_runs_composite_ops(size):
    models = [contender.build(size) for contender in find(["ttt-linear:for_training", "ttt-mlp"])]
    assert [isinstance(model.lm_head, CompositeLinear) for model in models] == [True, False]


def test_labels():
    assert set(LANGUAGE_VARIANTS) == set(LANGUAGE_MODELS)
    assert {*READING, *LEARNING} <= set(ALL)
    assert [c.label for c in find(["llama", "llama"])] == ["llama"]
    assert [c.packs for c in find(ALL)].count(True) == 6
    with pytest.raises(UserError, match=r"unknown model 'lama'; nearest: llama"):
        find(["lama"])
