"""How a batch is divided among the ranks, and how what they computed of its parts becomes whole again.

- :mod:`.sharding`: a loader becomes this rank's part of it
- :mod:`.random_state`: all ranks draw the same batches; each draws its own dropout and augmentation
- :mod:`.outputs`, :mod:`.batch_logs`: predictions and logged values of the parts are joined
"""
