"""What ttt_linear asks of its arguments."""

from vision_ttt.ops._learner_contract import learner_contracts

CONTRACTS = learner_contracts("ttt_linear", {"w0": "d d", "b0": "d"})
