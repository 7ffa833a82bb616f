"""Interleaved timing: the order of turns, fresh inputs, statistics."""

import pytest
import torch

from vision_ttt.bench import protocol
from vision_ttt.bench.protocol import WARMUP_CALLS, interleave, summarise

CPU = torch.device("cpu")


def test_contenders_take_turns_on_fresh_inputs_in_changing_order():
    calls, inputs, advanced = [], [], []

    def contender(name):
        def prepare():
            inputs.append(torch.randn(3))
            return lambda: calls.append(name)

        return prepare

    both = {"a": contender("a"), "b": contender("b")}
    timings = interleave(both, repeats=3, device=CPU, shortest_repeat=0, advance=advanced.append)
    assert calls == ["a"] * WARMUP_CALLS + ["b"] * WARMUP_CALLS + list("abbaab")
    assert advanced == list("ababbaab")
    assert len({tuple(x.tolist()) for x in inputs}) == len(calls)
    assert list(timings) == ["a", "b"]


def test_only_the_call_is_timed_and_short_calls_are_averaged(monkeypatch):
    now = [0.0]
    durations = iter([9.0, 0.25, 0.2, 0.4, 0.6, 0.8])  # the first two are the warm-up
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: now[0])

    def prepare():
        now[0] += 100

        def call():
            now[0] += next(durations)

        return call

    timing = interleave({"a": prepare}, repeats=1, device=CPU, shortest_repeat=0.9)["a"]
    assert timing.seconds == pytest.approx(0.5)  # four calls of 0.25 s would fill 0.9 s
    assert next(durations, None) is None


def test_median_and_interquartile_range():
    assert summarise([5.0, 1.0, 2.0, 100.0, 3.0]) == (3.0, 3.0)
    assert summarise([2.0]) == (2.0, 0.0)


def test_nothing_to_time():
    with pytest.raises(ValueError, match="got 0 and 5"):
        interleave({}, repeats=5, device=CPU)
