"""Host the store in which the ranks meet, on a socket that already listens: ``store.py ADDRESS PORT DESCRIPTOR``.

The store has a process of its own, because the node's program does without torch, and the store must outlive each rank.
It listens on one address; torch's own listens on all interfaces (pytorch issue 173909). The node's program kills this
at the end.
"""

from __future__ import annotations

import gc
import signal
import sys


def main() -> None:
    gc.disable()  # the import of torch, which competes with those of the ranks, takes a tenth less
    import torch.distributed as dist

    address, port, descriptor = sys.argv[1:]
    store = dist.TCPStore(address, int(port), is_master=True, wait_for_workers=False, master_listen_fd=int(descriptor))
    while store:
        signal.pause()


if __name__ == "__main__":
    main()
