"""The processes of a job: how they meet, join and leave, and how one learns that another has failed.

- :mod:`.membership`: ``join_process_group``, ``leave_process_group``; :mod:`.rendezvous` is how the processes meet,
  :mod:`.spawn` starts them
- :mod:`.failures`: waiting that ends, because between two slices of a wait it looks for failures of other ranks
- :mod:`.presence`: what each rank tells about itself in the store; its docstring lists the keys
- :mod:`.peers`, :mod:`.deadlocks`, :mod:`.diagnosis`: who has failed, who waits for whom, and why a wait broke
- :mod:`.runs`: a failure belongs to a run, and the next run begins without it
- :mod:`.forking`: workers of a loader are forked while no thread of gloo is busy
"""

from ddp_callbacks.process_group.membership import (
    DEFAULT_TIMEOUT,
    MPI4PY,
    get_rank,
    get_world_size,
    join_process_group,
    leave_process_group,
    resolve_group,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "MPI4PY",
    "get_rank",
    "get_world_size",
    "join_process_group",
    "leave_process_group",
    "resolve_group",
]
