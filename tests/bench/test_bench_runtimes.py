"""Models as one deploys them: the same logits, missing runtimes named, wrong ones not timed."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from vision_ttt.bench import names, runtimes
from vision_ttt.bench.contenders import Contender, find_contenders
from vision_ttt.bench.machine import describe_run, installed
from vision_ttt.bench.models import measure_models
from vision_ttt.bench.protocol import Settings
from vision_ttt.export.extensions import LIBRARIES

SMALL = "test_vit"  # timm's own for tests: half of DeiT's depth
CPU = torch.device("cpu")
DEIT, NANO = "deit_tiny_patch16_224", "vittt_nano_patch4_32"
BRIEF = Settings(CPU, repeats=1, shortest_repeat=0)


def _rows(labels, settings=BRIEF):
    run = describe_run(["vision-ttt", "bench"], CPU)
    (rows,) = measure_models(find_contenders(labels), [32], settings, run, train=False)
    return rows


def test_every_runtime_has_a_name_for_the_command_line():
    assert runtimes.TABLE.keys() == names.RUNTIMES.keys()
    assert [contender.label for contender in find_contenders(names.DEPLOYED)] == [*names.DEPLOYED]


@pytest.mark.parametrize(
    ("runtime", "model", "dtype"),
    [
        ("openvino", SMALL, torch.float32),
        pytest.param("openvino", DEIT, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("openvino-kernels", NANO, torch.float32, marks=pytest.mark.slow),
        pytest.param("openvino-kernels", NANO, torch.bfloat16, marks=pytest.mark.slow),
        ("onnxruntime", SMALL, torch.float32),
        ("onnxruntime-kernels", NANO, torch.float32),
        pytest.param("onnxruntime-kernels", NANO, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("onnxruntime", NANO, torch.float32, marks=pytest.mark.slow),
        ("for_inference", NANO, torch.float32),
        ("for_inference", DEIT, torch.bfloat16),
        pytest.param("inductor", DEIT, torch.float32, marks=pytest.mark.slow),
        pytest.param("inductor", DEIT, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_runtime_computes_the_models_logits(runtime: str, model: str, dtype: torch.dtype):
    reason = runtimes.refusal(runtime, dtype)
    if reason is not None:
        pytest.skip(reason)
    modules = Contender(model).build(32).eval()
    images = torch.randn(2, 3, 32, 32)
    deployed = runtimes.deploy(runtime, copy.deepcopy(modules), images, dtype)
    other_weights = Contender(model).build(32).eval()
    assert runtimes.find_difference(deployed, other_weights, images, dtype) is not None
    assert runtimes.find_difference(deployed, modules, images, dtype) is None
    fresh = torch.randn(2, 3, 32, 32)  # nothing of the first images is kept
    assert runtimes.find_difference(deployed, modules, fresh, dtype) is None


def test_what_differs_is_told():
    model, images = nn.Flatten(), torch.ones(2, 3, 1, 1)
    tell = runtimes.find_difference
    assert tell(lambda x: x.flatten(1) * (1 + 9e-4), model, images, torch.float32) is None
    told = tell(lambda x: x.flatten(1) * 1.01, model, images, torch.float32)
    assert told == "logits are off by 0.01 of the largest, over 1e-03"
    assert "not finite" in tell(lambda x: x.flatten(1) / 0, model, images, torch.float32)
    assert "[3]" in tell(lambda x: x[0].flatten(), model, images, torch.float32)


def test_rows_of_deployed_models():
    rows = _rows([NANO, f"{NANO}:for_inference"])
    assert [row.contender for row in rows] == [NANO, f"{NANO}:for_inference"]
    assert all(row.seconds > 0 for row in rows)
    assert rows[0].macs == rows[1].macs
    assert rows[1].peak_bytes is None
    assert rows[1].memory_runs == 0


def test_rows_of_packed_models_name_their_kernels():
    rows = _rows([f"{NANO}:for_inference", f"{DEIT}:for_inference"])
    assert rows[0].kernels == "packed_linear, packed_patches, packed_vittt_blocks"
    assert "attention by" in rows[1].kernels  # hidden in inference mode
    assert "packed_linear" in rows[1].kernels


def test_a_missing_runtime_is_named_and_left_out(monkeypatch, caplog):
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    rows = _rows([NANO, f"{DEIT}:openvino"])
    assert rows[0].seconds > 0
    assert rows[1].failure == (
        "onnx, onnxscript, openvino not installed: pip install 'vision-ttt[bench]'"
    )
    assert f"{DEIT}:openvino at 32² is not timed: onnx, onnxscript" in caplog.text


def test_a_runtime_that_lacks_the_dtype_says_so(monkeypatch):
    monkeypatch.setattr(runtimes, "find_spec", lambda name: object())
    told = runtimes.refusal("onnxruntime", torch.bfloat16)
    assert told == "ONNX Runtime computes in float32 here"
    assert runtimes.refusal("openvino", torch.bfloat16) is None
    missing = (Path("/nowhere/_openvino.so"), "the extension of OpenVINO")
    monkeypatch.setitem(LIBRARIES, "openvino", missing)
    told = runtimes.refusal("openvino-kernels", torch.float32)
    assert told.startswith("_openvino.so, the extension of OpenVINO, is not built")


def test_a_wrong_or_failing_runtime_is_not_timed_and_ours_is_not_excused(monkeypatch):
    def wrong(model, images, dtype):
        return lambda images: model(images) + 1

    def fails(model, images, dtype):
        raise ValueError("an operator\nis missing")

    monkeypatch.setattr(runtimes, "find_spec", lambda name: object())
    monkeypatch.setattr(
        runtimes,
        "TABLE",
        {name: runtimes.Runtime(fails) for name in runtimes.TABLE}
        | {"openvino": runtimes.Runtime(wrong)},
    )
    wrong_row, failed_row = _rows([f"{NANO}:openvino", f"{NANO}:onnxruntime"])
    assert wrong_row.failure.startswith("logits are off by")
    assert failed_row.failure == "ValueError: an operator is missing"
    assert wrong_row.seconds is failed_row.seconds is None
    with pytest.raises(ValueError, match="an operator"):
        _rows([f"{NANO}:for_inference"])


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
@pytest.mark.parametrize(("dtype", "hint"), [(torch.float32, "f32"), (torch.bfloat16, "bf16")])
def test_openvino_gets_torchs_threads_and_the_dtype(dtype, hint, monkeypatch):
    import openvino

    asked = []
    compile_model = openvino.Core.compile_model

    def spy(self, model, device, settings):
        asked.append(settings)
        return compile_model(self, model, device, settings)

    monkeypatch.setattr(openvino.Core, "compile_model", spy)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
        runtimes.deploy("openvino", model, torch.randn(1, 3, 2, 2), dtype)
    finally:
        torch.set_num_threads(threads)
    assert asked[0]["INFERENCE_NUM_THREADS"] == 1
    assert asked[0]["INFERENCE_PRECISION_HINT"] == hint
