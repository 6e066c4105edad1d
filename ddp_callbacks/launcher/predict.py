"""``ddprun predict``: train a script on few and on more processes for a short time, and say what more would bring."""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from typing import Any

from ddp_callbacks.errors import ConfigurationError, say
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.launch import Launch
from ddp_callbacks.launcher.run_job import run_until
from ddp_callbacks.reporting import prediction
from ddp_callbacks.reporting.collector import Collector
from ddp_callbacks.reporting.cost import Network, network_of
from ddp_callbacks.reporting.plot import draw

_PROBE = "ddp_callbacks.launcher.probe"
_LOOK = 0.5  # seconds between two looks at what the ranks have sent
_PATIENCE = 30.0  # seconds without any, after which it is said what may be missing
_NOTHING = (
    f"nothing trains with ddp_callbacks yet, {_PATIENCE:g} s after the start. If the script has neither its callback "
    "nor its strategy, end this with Ctrl-C, and give --auto"
)


def run_prediction(job: Job) -> int:
    """Train on all processes, then on one machine, or on one process if there is one machine; return the exit code.

    Raises:
        ConfigurationError: There is one process, or nothing to measure.
    """
    if job.plot and not job.plot.endswith(".svg"):
        raise ConfigurationError(f"--plot writes SVG: name a file that ends with .svg, got {job.plot}.")
    if job.plot and not Path(job.plot).absolute().parent.is_dir():
        raise ConfigurationError(f"the folder of --plot {job.plot} does not exist.")
    if not os.isatty(0):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what the first run reads, the second one would lack
    all_of_them = _Run(job)
    if code := all_of_them.train():
        return code
    if all_of_them.processes == 1:
        raise ConfigurationError(
            "a prediction needs two processes or more: name machines (-H node1,node2), or pass --nproc-per-node 2."
        )
    many = all_of_them.measured()
    fewer = _Run(_fewer(job, many, all_of_them.about()["threads"]), is_second=True)
    if code := fewer.train():
        return code
    nodes = tuple(replace(node, processes="1") for node in job.nodes)
    sums = _Run(job.changed(nodes=nodes, module=True, training_script=_PROBE, training_script_args=[], no_python=False))
    if many.machines > 1 and (code := sums.train()):
        return code
    found = prediction.predict(fewer.measured(), many, _network(job, many, sums), prediction.ways(job.inexact))
    if job.plot:
        Path(job.plot).write_text(draw(found, f"{' '.join(job.command)}: what more machines bring"))
    print(json.dumps({"command": job.command} | found) if job.json else "\n".join(prediction.lines(found)))
    return 0


def _fewer(job: Job, many: prediction.Measured, threads: int) -> Job:
    """Return the job to compare with; its processes have as many threads as those of ``many``."""
    processes = many.processes // many.machines if many.machines > 1 else 1
    first = replace(job.nodes[0], processes=str(processes))
    return job.changed(nodes=(first,), min_nodes=1, environ={"OMP_NUM_THREADS": str(threads)} | job.environ)


def _network(job: Job, many: prediction.Measured, sums: _Run) -> Network:
    """Return the network as the user says, or as sums over all machines have shown; for one machine, a usual one."""
    known = prediction.ASSUMED
    if many.machines > 1:
        known = network_of(json.loads(sums.about()["settings"]["sums"]), many.machines)
    latency, bandwidth = job.latency and job.latency * 1e-6, job.bandwidth and job.bandwidth * 1e9 / 8
    return Network(latency or known.latency, bandwidth or known.bandwidth)


class _Run:
    """A run that ends once it has trained for ``--seconds``, and then writes no checkpoint.

    Attributes:
        processes: How many the nodes have started.
    """

    def __init__(self, job: Job, is_second: bool = False) -> None:
        self._is_second = is_second
        self._job = job.changed(show_ranks=frozenset())
        self._report = Collector(job.command)
        self.processes = 0
        self._begin: dict[str, Any] = {"ranks": []}  # what the ranks had sent when they had warmed up
        self._middle: dict[str, Any] | None = None  # and after half of the time, if it was long enough

    def train(self) -> int:
        """Train; return the exit code, which is not 0 either if the user has ended it and its processes had done."""
        launch, code = asyncio.run(run_until(self._job, math.inf, "", self._stop))
        return code or (128 + (launch.signal or SIGTERM) if launch.stopped_by else 0)

    async def _stop(self, launch: Launch, report: Collector) -> None:
        self._report, self.processes = report, sum(int(node.place["processes"]) for node in launch.nodes)
        is_alone, looks = self.processes == 1 and not self._is_second, 0
        while not is_alone and not self._is_warm():
            await asyncio.sleep(_LOOK)
            looks += 1
            if looks * _LOOK == _PATIENCE and not report.data()["ranks"]:
                say(_NOTHING)
        self._begin = report.data()
        await asyncio.sleep(0 if is_alone else self._job.seconds / 2)
        middle = report.data()
        await asyncio.sleep(0 if is_alone else self._job.seconds / 2)
        self._middle = middle
        launch.has_enough = True
        launch.end(at_once=True)

    def _is_warm(self) -> bool:
        ranks = self._report.data()["ranks"]
        return bool(ranks) and min(rank["steps"] for rank in ranks) >= prediction.FEWEST

    def measured(self) -> prediction.Measured:
        """Return the mean step."""
        return prediction.measured(self._begin, self._report.data(), self._middle)

    def about(self) -> dict[str, Any]:
        """Return the settings, versions and threads of rank 0."""
        about: dict[str, Any] = self._report.data()["ranks"][0]["about"]
        return about
