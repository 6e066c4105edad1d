"""BatchNorm layers that normalize by the whole batch.

:mod:`.layers` replaces their forward, and :mod:`.statistics` has the exchanges between the ranks.
"""
