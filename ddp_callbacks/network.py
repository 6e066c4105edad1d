"""The way to another host: its addresses, and this host's own."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


@dataclass(frozen=True)
class Route:
    """How this host reaches another: its own address on the way, and the interface that has it (empty if unknown)."""

    address: str
    interface: str


def route_to(host: str, port: int = 1) -> Route:
    """The route that packets to ``host`` take; nothing is sent. The interface is found for IPv4 alone.

    Raises:
        OSError: The name does not resolve, or there is no route.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = probe.getsockname()[0]
        if family != socket.AF_INET:
            return Route(own, "")
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(reply[20:24]) == own:
                return Route(own, name)
    return Route(own, "")
