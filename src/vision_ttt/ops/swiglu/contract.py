"""What swiglu asks of its argument."""

from vision_ttt.ops._contract import Contract

CONTRACT = Contract("swiglu", {"x": "... 2*H"})
IN_PLACE_CONTRACT = Contract("swiglu_", {"x": "... 2*H"}, dense=("x",))
BACKWARD_CONTRACT = Contract("swiglu_backward", {"grad": "... H", "x": "... 2*H"})
