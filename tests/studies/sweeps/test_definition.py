"""What rows the sweeps have, and that each can be trained."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F

from studies.sweeps import SWEEPS
from studies.sweeps.definition import Panel, SameSeconds, ShareOfUpdates, Sweep, Variant
from vision_ttt.engine import TrainConfig
from vision_ttt.errors import UserError
from vision_ttt.models.vittt_ablations import ABLATIONS
from vision_ttt.tasks.classification.task import summarise
from vision_ttt.tasks.images.models import model_arguments

ABLATION, DESIGN_SPACE = SWEEPS["ablation-digits"], SWEEPS["design-space-digits"]
RANGES = SWEEPS["design-space-ranges"]
REGISTERS = SWEEPS["registers-digits"]
LINEARIZE = SWEEPS["linearize-fashion"]
DIGITS = [sweep for sweep in SWEEPS.values() if sweep.recipe == "digits"]
EVERY_ROW = [(sweep, row.name) for sweep in DIGITS for row in sweep.rows]
EVERY_MODEL = {}
for sweep, name in EVERY_ROW:
    own = sweep.config(sweep.by_name[name], 0, Path("runs")).model
    EVERY_MODEL.setdefault(f"{own.name} {own.arguments}", (sweep, name))


def test_a_sweep_of_some_panels_has_their_rows():
    own = ABLATION.only([ABLATION.panels[0].title])
    assert own.panels == ABLATION.panels[:1]
    assert {row.name for row in own.rows} == set(ABLATION.panels[0].rows.values())
    with pytest.raises(UserError, match="has no panel 'Table 9'; accepted: Fig"):
        ABLATION.only(["Table 9"])
    tiles = SWEEPS["letters-tiles"]  # whose rows start from those of its last panel
    with pytest.raises(UserError, match="takes its length or weights from other rows"):
        tiles.only([tiles.panels[0].title])


def build(config: TrainConfig) -> torch.nn.Module:
    arguments = model_arguments(
        config.model.name,
        num_classes=10,
        image_size=config.data.image_size,
        extra=config.model.arguments,
    )
    return timm.create_model(config.model.name, **arguments)


def test_ablation_has_every_row_of_the_paper():
    names = {row.name for row in ABLATION.rows}
    assert names == {"vittt", *ABLATIONS} - {"b128", "b196"}
    assert ABLATION.by_name["dual"].published == 77.5
    assert ABLATION.by_name["vittt"].published == 77.7
    tables = [panel.title.split(":")[0] for panel in ABLATION.panels]
    assert tables == ["Table 3", "Table 4", "Fig. 7a", "Fig. 7b"]
    for panel in ABLATION.panels:
        for name in set(panel.rows.values()) - {"vittt"}:
            assert ABLATIONS[name].source == panel.title.split(":")[0]


def test_mini_batches_of_64_tokens_and_more_are_the_same_on_digits():
    def logits(size):
        torch.manual_seed(0)
        name = "vittt_nano_patch4_32"
        model = timm.create_model(name, depth=1, num_classes=10, mini_batch_size=size).eval()
        image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return model(image)

    assert (logits(64) - logits(128)).abs().max() < 1e-6
    assert (logits(64) - logits(196)).abs().max() < 1e-6
    assert (logits(64) - logits(32)).abs().max() > 1e-4


def test_design_space_crosses_losses_with_models_and_varies_one_factor_at_a_time():
    def keywords(name):
        return dict(DESIGN_SPACE.by_name[name].changes["arguments"])

    panels = [panel for panel in DESIGN_SPACE.panels if panel.title.startswith("loss, ")]
    grid = [keywords(name) for panel in panels for name in panel.rows.values()]
    assert all(set(each) == {"inner_model", "inner_loss"} for each in grid)
    assert len({tuple(each.values()) for each in grid}) == 5 * 5
    for row in DESIGN_SPACE.rows:
        model, _, rest = row.name.partition("-")
        loss, _, factor = rest.partition("-")
        if factor:
            others = keywords(row.name).items() - keywords(f"{model}-{loss}").items()
            assert len(others) == (2 if "causal" in factor else 1)


def test_ranges_vary_one_factor_from_rows_of_the_design_space():
    shared = [row for row in RANGES.rows if row.name in DESIGN_SPACE.by_name]
    assert len(shared) == 4 + 2 * 4  # the central rows; two rates, a batch and epochs of two
    assert all(row == DESIGN_SPACE.by_name[row.name] for row in shared)
    labels = {}
    for panel in RANGES.panels:
        factor, name = panel.title.split(", ")
        labels.setdefault(factor, []).append(list(panel.rows))
        central = RANGES.by_name[name].changes["arguments"]
        arguments = set()
        for label, own in panel.rows.items():
            more = dict(RANGES.by_name[own].changes["arguments"].items() - central.items())
            assert own == name or [f"{value:g}" for value in more.values()] == [label]
            arguments |= more.keys()
        assert len(arguments) == 1
        assert name in panel.rows.values()
    assert labels == {
        "learning rate": 2 * [["0.1", "0.2", "0.5", "1", "2", "5", "10"]],
        "tokens per step": 2 * [["4", "8", "16", "32", "64"]],
        "inner epochs": 2 * [["1", "2", "3", "4"]],
        "heads": 2 * [["8", "4", "2", "1"]],
        "hidden width over a head's": 2 * [["1", "2", "4", "8"]],
    }


def test_the_state_grows_along_a_range_of_sizes():
    for panel in RANGES.panels:
        if panel.title.startswith(("heads", "hidden")):
            rows = [RANGES.by_name[name] for name in panel.rows.values()]
            with torch.device("meta"):
                models = [build(RANGES.config(row, 0, Path("runs"))) for row in rows]
            sizes = [sum(p.numel() for p in each.blocks[0].ttt.state.values()) for each in models]
            assert sizes == sorted(set(sizes)), panel.title


@pytest.mark.parametrize("name", ["digits", "fashion", "elpv"])
def test_backbones_have_equal_parameters_for_equal_epochs_and_for_the_references_seconds(name):
    sweep = SWEEPS[f"backbones-{name}"]
    with torch.device("meta"):
        models = {row.name: build(sweep.config(row, 0, Path("runs"))) for row in sweep.rows}
    counts = {  # ViT³ has no positions
        row: sum(p.numel() for key, p in model.named_parameters() if key != "pos_embed")
        for row, model in models.items()
    }
    panels = [panel for panel in sweep.panels if "Vittt" in panel.rows]
    for panel, other in zip(panels[::2], panels[1::2], strict=True):
        pair = {each.title.rpartition("equal ")[2]: each.rows for each in (panel, other)}
        epochs, seconds = pair["epochs"], pair["seconds"]
        assert list(epochs) == list(seconds)
        reference = epochs["Vittt"]
        for label, row in epochs.items():
            assert abs(counts[row] / counts[reference] - 1) < 0.03, row
            assert sweep.by_name[row].length is None
            timed = sweep.by_name[seconds[label]]
            assert timed.changes == sweep.by_name[row].changes
            if row != reference:
                assert timed.length == SameSeconds(reference)


def test_a_panel_is_shown_for_a_row_that_no_earlier_panel_has():
    sweep = SWEEPS["backbones-digits"]
    assert sweep.panels_of([]) == []
    assert sweep.panels_of(["vittt", "deit"]) == [0]
    assert sweep.panels_of(["vittt", "deit-seconds"]) == [0, 1]


def test_a_seed_of_solar_cells_has_a_split_of_its_own():
    sweep = SWEEPS["backbones-elpv"]
    config = sweep.config(sweep.by_name["vittt"], 3, Path("runs"))
    assert (config.run.seed, config.data.split_seed) == (3, 3)


def test_the_mean_of_four_grades_estimates_the_probability_of_a_defect():
    sweep, two = SWEEPS["grades-elpv"], SWEEPS["backbones-elpv"]
    for row in sweep.rows:
        own, other = (each.config(each.by_name[row.name], 3, Path("runs")) for each in (sweep, two))
        assert (own.model, own.optimisation) == (other.model, other.optimisation)
        assert own.data == dataclasses.replace(other.data, dataset="elpv-grades")
    logits = torch.tensor([[0.5, 0, 0, 0.5], [1, 0, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 1]]).log()
    measured = sweep.examine(SimpleNamespace(evaluation=summarise(logits, torch.arange(4))))
    assert measured == pytest.approx(
        # The estimates are 1/2, 0, 5/6 and 1; true are 0, 1/3, 2/3 and 1.
        {
            "mean_absolute_error": 0.25,
            "r2": 1 - (1 / 4 + 1 / 9 + 1 / 36) / (5 / 9),
            "defect_accuracy": 0.75,
            "defect_roc_auc": 1,
        }
    )


def test_registers_make_a_feature_as_wide_as_a_token_in_every_row():
    models = {row.name: build(REGISTERS.config(row, 0, Path("runs"))) for row in REGISTERS.rows}
    assert {model.head.in_features for model in models.values()} == {96}
    positions = {
        name: [] if model.class_tokens is None else list(model.class_tokens.positions(64))
        for name, model in models.items()
    }
    assert positions == {
        "none": [],
        "class_token": [32],
        "even4": [12, 25, 38, 51],
        "middle4": [32, 33, 34, 35],
        "even8": [7, 15, 23, 31, 39, 47, 55, 63],
        "middle8": list(range(32, 40)),
    }


@pytest.mark.parametrize(
    "length",
    [
        *(SameSeconds("missing"), SameSeconds("b")),
        *(ShareOfUpdates("missing", 0.5), ShareOfUpdates("b", 0.5)),
    ],
)
def test_a_length_follows_from_rows_that_have_their_own(length):
    rows = (Variant("a", {}), Variant("b", {}, length=length))
    with pytest.raises(ValueError, match="row 'b' takes its length or weights from"):
        Sweep("s", "t", "digits", {}, rows, (Panel("p", {"a": "a", "b": "b"}),), "c")


def test_every_row_has_a_folder_of_its_own():
    for sweep, name in EVERY_ROW:
        config = sweep.config(sweep.by_name[name], 0, Path("runs"))
        assert config.run.output == f"runs/{name}/seed-0"


@pytest.mark.parametrize(
    ("sweep", "name"), EVERY_MODEL.values(), ids=[name for _, name in EVERY_MODEL.values()]
)
def test_every_model_makes_a_finite_step(sweep, name):
    config = sweep.config(sweep.by_name[name], 0, Path("runs"))
    torch.manual_seed(0)
    model = build(config)
    images = torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    with (
        torch.no_grad()
    ):  # where fused kernels serve; not the logits, for the largest norm may flip
        torch.testing.assert_close(
            model.eval().forward_features(images), features, rtol=1e-3, atol=1e-4
        )
    loss = F.cross_entropy(model.forward_head(features), torch.tensor([3, 7]))
    assert abs(loss.item() - math.log(10)) < 0.5
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
    learnt = sum(parameter.grad.abs().sum() for parameter in model.blocks.parameters())
    assert learnt > 0


def test_a_run_is_the_recipe_with_the_rows_changes_and_the_users(tmp_path):
    config = ABLATION.config(ABLATION.by_name["b8"], 5, tmp_path, {"epochs": 7})
    assert (config.run.seed, config.optimisation.epochs) == (5, 7)
    assert config.data.dataset == "digits"
    assert config.model.arguments == {"mini_batch_size": 8}
    assert config.run.output == str(tmp_path / "b8" / "seed-5")
    assert config.task.label_smoothing == 0.1  # of the recipe
    row = DESIGN_SPACE.by_name["linear-mse-b8"]
    config = DESIGN_SPACE.config(row, 0, tmp_path)
    assert config.optimisation.batch_size == 32  # of the sweep


def test_rows_are_found_once_and_in_the_order_asked_for():
    names = [row.name for row in ABLATION.find(["w1", "dual", "w1"])]
    assert names == ["w1", "dual"]
    assert ABLATION.find(None) == ABLATION.rows
    with pytest.raises(UserError, match="no row 'duals'; nearest: dual"):
        ABLATION.find(["dual", "duals"])


def test_linear_rows_start_from_the_deit_and_differ_from_their_like_in_nothing_else(tmp_path):
    def config(name):
        return LINEARIZE.config(LINEARIZE.by_name[name], 3, tmp_path)

    for share in (5, 10, 20):
        for inner in ("swiglu", "ttt_linear", "vit3"):
            tuned, scratch = config(f"{inner}-{share}"), config(f"{inner}-scratch-{share}")
            weights = tmp_path / "deit" / "seed-3" / "last.safetensors"
            assert tuned.model.initial_weights == str(weights)
            assert tuned.model.arguments["inner"] == inner
            assert scratch.model == dataclasses.replace(tuned.model, initial_weights=None)
        continued = config(f"deit-{share}")
        assert continued.optimisation == dataclasses.replace(
            config(f"swiglu-{share}").optimisation, new_parameters_rate=1
        )
        assert continued.model.name == config("deit").model.name
        assert LINEARIZE.by_name[f"deit-{share}"].length == ShareOfUpdates("deit", share / 100)
    rows = (Variant("a", {}), Variant("b", {}, start="c"))
    with pytest.raises(ValueError, match="row 'b' takes its length or weights from 'c'"):
        Sweep("s", "t", "digits", {}, rows, (Panel("p", {"a": "a", "b": "b"}),), "c")


@pytest.mark.parametrize("name", ["fashion", "elpv"])
def test_shares_of_labels_differ_from_their_like_in_the_start_alone(name, tmp_path):
    sweep = SWEEPS[f"pretraining-{name}"]

    def config(name):
        return sweep.config(sweep.by_name[name], 3, tmp_path)

    masked = config("masked")
    split = 3 if name == "elpv" else 0
    own = (masked.task.name, masked.data.train_fraction, masked.data.split_seed)
    assert own == ("masked-images", 1, split)
    assert masked.data.dataset == config("scratch-100").data.dataset
    assert masked.data.random_erasing == 0  # noise is not to be predicted
    for share, updates in ((1, 0.06), (10, 0.25), (100, 0.5)):
        tuned, scratch = config(f"fine-tuned-{share}"), config(f"scratch-{share}")
        weights = tmp_path / "masked" / "seed-3" / "last.safetensors"
        assert tuned.model.initial_weights == str(weights)
        assert scratch.model == dataclasses.replace(tuned.model, initial_weights=None)
        assert (scratch.data, scratch.optimisation) == (tuned.data, tuned.optimisation)
        assert tuned.data.train_fraction == share / 100
        assert tuned.data.split_seed == (split if share == 100 else 3)
        lengths = [
            sweep.by_name[f"{kind}-{share}"].length.share
            for kind in ("fine-tuned", "scratch", "scratch-short")
        ]
        assert lengths == [updates, 1 + updates, updates]


@pytest.mark.parametrize("shown", [{}, {"a": "a", "b": "b"}])
def test_panels_must_show_exactly_the_rows(shown):
    with pytest.raises(ValueError, match="must be the same"):
        Sweep("s", "t", "digits", {}, (Variant("a", {}),), (Panel("p", shown),), "c")
