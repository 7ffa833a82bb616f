"""Interleaved timing: the order of turns, fresh inputs, statistics."""

import pytest
import torch

from vision_ttt.bench import protocol
from vision_ttt.bench.protocol import (
    OUT_OF_MEMORY,
    WARMUP_CALLS,
    Dropouts,
    Settings,
    Timing,
    interleave,
    summarise,
    unless_out_of_memory,
)

CPU = torch.device("cpu")


def test_contenders_take_turns_on_fresh_inputs_in_changing_order():
    calls, inputs, advanced = [], [], []

    def contender(name):
        def prepare():
            inputs.append(torch.randn(3))
            return lambda: calls.append(name)

        return prepare

    both = {"a": contender("a"), "b": contender("b")}
    timings = interleave(both, Settings(CPU, repeats=3, shortest_repeat=0), advance=advanced.append)
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

    timing = interleave({"a": prepare}, Settings(CPU, repeats=1, shortest_repeat=0.9))["a"]
    assert timing.seconds == pytest.approx(0.5)  # four calls of 0.25 s would fill 0.9 s
    assert next(durations, None) is None


def test_median_and_interquartile_range():
    assert summarise([5.0, 1.0, 2.0, 100.0, 3.0]) == Timing(3.0, 3.0)
    assert summarise([2.0]) == Timing(2.0, None)


def test_nothing_to_time():
    with pytest.raises(ValueError, match="got 0 and 5"):
        interleave({}, Settings(CPU))


def test_who_runs_out_of_memory_drops_out():
    calls = []

    def fails_in_call(number: int):
        count = iter(range(100))

        def call():
            if next(count) == number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

        return lambda: call

    contenders = {
        "at once": fails_in_call(0),
        "in a turn": fails_in_call(WARMUP_CALLS + 1),
        "never": lambda: lambda: calls.append(1),
    }
    timings = interleave(contenders, Settings(CPU, repeats=3, shortest_repeat=0))
    assert timings["at once"] == timings["in a turn"] == Timing(None, None, OUT_OF_MEMORY)
    assert timings["never"].seconds > 0
    assert not timings["never"].failure
    assert len(calls) == WARMUP_CALLS + 3


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError("no memory for the scratch of a thread"),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_want_of_memory_is_an_answer(error: Exception):
    def step():
        raise error

    assert unless_out_of_memory(step) == (None, OUT_OF_MEMORY)


def test_the_allocator_of_a_cpu_says_what_we_look_for():
    assert unless_out_of_memory(lambda: torch.empty(2**62, dtype=torch.uint8)) == (
        None,
        OUT_OF_MEMORY,
    )


def test_other_errors_are_not_hidden():
    def step():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        unless_out_of_memory(step)
    assert unless_out_of_memory(lambda: 3) == (3, "")


def test_who_takes_too_long_is_not_timed(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: now[0])

    def contender(name: str, *seconds: float):
        durations = iter(seconds)

        def call():
            calls.append(name)
            now[0] += next(durations)

        return lambda: call

    # The first call may take long: it pays for what is built once.
    contenders = {"slow": contender("slow", 1, 3), "quick": contender("quick", 9, 2, 2)}
    timings = interleave(contenders, Settings(CPU, repeats=1, longest_call=2.5))
    assert timings["slow"] == Timing(None, None, "a call takes over 2.5 s")
    assert timings["quick"].seconds == pytest.approx(2)
    assert calls == ["slow", "slow", "quick", "quick", "quick"]


def test_dropouts_stay_out_from_the_smallest_size_that_they_failed_at():
    dropouts = Dropouts()
    assert dropouts.reason("a", 64) == ""
    dropouts.add("a", 64, "64²", "too slow")
    dropouts.add("a", 32, "32²", "out of memory")
    dropouts.add("a", 48, "48²", "too slow")
    assert [dropouts.reason("a", size) for size in (31, 32, 64)] == [
        "",
        "out of memory at 32²",
        "out of memory at 32²",
    ]
    assert dropouts.reason("b", 64) == ""


class _Queue:
    """What torch.cuda offers to time calls, on a device that works off its queue in `_Queue.now`
    milliseconds; events record the time at which they are reached."""

    now = 0.0
    log: tuple[str, ...] = ()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = _Queue.now
            _Queue.log += ("event",)

        def elapsed_time(self, end: "_Queue.Event") -> float:
            assert _Queue.log[-1] == "synchronize", "events are read before they happened"
            return end.time - self.time


def test_cuda_is_timed_by_events_around_the_call_only(monkeypatch):
    monkeypatch.setattr(_Queue, "now", 0.0)
    monkeypatch.setattr(_Queue, "log", ())
    evictions = []

    def say(what: str, milliseconds: float):
        _Queue.now += milliseconds
        _Queue.log += (what,)

    class Cache:
        L2_cache_size = 1000

    class Memory:
        def zero_(self):
            say("evict", 7)

    def empty(size, *, dtype, device):
        evictions.append((size, dtype, device.type))
        return Memory()

    monkeypatch.setattr(torch.cuda, "Event", _Queue.Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: say("synchronize", 1000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Cache)
    monkeypatch.setattr(protocol.torch, "empty", empty)
    durations = iter([400, 100, 90, 110, 300, 300])  # ms: warm-up, then turns of two calls

    def prepare():
        say("inputs", 50)
        return lambda: say("call", next(durations))

    cuda = torch.device("cuda")
    timing = interleave({"a": prepare}, Settings(cuda, repeats=2, shortest_repeat=0.2))["a"]
    assert timing.seconds == pytest.approx((0.1 + 0.3) / 2)
    once = ("inputs", "evict", "event", "call", "event")
    # The queue is drained once per turn, not between its calls.
    assert _Queue.log == 2 * (*once, "synchronize") + 2 * (*once, *once, "synchronize")
    assert set(evictions) == {(4000, torch.uint8, "cuda")}
