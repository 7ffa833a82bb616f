"""What `vision-ttt explain` finds of each kind: numbers, figures and lines for the terminal."""

from vision_ttt.cli.explained.distances import Distances
from vision_ttt.cli.explained.inner_loop import FastWeightsAlong, InnerLoss
from vision_ttt.cli.explained.kind import Batch, Kind, Part, Subject
from vision_ttt.cli.explained.maps import GradientMap, Norms, ReceptiveField

__all__ = ["KINDS", "Batch", "Kind", "Part", "Subject"]

KINDS: dict[str, type[Kind]] = {
    kind.what: kind
    for kind in (GradientMap, ReceptiveField, InnerLoss, Norms, Distances, FastWeightsAlong)
}
