"""The way to another host: names, routes, and this host's own addresses."""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ddp_callbacks.errors import say

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # reserved (RFC 5737, RFC 3849), so the way there is the default route
_NOT_YET = (socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_NODATA)
_PATIENCE = 3.0  # seconds for which a name is looked up in silence
_PAUSE = 0.5  # seconds between two looks


@dataclass(frozen=True)
class Route:
    """How this host reaches another: its own address on the way, and the interface that has it (empty if unknown)."""

    address: str
    interface: str


def route_to(host: str, port: int = 1) -> Route:
    """The route that packets to ``host`` take; nothing is sent.

    Raises:
        OSError: The name does not resolve, or there is no route.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = probe.getsockname()[0].partition("%")[0]
    return Route(own, own_addresses().get(own, ""))


def addresses_of(host: str, timeout: float) -> list[str]:
    """What a name means here. Where it means nothing yet, as in a cluster that is starting, wait for up to ``timeout``.

    Args:
        timeout: Seconds.

    Raises:
        OSError: It does not resolve.
    """
    begin, silent = time.monotonic(), True
    while True:
        try:
            return list(
                dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM))
            )
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
    """Whether an address, or the name ``localhost``, is by its very spelling that of one machine to itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def address_for_others(others: Iterable[str]) -> str | None:
    """The address of this host that other hosts reach, as far as it can tell; ``None`` if it cannot.

    The one on the way to another host of the job, or to everywhere else, or the only one there is.

    Args:
        others: Names or addresses of other hosts that matter, if any is known.
    """
    for host in (*others, *_ELSEWHERE):
        try:
            address = route_to(host).address
        except OSError:
            continue
        if not is_loopback(address):
            return address
    found = [address for address in own_addresses() if _is_for_others(address)]
    return found[0] if len(found) == 1 else None


def _is_for_others(address: str) -> bool:
    known = ipaddress.ip_address(address)
    return not known.is_loopback and not known.is_link_local


# --- this host's addresses --------------------------------------------------------------------------------------------


class _SocketAddress(ctypes.Structure):
    """``sockaddr_in`` or ``sockaddr_in6``, as far as both are asked for."""

    _fields_ = (
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_ushort),
        ("ipv4", ctypes.c_ubyte * 4),  # in an IPv6 address the flow
        ("ipv6", ctypes.c_ubyte * 16),
    )


class _InterfaceAddress(ctypes.Structure):
    """The beginning of ``ifaddrs``."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)


def own_addresses() -> dict[str, str]:
    """The names of this host's interfaces by address: all of them, IPv4 and IPv6. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        return dict(_walk(first))
    finally:
        libc.freeifaddrs(first)


def _walk(entry: ctypes._Pointer[_InterfaceAddress]) -> Iterator[tuple[str, str]]:
    while entry:
        found = entry.contents
        if found.address:
            address = found.address.contents
            if address.family == socket.AF_INET:
                yield socket.inet_ntop(socket.AF_INET, bytes(address.ipv4)), found.name.decode()
            elif address.family == socket.AF_INET6:
                yield socket.inet_ntop(socket.AF_INET6, bytes(address.ipv6)), found.name.decode()
        entry = found.next
