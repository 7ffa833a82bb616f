"""The tables of the pages are those of the committed rows."""

import re
from pathlib import Path

import pytest

from studies.bench.headline import headline
from studies.bench.page import markdown
from studies.deletion.results import read_deletion_results
from studies.deletion.tables import deletion_markdown
from studies.sweeps import SWEEPS
from studies.sweeps.results import read_results
from studies.sweeps.tables import markdown as sweep_markdown
from vision_ttt.bench.rows import read_rows

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("studies/**/*.md")]
TABLES = [
    pytest.param(name, table, id=name)
    for page in PAGES
    for name, table in re.findall(
        r"<!-- bench:(\S+) -->\n(.*?)\n<!-- /bench -->", page.read_text(encoding="utf-8"), re.DOTALL
    )
]
BETWEEN = {"backbones-cpu": (768, 2048), "backbones-train-cpu": (512, 2048)}
"""Tables with exponents of time → the sizes of the fit."""


@pytest.mark.parametrize(("name", "table"), TABLES)
def test_a_table_of_a_page_is_that_of_the_committed_rows(name: str, table: str):
    measured = ROOT / "benchmarks/results"
    studied = ROOT / "studies/results" / f"{name}.csv"
    if name == "headline":
        rows = read_rows(measured / "models-cpu.csv")
        assert table == headline(rows, "vittt_tiny_patch16_224:for_inference")
    elif name == "deletion-insertion":
        assert table == deletion_markdown(read_deletion_results(studied))
    elif name in SWEEPS:
        assert table == sweep_markdown(SWEEPS[name], read_results(studied))
    else:
        file = studied if studied.exists() else measured / f"{name}.csv"
        assert table == markdown(read_rows(file), between=BETWEEN.get(name))


def test_every_kind_of_table_is_among_them():
    assert {"headline", "deletion-insertion", "models-cpu", "lm-cpu", *BETWEEN} <= {
        each.id for each in TABLES
    }
