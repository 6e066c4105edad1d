"""Run a job, and requeue the Slurm or PBS job around it after a preemption."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from ddp_callbacks.cluster.environment import NO_REPORT
from ddp_callbacks.errors import EXIT_PREEMPTED, ConfigurationError
from ddp_callbacks.launcher.batch_job import job_end, requeue
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.launch import CannotStart, Launch
from ddp_callbacks.launcher.meant import misplaced
from ddp_callbacks.launcher.streams import Output, Terminal
from ddp_callbacks.launcher.watch import Watch
from ddp_callbacks.reporting.collector import Collector
from ddp_callbacks.reporting.requests import STATUS, new_folder, take_requests, write_answer

_BRIEF = 10.0  # seconds; a job that ends itself sooner would requeue itself forever


def run(job: Job) -> int:
    """Run the job, and requeue the Slurm or PBS job around it after a preemption; return the exit code."""
    begin, (seconds, limit) = time.monotonic(), _limit(job)
    if says := misplaced(job.training_script_args, most=False):  # nothing fails: the script may ignore it
        _say(says)
    launch, code = asyncio.run(run_until(job, seconds, limit))
    if code and job.requeue and (launch.stopped_by or code == EXIT_PREEMPTED):
        _say(_requeue(launch, code, time.monotonic() - begin))
    return code


def _limit(job: Job) -> tuple[float, str]:
    """Return the seconds until the job ends, and the name of that end."""
    if job.time_limit is not None:
        return job.time_limit, f"the time limit of {job.time_limit:g} s"
    end = None if job.grace is None else job_end(os.environ)
    if end is None:
        return math.inf, ""
    if end.length is not None and end.length <= job.force:  # each start would ask the job to stop at once
        raise ConfigurationError(
            f"--grace must be shorter than the job, got {job.grace:g} s; {end.name} has {end.length:g} s."
        )
    return end.left, f"the end of {end.name}"


def _requeue(launch: Launch, code: int, seconds: float) -> str:
    """Requeue the job; return what was done, or why not."""
    if code != EXIT_PREEMPTED and launch.has_begun:
        return f"not started again: not every process exited with {EXIT_PREEMPTED}"
    if not launch.stopped_by and seconds < _BRIEF:
        return f"not started again: its processes exited with {EXIT_PREEMPTED} after {seconds:.1f} s, and nobody asked"
    return requeue(os.environ)


async def run_until(
    job: Job, seconds: float, limit: str, stop: Callable[[Launch, Collector], Awaitable[None]] | None = None
) -> tuple[Launch, int]:
    """Run the job; return its exit code, and the launch, which knows what has ended it.

    Args:
        seconds, limit: From now to the job's end, and the name of that end.
        stop: Runs beside the job, and may end it.
    """
    launch = Launch(job, seconds, limit)
    launch.one_stream = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    async with launch:
        try:
            await launch.connect(_say)
            await launch.meet(launch.nodes)
            terminal = Terminal(sys.stdout.fileno(), sys.stderr.fileno(), lambda: launch.is_overdue)
            output = Output(new_folder(job.log_dir), job.show_ranks, not job.no_prefix, terminal)
        except CannotStart as error:
            for problem in str(error).splitlines():
                _say(problem)
            return launch, 2
        except asyncio.CancelledError:  # by a signal, or the end of its time
            _say(f"stopped by {launch.stopped_by}")
            return launch, 128 + (launch.signal or signal.SIGTERM)
        launch.start(launch.nodes)
        report = Collector(job.command, (job.forwarded | job.environ).get(NO_REPORT) != "1")
        taken = take_requests(output.folder, partial(take_request, launch, report, output.folder))
        beside = [launch.pass_on_input(output.begin_lines), taken, *([stop(launch, report)] if stop else [])]
        readers = [asyncio.ensure_future(each) for each in beside]
        with closing(output):
            code = await Watch(launch, output, report).run()
        for reader in readers:
            reader.cancel()
        if terminal.problem:
            _say(f"{terminal.problem}; {output.describe_place(None)}")
        if output.problem:
            _say(output.problem)
        return launch, code or int(bool(terminal.problem or output.problem))


def take_request(launch: Launch | None, report: Collector, folder: Path, wanted: str) -> None:
    """Answer what a command asks of this job, or let the launch take the request."""
    if wanted != STATUS and launch is not None:
        launch.take_request(wanted)
        return
    text = json.dumps(report.data())
    asyncio.get_running_loop().run_in_executor(None, write_answer, folder / STATUS, text)


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        print(f"ddprun: {text}", file=sys.stderr)
