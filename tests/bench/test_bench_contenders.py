"""Contenders: names, kinds of attention, models of the right size; rows of tiny models."""

import pytest
import torch

from vision_ttt.bench.contenders import Contender, default_baseline, find_contenders, registered
from vision_ttt.bench.models import measure_models, steps_of_models
from vision_ttt.bench.protocol import Settings
from vision_ttt.errors import UserError

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
    assert default_baseline(contender.label for contender in found) == found[1].label
    assert default_baseline(["a", "b"]) == "a"
    assert default_baseline(["cpu", "dual"]) == "dual"


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
        (f"{NANO} (plain attention)", f"accepted: {NANO}"),
        (f"{DEIT} (flash)", "plain attention"),
    ],
)
def test_unknown_contenders(name: str, told: str):
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        find_contenders([name])


def test_registered_parts_the_names():
    assert registered([NANO, "no_such_model"]) == ([NANO], ["no_such_model"])


@pytest.fixture
def run_():
    from vision_ttt.bench.machine import describe_run

    return describe_run(["vision-ttt", "bench"], CPU)


@pytest.mark.parametrize("train", [False, True])
def test_rows_of_models(train: bool, run_):
    contenders = find_contenders([NANO])
    settings = Settings(CPU, dtype=torch.bfloat16, batch_size=2, repeats=1)
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


def test_training_computes_every_gradient_anew(monkeypatch, run_):
    built = []
    build = Contender.build

    def remember(self, resolution):
        model = build(self, resolution)
        built.append(model)
        return model

    monkeypatch.setattr(Contender, "build", remember)
    settings = Settings(CPU, repeats=1)
    list(measure_models([Contender(NANO)], [32], settings, run_, train=True))
    assert built[0].training
    gradients = [parameter.grad for parameter in built[0].parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.slow
def test_compiled(run_):
    settings = Settings(CPU, compiled=True, repeats=1)
    (rows,) = measure_models([Contender(NANO)], [32], settings, run_, train=False)
    assert rows[0].compiled
