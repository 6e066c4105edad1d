"""Print facts about a node, as JSON. The job's interpreter runs this text there, with or without this package.

The first argument is ``all``, or ``start`` for what a start needs, in a fraction of a second; the second the number of
processes as in ``--nproc-per-node``; the third the number of cores that the job has there, 0 for all that it may use.
The others are the kind and the name of the program: a ``script``, a ``module``, or ``any``, which is not compared.
Without a kind, nothing is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

try:
    import ddp_callbacks
    from ddp_callbacks.cluster.network import address_for_others, is_for_others, own_addresses
except ImportError:  # it is not installed there, or this is an older Python
    ddp_callbacks = None  # type: ignore[assignment]

PACKAGES = ("torch", "ddp_callbacks", "torchbearer", "lightning", "pytorch-lightning", "numpy")
_COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg", "/dev/accel")  # accelerators


def place(processes: str, cores: int, kind: str, name: str) -> dict[str, Any]:
    """Return what a start needs: the package's folder (``None`` if missing), processes, cores and addresses."""
    addresses = own_addresses() if ddp_callbacks else {}
    likely = address_for_others([]) if ddp_callbacks else None  # the address on the route to the outside
    return {
        "package": os.path.dirname(ddp_callbacks.__file__) if ddp_callbacks else None,
        "processes": int(processes) if processes.isdigit() else _processes(processes),
        "same": same(kind, name) if kind else {},
        "cores": min(usable_cores(), cores or sys.maxsize),
        "interfaces": addresses,
        "addresses": [*filter(None, [likely]), *(each for each in addresses if each != likely and is_for_others(each))],
    }


def same(kind: str, name: str) -> dict[str, str]:
    """Return versions, without what tells builds for CPUs and GPUs apart, and checksums; empty if unknown."""
    found = {name: _version(name) for name in ("torch", "lightning", "pytorch-lightning")}
    versions = {name: version.partition("+")[0] for name, version in found.items() if version}
    python = "{}.{}".format(*sys.version_info)
    return {"python": python, **versions, "ddp_callbacks": _sum_of_package(), **_sum_of_program(kind, name)}


def _sum_of_package() -> str:
    """Return a checksum of this package's files; empty if it is missing."""
    folders = os.walk(os.path.dirname(ddp_callbacks.__file__)) if ddp_callbacks else ()
    return _sum(os.path.join(folder, name) for folder, _, names in folders for name in names if name.endswith(".py"))


def _sum_of_program(kind: str, name: str) -> dict[str, str]:
    """Return the checksum of a script, or of the file of a module that ``python -m`` would run."""
    path = _file_of(name) if kind == "module" else name
    return {} if kind == "any" or path is None else {kind: _sum([path])}


def _file_of(module: str) -> str | None:
    """Return the file of a module; ``None`` if unknown. Imports none of its packages."""
    sys.path.insert(0, "")
    top, *parts = module.split(".")
    spec = find_spec(top)
    while spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(parts.pop(0) if parts else "__main__", spec.submodule_search_locations)
    return spec.origin if spec else None


def _sum(paths: Iterable[str]) -> str:
    found = 0
    for path in sorted(paths):
        with suppress(OSError), open(path, "rb") as file:  # it may be a folder with a program
            found = zlib.crc32(file.read(), found)
    return f"{found:08x}" if found else ""


def _processes(kind: str) -> int:
    """Return the number of processes.

    ``cpu``: one per core. ``gpu``, ``xpu``: one per device, perhaps 0. ``auto``: one per device, or else per core.
    Empty: one per device, or else per CPU socket.
    """
    if kind == "cpu":
        return os.cpu_count() or 1
    devices = 0
    if any(map(os.path.exists, _DEVICES)):
        counted = subprocess.run([sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True)
        devices = int(counted.stdout.split()[-1]) if counted.returncode == 0 else 0
    if kind in ("", "auto"):
        return devices or (_count("physical_package_id") or 1 if kind == "" else os.cpu_count() or 1)
    return devices


def _count(kind: str, root: str = "/") -> int:
    """Return the number of CPU sockets, or of cores, on which this process may run; 0 if unknown."""
    found = set()
    for thread in os.sched_getaffinity(0):
        path = f"sys/devices/system/cpu/cpu{thread}/topology/{kind}"
        with suppress(OSError), open(os.path.join(root, path)) as file:
            found.add(file.read().strip())
    return len(found)


def facts(processes: str, cores: int, kind: str, name: str) -> dict[str, Any]:
    """Return the facts that the doctor judges."""
    memory = _memory()
    return place(processes, cores, kind, name) | {
        "program": name,
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "memory": memory["MemTotal"],
        "free_memory": memory["MemAvailable"],
        "shared_memory": _free_space("/dev/shm"),
        "gpus": _gpus(),
    }


def usable_cores(root: str = "/") -> int:
    """Return the number of usable cores: by affinity, or by the quota of the container or job (cgroup 2) if smaller.

    The hardware threads of a core count once.
    """
    found: list[float] = [_count("thread_siblings_list", root) or len(os.sched_getaffinity(0))]
    with suppress(OSError), open(os.path.join(root, "proc/self/cgroup")) as file:
        names = file.read().strip().rpartition("0::/")[2].split("/")
        for depth in range(len(names) + 1):  # the group, and those above it
            with suppress(OSError), open(os.path.join(root, "sys/fs/cgroup", *names[:depth], "cpu.max")) as limit:
                quota, period = limit.read().split()
                found += [int(quota) / int(period)] if quota != "max" else []
    return max(1, int(min(found)))


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _memory() -> dict[str, int]:
    """Return the memory sizes of ``/proc/meminfo`` in bytes, by the kernel's names."""
    with open("/proc/meminfo") as file:
        rows = (line.split() for line in file)
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def _free_space(folder: str) -> int:
    """Return the free bytes on the file system of ``folder``; 0 if it is missing."""
    with suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return 0


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    return []


if __name__ == "__main__":
    which, processes, cores, kind, name = sys.argv[1:]
    print(json.dumps((facts if which == "all" else place)(processes, int(cores), kind, name)))
