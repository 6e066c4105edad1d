"""Join and leave the process group, and detect failures of other ranks.

- :mod:`.default_group`: ``join_process_group``, ``leave_process_group``; :mod:`.rendezvous`: processes meet by a store
  and join at rank 0; :mod:`.spawn`: starts processes; :mod:`.gpu`: which GPU a process takes, once it uses one
- :mod:`.failures`: waits in slices, and checks in between whether another rank has failed; :mod:`.diagnosis`: why a
  wait is in vain, or broke
- The control channel: :mod:`.coordinator` decides in rank 0 which ranks have failed, died or left, or wait in vain, and
  lists the messages; :mod:`.server`: the thread around it; :mod:`.control_channel`: one line of JSON is one message
- :mod:`.presence`: a rank's end of the channel; :mod:`.client`: its thread, the messages it has heard, and gatherings
  of all ranks; :mod:`.places`: the exchange that a rank is in
- :mod:`.moments`: all ranks act at the same moment, once one of them has asked to; :mod:`.preemption`: they stop
- :mod:`.runs`: a failure ends one run; the next run starts afresh
- :mod:`.members_file`: who takes part, as the launcher notes it; :mod:`.survivors`: they form the group, also later
- :mod:`.torch_threads`: waits for gloo's threads before a fork, and before the interpreter ends
"""

from ddp_callbacks.process_group.default_group import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from ddp_callbacks.process_group.default_group import current_env as current_env
from ddp_callbacks.process_group.default_group import get_rank as get_rank
from ddp_callbacks.process_group.default_group import get_world_size as get_world_size
from ddp_callbacks.process_group.default_group import join_process_group as join_process_group
from ddp_callbacks.process_group.default_group import leave_process_group as leave_process_group
from ddp_callbacks.process_group.default_group import require_place as require_place
from ddp_callbacks.process_group.default_group import resolve_group as resolve_group
