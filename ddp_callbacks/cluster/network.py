"""Resolve host names, and find routes and this host's addresses."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import logging
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

from ddp_callbacks.errors import say

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # reserved (RFC 5737, RFC 3849), so their route is the default route
_NOT_YET = (socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_NODATA)
_PATIENCE = 3.0  # seconds of looking up a name before a message is printed
_PAUSE = 0.5  # seconds between two attempts
_SIOCGIFCONF, _IFREQ = 0x8912, 40  # Linux: the request for all interfaces' IPv4 addresses, and the bytes per entry


def address_towards(host: str) -> str:
    """Return this host's address on the route to ``host``. Sends nothing to it; may look up its name.

    Raises:
        OSError: The name does not resolve, or there is no route.
    """
    family, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0].partition("%")[0])


def addresses_of(host: str, timeout: float) -> list[str]:
    """Resolve a name. If it doesn't resolve yet, as in a cluster that is starting, retry for up to ``timeout``.

    Args:
        host: A name or an address.
        timeout: Seconds.

    Raises:
        OSError: The name does not resolve within ``timeout``.
    """
    begin, silent = time.monotonic(), True
    while True:
        try:
            found = socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(each[4][0]) for each in found))
        except socket.gaierror as error:
            waited = time.monotonic() - begin
            if error.errno not in _NOT_YET or waited + _PAUSE > timeout:
                raise
            if silent and waited > _PATIENCE:
                silent = False
                say(
                    f"the name {host} does not resolve yet ({error.strerror}); retrying for {timeout:g} s",
                    logging.WARNING,
                )
        time.sleep(_PAUSE)


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback address, or the name ``localhost``. Resolves no names."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def address_for_others(others: Iterable[str]) -> str | None:
    """Return the address of this host that other hosts can reach; ``None`` if unknown.

    It is this host's address on the route to another host of the job, or on the default route, or its only one.

    Args:
        others: Names or addresses of the job's other hosts, if known.
    """
    for host in (*others, *_ELSEWHERE):
        with suppress(OSError):  # the name does not resolve, or there is no route
            if not is_loopback(address := address_towards(host)):
                return address
    found = [address for address in own_addresses() if is_for_others(address)]
    return found[0] if len(found) == 1 else None


def is_for_others(address: str) -> bool:
    """Whether other hosts may reach this one at its own ``address``: it is neither loopback nor link-local."""
    known = ipaddress.ip_address(address)
    return not known.is_loopback and not known.is_link_local


def own_addresses() -> dict[str, str]:
    """Return all IPv4 and IPv6 addresses of this host with the names of their interfaces. Linux only."""
    room = ctypes.create_string_buffer(_IFREQ * 1024)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(room), ctypes.addressof(room)))
    used, _ = struct.unpack("iP", reply)
    rows = [room.raw[at : at + _IFREQ] for at in range(0, used, _IFREQ)]
    found = {socket.inet_ntoa(row[20:24]): row[:16].partition(b"\0")[0].decode() for row in rows}
    with suppress(OSError), open("/proc/net/if_inet6") as file:  # missing without IPv6
        for address, *_, interface in map(str.split, file):
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))] = interface
    return found
