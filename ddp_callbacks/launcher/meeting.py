"""The store where the processes of several nodes meet, and the network interface for it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from ddp_callbacks.network import route_to


def choose_interface(address: str | None) -> str:
    """Make gloo and NCCL use the interface on the route to the first node, unless the user chose one; return gloo's."""
    if address is None:
        return os.environ.get("GLOO_SOCKET_IFNAME", "")
    route = route_to(address)
    if route.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", route.interface)
        if route.interface != "lo":  # NCCL finds its way inside a node
            os.environ.setdefault("NCCL_SOCKET_IFNAME", route.interface)
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def open_store(address: str, port: int, listener: int | None, timeout: timedelta) -> dist.TCPStore:
    """Host the store on a socket that already listens, or connect to it."""
    if listener is None:
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener
    )
