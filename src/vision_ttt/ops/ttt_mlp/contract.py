"""What ttt_mlp asks of its arguments: the hidden layer has 4 d units (TTT, Sec. 2.7)."""

from vision_ttt.ops._learner_contract import learner_contracts

CONTRACTS = learner_contracts("ttt_mlp", {"w1": "d 4*d", "b1": "4*d", "w2": "4*d d", "b2": "d"})
