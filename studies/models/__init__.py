"""Models that only studies need. Importing this package registers them with timm."""

from studies.models import conv_deit, design_space

__all__ = ["conv_deit", "design_space"]
