"""`python -m studies equations`: Vision-TTT's Eqs. 13 and 14 beside what runs."""

import jsonargparse
from rich.table import Table

from studies.bench.equations import equation_rows
from vision_ttt.cli.wide_table import print_whole


def run(arguments: jsonargparse.Namespace) -> int:
    """Show a row for each family, size and resolution."""
    table = Table(
        title="A token mixer, per image",
        caption="counted: products, convolutions and scans of one pass; kept: numbers that a "
        "training pass saves for its backward pass, of ViT with plain attention. Eq. 14 is an "
        "order of growth. Depth-wise convolutions are not in Eq. 13.",
    )
    for heading in ("model", "pixels", "MACs, Eq. 13", "counted", "numbers, Eq. 14", "kept"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in equation_rows(arguments.sizes, arguments.resolutions):
        macs = (f"{each / 1e9:.3f}G" for each in (row.macs, row.counted_macs))
        numbers = (f"{each / 1e6:.2f}M" for each in (row.numbers, row.saved_numbers))
        table.add_row(row.model, f"{row.pixels}²", *macs, *numbers)
    print_whole(table)
    return 0
