"""`vision-ttt models`: every model with its parameters and multiply-adds beside the paper's."""

import json
from typing import NamedTuple

import jsonargparse
import torch
from rich.table import Table

from vision_ttt.bench import count_macs, count_parameters
from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.cli.wide_table import print_whole
from vision_ttt.errors import UserError, suggestions
from vision_ttt.models import create_model, list_models
from vision_ttt.models.vittt_ablations import ABLATIONS, model_name
from vision_ttt.pretrained import pretrained_of


class Published(NamedTuple):
    """What its authors report of a model: where, and the figures as printed."""

    source: str
    parameters: str | None
    macs: str | None
    accuracy: float | None


PUBLISHED = {
    "vittt_tiny_patch16_224": Published("Table 1", "6.98M", "1.44G", 77.7),
    "vittt_small_patch16_224": Published("Table 1", "26M", "5.3G", 81.8),
    "vittt_base_patch16_224": Published("Table 1", "102M", "20.3G", 82.7),
    **{
        model_name(name): Published(row.source, row.parameters, row.macs, row.accuracy)
        for name, row in ABLATIONS.items()
    },
    "vit3_tiny_patch16_224": Published("ViT³", "6M", "1.2G", 76.5),
    "vit3_small_patch16_224": Published("ViT³", "24M", "4.8G", 81.6),
    "vit3_base_patch16_224": Published("ViT³", "90M", "18.0G", 82.6),
    "hvit3_tiny": Published("ViT³", "29M", "4.9G", 84.0),
    "hvit3_small": Published("ViT³", "54M", "8.8G", 84.9),
    "hvit3_base": Published("ViT³", "94M", "16.7G", 85.5),
    "vrwkv_tiny_patch16_224": Published("Vision-RWKV", "6.2M", "1.2G", 75.1),
    "vrwkv_small_patch16_224": Published("Vision-RWKV", "23.8M", "4.6G", 80.1),
    "vrwkv_base_patch16_224": Published("Vision-RWKV", "93.7M", "18.2G", 82.0),
    "vim_tiny_patch16_224": Published("Table 1", "7M", "1.5G", 76.1),
    "vim_small_patch16_224": Published("Table 1", "26M", "5.2G", 80.3),
    "vim_base_patch16_224": Published("Table 1", "98M", "18.8G", 81.9),
    "mambar_tiny_patch16_224": Published("Mamba-Reg, Table 3", "9M", None, 77.4),
    "mambar_small_patch16_224": Published("Mamba-Reg, Table 3", "28M", None, 81.4),
    "mambar_base_patch16_224": Published("Mamba-Reg, Table 3", "99M", None, 83.0),
    "mambar_large_patch16_224": Published("Mamba-Reg, Table 3", "341M", None, 83.6),
}


def describe(name: str) -> dict[str, object]:
    """A model's name, input size, parameters and MACs, counted and published, and its weights."""
    with torch.device("meta"):  # counts need shapes only
        model = create_model(name)
    size = tuple(model.pretrained_cfg["input_size"])
    published = PUBLISHED.get(name, Published("", None, None, None))
    return {
        "name": name,
        "input_size": list(size),
        "parameters": count_parameters(model),
        "macs": count_macs(model, size),
        "pretrained": pretrained_of(name),
        "paper": published._asdict(),
    }


def run(arguments: jsonargparse.Namespace) -> int:
    """List the models whose names match."""
    chosen = list_models(arguments.pattern)
    if not chosen:
        known = suggestions(arguments.pattern, list_models())
        raise UserError(f"no model matches {arguments.pattern!r}; {known}")
    with progress_on(plain_console(stderr=True)) as progress:
        rows = [describe(name) for name in progress.track(chosen, description="counting")]
    if arguments.json:
        plain_console().print_json(json.dumps(rows), highlight=False)
        return 0
    table = Table(
        title="Models, at batch 1; the papers' figures in italics",
        caption="MACs counted from what runs. Accuracies are the authors', not measured here.",
    )
    table.add_column("model")
    for heading in ("pixels", "parameters", "paper's", "MACs", "paper's", "top-1 %"):
        style = "italic" if heading in ("paper's", "top-1 %") else ""
        table.add_column(heading, justify="right", style=style)
    table.add_column("in the paper")
    table.add_column("weights: NAME.")
    for row in rows:
        paper = row["paper"]
        table.add_row(
            row["name"],
            f"{row['input_size'][1]}²",
            f"{row['parameters']:,}",
            paper["parameters"] or "",
            f"{row['macs'] / 1e9:.3f}G",
            paper["macs"] or "",
            "" if paper["accuracy"] is None else f"{paper['accuracy']:.1f}",
            paper["source"],
            ", ".join(weights.rpartition(".")[2] for weights in row["pretrained"]),
        )
    print_whole(table)
    return 0
