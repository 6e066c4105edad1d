"""Join and leave the process group, and detect failures of other ranks.

- :mod:`.membership`: ``join_process_group``, ``leave_process_group``; :mod:`.rendezvous`: how the processes meet;
  :mod:`.spawn`: starts processes; :mod:`.gpu`: which GPU a process takes, once it uses one
- :mod:`.failures`: waits in slices, and looks for failures of other ranks in between
- :mod:`.presence`: what each rank publishes in the store; its docstring lists the keys; :mod:`.guard`: the thread that
  answers for a rank that computes, and frees it from a GPU that waits for a lost rank
- :mod:`.peers`, :mod:`.deadlocks`, :mod:`.diagnosis`: find failed ranks, ranks that wait for each other, and the reason
  for a broken wait
- :mod:`.votes`: what all ranks may want at the same moment, without a message where nobody wants it
- :mod:`.preemption`: all ranks stop at the same moment, once one of them has been asked to
- :mod:`.runs`: a failure ends one run; the next run starts afresh
- :mod:`.torch_threads`: waits for gloo's threads before a fork, and before the interpreter ends
"""

from ddp_callbacks.process_group.membership import (
    DEFAULT_TIMEOUT,
    get_rank,
    get_world_size,
    join_process_group,
    leave_process_group,
    resolve_group,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "get_rank",
    "get_world_size",
    "join_process_group",
    "leave_process_group",
    "resolve_group",
]
