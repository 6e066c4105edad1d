"""Host the store in which the ranks meet, on a socket that already listens: ``store.py ADDRESS PORT DESCRIPTOR``.

A process of its own, because the node's program does without torch, and the store must outlive each rank. It listens on
one address; torch's own listen on all interfaces (pytorch issue 173909). The node's program kills it.
"""

from __future__ import annotations

import signal
import sys

import torch.distributed as dist


def main() -> None:
    address, port, descriptor = sys.argv[1:]
    store = dist.TCPStore(  # noqa: F841, it lives as long as its name
        address, int(port), is_master=True, wait_for_workers=False, master_listen_fd=int(descriptor)
    )
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
