"""The selective scan of Mamba: a linear recurrence whose coefficients depend on the tokens."""

from vision_ttt.ops.selective_scan.op import selective_scan

__all__ = ["selective_scan"]
