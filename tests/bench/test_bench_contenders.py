"""Contenders: names, kinds of attention, models of the right size; rows of tiny models."""

import pytest
import torch

from vision_ttt.acceleration import COMPOSITES
from vision_ttt.bench.contenders import Contender, find_contenders, is_ours
from vision_ttt.bench.models import measure_models, multiply_adds, steps_of_models
from vision_ttt.bench.protocol import Settings
from vision_ttt.errors import UserError
from vision_ttt.ops import _native, use_backend

DEIT, NANO = "deit_tiny_patch16_224", "vittt_nano_patch4_32"
CPU = torch.device("cpu")


def test_attention_is_a_contender_of_each_kind():
    found = find_contenders([NANO, DEIT, f"{DEIT} (plain attention)"])
    assert [contender.label for contender in found] == [
        NANO,
        f"{DEIT} (fused attention)",
        f"{DEIT} (plain attention)",
    ]
    assert find_contenders([found[2].label]) == [found[2]]
    assert [contender.fuses_attention for contender in found] == [False, True, False]


def test_a_runtime_is_a_contender_of_its_own():
    names = [f"{DEIT}:openvino", f"{NANO}:for_inference", f"{DEIT}:openvino"]
    found = find_contenders(names)
    assert found == [Contender(DEIT, runtime="openvino"), Contender(NANO, runtime="for_inference")]
    assert [contender.label for contender in found] == names[:2]
    assert [is_ours(name) for name in (*names, NANO, DEIT, "backend")] == [
        *(False, True, False, True, False, False)
    ]


@pytest.mark.parametrize(("name", "of_a_block"), [(NANO, 2), ("vim_nano_patch4_32", 1)])
def test_training_by_composite_ops_is_a_contender_that_is_asked_for(name, of_a_block):
    (found,) = find_contenders([f"{name} (for_training)"])
    assert (found.label, found.fuses_attention) == (f"{name} (for_training)", False)
    assert is_ours(found.label)
    plain = Contender(name).build(32)
    for model in (found.build(32), found.build(None)):
        layers = [module for module in model.modules() if isinstance(module, COMPOSITES)]
        assert len(layers) == of_a_block * len(model.blocks)
    assert not any(isinstance(module, COMPOSITES) for module in plain.modules())
    assert multiply_adds(found, 32) == multiply_adds(Contender(name), 32)


@pytest.mark.parametrize(("kind", "fused"), [("fused attention", 12), ("plain attention", 0)])
def test_the_label_tells_which_attention_runs(kind: str, fused: int, monkeypatch):
    import timm.layers.attention as timm_attention

    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **options):
        calls.append(1)
        return kernel(*args, **options)

    monkeypatch.setattr(timm_attention.F, "scaled_dot_product_attention", counted)
    model = Contender(DEIT, kind).build(32).eval()
    with torch.inference_mode():
        assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert len(calls) == fused


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("vittt_tinny_patch16_224", "nearest: vittt_tiny_patch16_224"),
        (f"{NANO} (plain attention)", f"accepted: {NANO}, {NANO} (for_training), {NANO}:for_inf"),
        (
            f"{DEIT} (for_training)",
            f"accepted: {DEIT} (fused attention), {DEIT} (plain attention)",
        ),
        (f"{NANO}:openvino (for_training)", f"accepted: {NANO}, {NANO} (for_training)"),
        ("vit3_nano_patch4_32 (for_training)", "accepted: vit3_nano_patch4_32, vit3_nano"),
        (f"{DEIT} (flash)", "plain attention"),
        (
            f"{DEIT}:openvno",
            "accepted: for_inference, inductor, onnxruntime, onnxruntime-kernels",
        ),
        (f"{DEIT}:openvino (plain attention)", f"accepted: {DEIT} .*{DEIT}:openvino"),
    ],
)
def test_unknown_contenders(name: str, told: str):
    with pytest.raises(UserError, match=told.replace("(", r"\(").replace(")", r"\)")):
        find_contenders([name])


@pytest.fixture
def run_():
    from vision_ttt.bench.machine import describe_run

    return describe_run(["vision-ttt", "bench"], CPU)


@pytest.mark.parametrize("train", [False, True])
def test_rows_of_models(train: bool, run_, monkeypatch):
    kept = []
    monkeypatch.setattr(
        "vision_ttt.bench.models.keep_freed_memory", lambda: kept.append("freed memory")
    )
    contenders = find_contenders([NANO])
    settings = Settings(CPU, dtype=torch.bfloat16, batch_size=2, repeats=1, shortest_repeat=0)
    advanced = []
    measured = list(
        measure_models(contenders, [32, 64], settings, run_, train=train, advance=advanced.append)
    )
    assert [len(rows) for rows in measured] == [1, 1]
    small, large = (rows[0] for rows in measured)
    assert small.what == ("train" if train else "models")
    assert (small.resolution, large.resolution) == (32, 64)
    assert (small.dtype, small.batch_size, small.device) == ("bfloat16", 2, "cpu")
    assert small.seconds > 0
    assert 3.5 < large.macs / small.macs < 4.1  # linear in the tokens but for the head
    assert len(advanced) == steps_of_models(1, 2, repeats=1)
    assert kept


