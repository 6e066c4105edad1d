"""``ddprun bench``: predicts how long a training step takes on more nodes, from a measurement. Nothing imports this.

- :mod:`.calibration`: runs on the nodes and measures the parts of a step
- :mod:`.cost`: the model that predicts
- :mod:`.command`: what ``ddprun bench`` shows
"""
