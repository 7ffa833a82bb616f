"""Other projects' implementations of the ops."""

from studies.bench.peers import flash_linear_attention, mambapy_scan
from vision_ttt.bench.op_contenders import PEERS, Peer

ALL: dict[str, dict[str, Peer]] = {
    "ttt_linear": {flash_linear_attention.NAME: flash_linear_attention.PEER},
    "selective_scan": {mambapy_scan.NAME: mambapy_scan.PEER},
}
"""Op → name → implementation."""


def enter() -> None:
    """Make them contenders of `bench ops` in this process."""
    PEERS.update(ALL)