@pytest.mark.parametrize("kind", [None, "for_training"])
def test_training_computes_every_gradient_anew(kind, monkeypatch, run_):
    built, received = [], []
    build = Contender.build

    def remember(self, resolution):
        model = build(self, resolution)
        built.append(model)
        model.head.bias.register_hook(received.append)
        return model

    monkeypatch.setattr(Contender, "build", remember)
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    list(measure_models([Contender(NANO, kind)], [32], settings, run_, train=True))
    assert built[0].training
    gradients = [parameter.grad for parameter in built[0].parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert len(received) > 1
    assert torch.equal(built[0].head.bias.grad, received[-1])  # and not their sum


@pytest.mark.parametrize(
    ("dtype", "ours"),
    [
        (
            torch.float32,
            "depthwise_conv2d, directional_conv1d, gated_norm, swiglu, ttt_linear by cpu",
        ),
        (torch.bfloat16, "ttt_linear by cpu"),  # the others are for float32
    ],
    ids=str,
)
@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
def test_rows_tell_which_kernels_ran(dtype: torch.dtype, ours: str, run_):
    contenders = find_contenders([NANO, DEIT])
    settings = Settings(CPU, dtype=dtype, repeats=1, shortest_repeat=0)
    (rows,) = measure_models(contenders, [32], settings, run_, train=False)
    assert [row.kernels for row in rows] == [ours, "attention by flash_attention_for_cpu", ""]
    assert {row.autocast for row in rows} == {False}
    with use_backend("dual"):
        (rows,) = measure_models(contenders[:1], [32], settings, run_, train=True)
    assert rows[0].kernels == "ttt_linear by dual"
    assert rows[0].autocast == (dtype != torch.float32)


@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
@pytest.mark.parametrize("name", ["vim_nano_patch4_32", "mambar_nano_patch4_32"])
def test_rows_tell_which_backend_scans(name: str, run_):
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    contenders = find_contenders([name, f"{name}:for_inference"])
    (rows,) = measure_models(contenders, [32], settings, run_, train=False)
    assert [row.failure for row in rows] == ["", ""]
    assert "selective_scan by cpu" in rows[0].kernels
    assert "packed_mamba_block" in rows[1].kernels
    assert rows[0].macs == rows[1].macs
    with use_backend("dual"):
        (rows,) = measure_models(contenders[:1], [32], settings, run_, train=True)
    assert rows[0].kernels == "selective_scan by dual"


@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        (NANO, "depthwise_conv2d, fused_ttt_linear, swiglu_mlp"),
        ("vim_nano_patch4_32", "fused_mamba"),
    ],
)
def test_rows_tell_which_composite_ops_ran(name: str, kernels: str, run_):
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    contenders = find_contenders([f"{name} (for_training)"])
    (rows,) = measure_models(contenders, [32], settings, run_, train=True)
    assert rows[0].kernels == kernels


def test_fused_attention_must_be(monkeypatch, run_):
    import timm.layers.attention as timm_attention

    def composed(q, k, v, **options):
        return (q @ k.mT).softmax(-1) @ v

    monkeypatch.setattr(timm_attention.F, "scaled_dot_product_attention", composed)
    contenders = find_contenders([DEIT])
    (rows,) = measure_models(
        contenders, [32], Settings(CPU, repeats=1, shortest_repeat=0), run_, train=False
    )
    assert [row.failure for row in rows] == ["no fused attention kernel supports it", ""]
    assert [row.seconds is None for row in rows] == [True, False]


def test_who_fails_is_a_row_and_not_tried_at_larger_sizes(monkeypatch, run_, caplog):
    sizes = []
    build = Contender.build

    def greedy(self, resolution):
        model = build(self, resolution)
        if self.name == DEIT and torch.get_default_device().type == "cpu":
            sizes.append(resolution)
            if resolution >= 48:
                monkeypatch.setattr(model, "forward", _no_memory)
        return model

    monkeypatch.setattr(Contender, "build", greedy)
    contenders = find_contenders([f"{DEIT} (plain attention)", NANO])
    settings = Settings(CPU, repeats=1, shortest_repeat=0)
    measured = measure_models(contenders, [32, 64, 48, 96], settings, run_, train=False)
    failures = [[row.failure for row in rows] for rows in measured]
    assert failures == [
        ["", ""],
        ["out of memory", ""],
        ["out of memory", ""],
        ["out of memory at 48²", ""],
    ]
    assert sizes == [32, 64, 48]
    assert "(plain attention) at 64² is not timed: out of memory" in caplog.text


def _no_memory(images):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_who_takes_too_long_is_a_row(run_):
    settings = Settings(CPU, repeats=1, shortest_repeat=0, longest_call=1e-9)
    (rows,) = measure_models([Contender(NANO)], [32], settings, run_, train=False)
    assert rows[0].failure == "a call takes over 1e-09 s"
    assert rows[0].macs > 0


@pytest.mark.slow
def test_compiled(run_):
    settings = Settings(CPU, compiled=True, repeats=1, shortest_repeat=0)
    (rows,) = measure_models([Contender(NANO)], [32], settings, run_, train=False)
    assert rows[0].compiled
