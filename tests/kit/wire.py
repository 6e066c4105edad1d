"""A long cable: passes frames between two network namespaces, each of them late, and loses some.

``python wire.py PID DEVICE PID DEVICE SECONDS LOSS`` makes the devices in the namespaces of these processes, prints
"ready", and ends when its standard input does. (Not each kernel has netem.)
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_CLONE_NEWNET, _TUNSETIFF = 0x40000000, 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_LONGEST = 65536  # bytes of a frame


def main() -> None:
    (first, other), seconds, loss = (_end(*sys.argv[1:3]), _end(*sys.argv[3:5])), *map(float, sys.argv[5:])
    across, dice = {first: other, other: first}, random.Random(0)
    under_way = deque[tuple[float, int, bytes]]()  # when a frame arrives, and where
    print("ready", flush=True)
    while True:
        wait = None if not under_way else max(0.0, under_way[0][0] - time.monotonic())
        came, _, _ = select.select([0, first, other], [], [], wait)
        if 0 in came:
            return
        for end in came:
            with suppress(OSError):  # the device is down
                while frame := os.read(end, _LONGEST):
                    if dice.random() >= loss:
                        under_way.append((time.monotonic() + seconds, across[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            with suppress(OSError):
                os.write(under_way[0][1], under_way[0][2])
            under_way.popleft()


def _end(pid: str, device: str) -> int:
    """Make a device in the network namespace of a process; return its descriptor."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH", device.encode(), _TAP_WITHOUT_HEADER))
    return made


if __name__ == "__main__":
    main()
