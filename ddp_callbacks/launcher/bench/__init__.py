"""``ddprun bench``: measures the parts of a training step, and predicts its time on more nodes. Nothing imports this.

- :mod:`.calibration`: runs on the nodes and measures the parts
- :mod:`.cost`: the cost model
- :mod:`.command`: the output of ``ddprun bench``
"""
