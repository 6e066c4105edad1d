"""Divide batches among the ranks, and join the results of the parts.

- :mod:`.sharding`: ``shard_loader``, the entry point. :mod:`.before_loading` and :mod:`.after_loading` are the two ways
  to divide a loader; :mod:`.iterator` is their common interface
- :mod:`.shares`: which samples of a batch a rank gets
- :mod:`.random_state`: all ranks draw the same batches; each draws different dropout and augmentation
- :mod:`.outputs`, :mod:`.batch_logs`: join predictions and logged values
- :mod:`.skipping`: all ranks skip a batch that is bad on one
- :mod:`.nested`: walk nested lists, tuples and mappings
"""
