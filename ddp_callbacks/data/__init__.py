"""Divide batches among the ranks, and join the results of the parts.

- :mod:`.sharding`: ``shard_loader``, the entry point. :mod:`.before_loading` and :mod:`.after_loading` are the two ways
  to divide a loader: by its indices, or by the batches that every rank produces. :mod:`.iterator` is what they share
- :mod:`.order`: the indices of a pass, which rank 0 draws and sends; :mod:`.samplers` begins at any batch;
  :mod:`.same_data` compares data sets
- :mod:`.resuming`: ``resumable_loader``, and the state of what it draws from: :mod:`.order_state`, :mod:`.attributes`;
  :mod:`.workers` keeps workers alive
- :mod:`.shares`: which part of a batch is whose, and slices of nested batches
- :mod:`.random_state`: all ranks draw alike. :mod:`.sample_seeds`: each sample draws its own augmentation.
  :mod:`.global_state` reads and sets the states
- :mod:`.outputs`, :mod:`.batch_logs`: join predictions and logged values; :mod:`.collected` and :mod:`.loop_variables`
  find what nobody joins, by :mod:`.own_code` and :mod:`.gathered`
- :mod:`.bad_batches`: all ranks skip a batch that is bad on one; :mod:`.skipped` finds those that a program leaves out
- :mod:`.nested`: walk nested lists, tuples and mappings
"""
