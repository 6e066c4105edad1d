"""The gradient engine: all-reduces the weighted gradients while backward still runs.

- :mod:`.synchronizer`: the interface for programs; :mod:`.backward_hooks` notes complete gradients, :mod:`.reducer`
  decides which buckets to send when
- :mod:`.buckets`, :mod:`.flat_buffer`: how gradients are grouped, and the memory that carries them;
  :mod:`.bucket_sums`: the sums of the buckets; :mod:`.metadata`: the numbers sent behind them
- :mod:`.comm_hooks`, :mod:`.compression`: DDP's communication hooks, and compressed gradients
- :mod:`.weighing`: what each rank's loss counts; :mod:`.cross_entropy`: what a mean cross entropy is divided by;
  :mod:`.loss_watch`: is the loss a number
- :mod:`.verification`: is the sum the gradient of the whole batch; :mod:`.first_batch` computes both, on
  :mod:`.copies` of the model, and of variables :mod:`.outside` of it, which leave no trace; :mod:`.side_effects`: nor
  do the files that a step writes
"""

from ddp_callbacks.gradients.synchronizer import GradientSynchronizer

__all__ = ["GradientSynchronizer"]
