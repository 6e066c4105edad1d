"""How a batch is divided among the ranks, and how what they computed of its parts becomes whole again.

- :mod:`.sharding`: ``shard_loader``, which makes a loader this rank's part of it; :mod:`.before_loading` and
  :mod:`.after_loading` are the two ways, :mod:`.iterator` is what both offer
- :mod:`.shares`: which samples of a batch a rank gets
- :mod:`.random_state`: all ranks draw the same batches; each draws its own dropout and augmentation
- :mod:`.outputs`, :mod:`.batch_logs`: predictions and logged values of the parts are joined
- :mod:`.nested`: batches and outputs are nested lists, tuples and mappings
"""
