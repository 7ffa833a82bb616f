"""Models whose weights are divided among processes compute what whole ones compute."""

import re
from pathlib import Path

import pytest
from torch.distributed import is_gloo_available

import forked_python

SCRIPT = Path(__file__).with_name("divided_models.py")
PAGE = Path(__file__).parents[2] / "docs/with-other-tools.md"


@pytest.mark.skipif(not is_gloo_available(), reason="this PyTorch has no gloo")
def test_the_documented_plan_gives_every_family_s_numbers(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (plan,) = (block for block in blocks if "def tensor_parallel_plan" in block)
    (tmp_path / "plan.py").write_text(plan, encoding="utf-8")
    with open(tmp_path / "said", "w") as said:
        processes = [
            forked_python.start(
                [str(SCRIPT), str(rank), str(tmp_path / "meeting"), str(tmp_path / "plan.py")],
                stdout=said,
                stderr=said,
            )
            for rank in range(2)
        ]
        try:
            codes = [process.wait(100) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert codes == [0, 0], (tmp_path / "said").read_text()
