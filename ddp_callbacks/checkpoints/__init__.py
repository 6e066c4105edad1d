"""Checkpoints from which a run resumes at the next batch, on any number of processes.

- :mod:`.file`: ``CheckpointFile``, which all ranks write and read together
- :mod:`.format`: what is in the file, which files are refused, and what runs must have in common
- :mod:`.disk`: one process's writes, of which the last two are kept, and reads; :mod:`.claim`: one job writes a path
- :mod:`.transfer`: what rank 0 does for all, and the bytes between ranks
- :mod:`.resume`: what all hosts share: options, when to write a file, when to stop
- :mod:`.module_state`: what a module has beside its parameters
- :mod:`.recovery`: copies of a run in memory, from which it continues without processes that died
- :mod:`.saved_attributes`: plain attributes of a user's objects that a run changes
- :mod:`.settings`: what a script passes to optimizers and schedulers, which a file overrides
- :mod:`.own_loop`: ``save_checkpoint`` and ``load_checkpoint`` for a loop in plain PyTorch
"""

from ddp_callbacks.checkpoints.file import CheckpointFile
from ddp_callbacks.checkpoints.format import LocalStates, Saved, require_same

__all__ = ["CheckpointFile", "LocalStates", "Saved", "require_same"]
