"""Collect facts about a node, as JSON. The job's interpreter runs this text there: import only the standard library."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import socket
import struct
import subprocess
import sys
from importlib import metadata
from typing import Any

_SIOCGIFCONF, _IFREQ = 0x8912, 40  # Linux: the IPv4 addresses of all interfaces, and the bytes that each takes
PACKAGES = ("torch", "ddp_callbacks", "torchbearer", "lightning", "pytorch-lightning", "numpy")


def facts() -> dict[str, Any]:
    memory = _memory()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "cores": usable_cores(),
        "memory": memory.get("MemTotal"),
        "free_memory": memory.get("MemAvailable"),
        "shared_memory": _free_space("/dev/shm"),
        "gpus": _gpus(),
        "interfaces": _interfaces(),
    }


def usable_cores(root: str = "/") -> int:
    """The number of cores this process may use: its affinity, or the quota of its container or job."""
    quotas = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _groups(root: str) -> list[str]:
    """The folders of this process's control groups that limit processor time, and of their parents."""
    found = []
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    for _, controllers, path in lines:
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = path.strip("/").split("/")
        for depth in range(len(names) + 1):
            found.append(os.path.join(root, "sys/fs/cgroup", controllers, *names[:depth]))
    return found


def _quota(folder: str) -> float | None:
    """Number of cores; ``None`` without a limit."""
    try:
        with open(os.path.join(folder, "cpu.max")) as file:  # version 2
            quota, period = file.read().split()
    except OSError:
        try:
            with open(os.path.join(folder, "cpu.cfs_quota_us")) as file:  # version 1
                quota = file.read().strip()
            with open(os.path.join(folder, "cpu.cfs_period_us")) as file:
                period = file.read()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> dict[str, int]:
    """Bytes, by the kernel's names."""
    with open("/proc/meminfo") as file:
        rows = (line.split() for line in file)
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def _free_space(folder: str) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _interfaces() -> dict[str, str]:
    """The interfaces' names, by address."""
    return {**_of_ipv4(), **_of_ipv6()}


def _of_ipv4() -> dict[str, str]:
    room = ctypes.create_string_buffer(_IFREQ * 1024)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(room), ctypes.addressof(room)))
    used, _ = struct.unpack("iP", reply)
    rows = [room.raw[at : at + _IFREQ] for at in range(0, used, _IFREQ)]
    return {socket.inet_ntoa(row[20:24]): row[:16].partition(b"\0")[0].decode() for row in rows}


def _of_ipv6() -> dict[str, str]:
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except OSError:
        return {}  # no IPv6
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])): row[5] for row in rows}


if __name__ == "__main__":
    print(json.dumps(facts()))
