"""What the machine can do at most."""

import pytest
import torch

from tolerances import assert_close
from vision_ttt.bench import rates
from vision_ttt.ops import _native


@pytest.fixture
def _few_turns(monkeypatch):
    monkeypatch.setattr(rates, "_TURNS", 3)


@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
@pytest.mark.usefixtures("_few_turns")
def test_registers_are_faster_than_any_vector_in_memory():
    x = torch.ones(2**12)
    out = torch.empty_like(x)
    in_cache = 2**12 / rates._shortest(lambda: torch.add(x, x, out=out))
    assert rates.fma_peak() > 2 * in_cache


@pytest.mark.usefixtures("_few_turns")
def test_all_rates_are_told():
    measured = rates.measure_rates()
    assert (measured.fma_macs_per_second is None) == (_native.LIBRARY is None)
    assert measured.product_macs_per_second > 1e8
    assert measured.bfloat16_product_macs_per_second > 1e8


def test_without_kernels_the_peak_is_unknown(monkeypatch):
    monkeypatch.setattr(rates, "LIBRARY", None)
    assert rates.fma_peak() is None


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN")
def test_the_packed_product_is_the_product():
    x, weight = torch.randn(17, 32), torch.randn(24, 32)
    with torch.inference_mode():
        assert_close(rates.packed_product(x, weight)(), x @ weight.mT, 1e-5)


@pytest.mark.usefixtures("_few_turns")
def test_a_pytorch_without_the_private_ops_has_the_public_product(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert rates.packed_product(torch.randn(2, 3), torch.randn(4, 3)) is None
    assert rates.product_rate(torch.float32) > 1e8
