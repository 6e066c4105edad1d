"""The Slurm or PBS job that ``ddprun`` runs in: when it ends, and how it starts again."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ddp_callbacks.cluster.schedulers import output_of

_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # DAYS-HOURS:MINUTES:SECONDS
_PBS_START = ("stime", "start_time")  # PBS Pro, Torque
_RUNNING = ("RUNNING", "SIGNALING")  # SIGNALING: until every node has confirmed a signal
_RESUBMIT = "Let the job script submit itself again after exit code 75, as examples/jobs/preemptible.pbs does"

JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # a variable that each job has, by scheduler


class JobEnd(NamedTuple):
    """When the scheduler ends a job.

    Attributes:
        left: Seconds from now to the end.
        length: Seconds from the job's start to the end; ``None`` if unknown.
        name: The job's name in messages.
    """

    left: float
    length: float | None
    name: str


def job_end(environ: Mapping[str, str]) -> JobEnd | None:
    """Return the end of this job; ``None`` if unknown. Asks the scheduler."""
    if job := environ.get("SLURM_JOB_ID"):
        return _end_in_slurm(job)
    if job := environ.get("PBS_JOBID"):
        return _end_in_pbs(job)
    return None


def requeue(environ: Mapping[str, str]) -> str:
    """Let the scheduler start this job again; return what was done, in one line.

    The scheduler then ends the job, and this process with it. From now on, this process ignores SIGTERM.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if job := environ.get("SLURM_JOB_ID"):
        return _requeue_in_slurm(job)
    if job := environ.get("PBS_JOBID"):
        problem = output_of("qrerun", job)[1]
        return f"PBS job {job} not requeued: {problem}. {_RESUBMIT}" if problem else f"requeued PBS job {job}"
    return f"LSF job {environ['LSB_JOBID']}: LSF requeues it if it was submitted with bsub -Q 75"


def _requeue_in_slurm(job: str) -> str:
    state, _ = output_of("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
    if state and state not in _RUNNING:  # scancel ends it, or Slurm requeues it itself
        return f"Slurm job {job} not requeued: it is {state}"
    _, problem = output_of("scontrol", "requeue", job)
    return f"Slurm job {job} not requeued: {problem}" if problem else f"requeued Slurm job {job}"


def _end_in_slurm(job: str) -> JobEnd | None:
    said, _ = output_of("squeue", "-h", "-j", job, "-o", "%L %l")
    left, length = map(_seconds, f"{said} ".split(" ", 1))
    return None if left is None else JobEnd(left, length, f"Slurm job {job}")


def _end_in_pbs(job: str) -> JobEnd | None:
    said, _ = output_of("qstat", "-f", job)
    attributes = dict(re.findall(r"^\s*(\S+) = (.*)$", said, re.M))
    length = _seconds(attributes.get("Resource_List.walltime", ""))
    start = next((attributes[name] for name in _PBS_START if name in attributes), "")
    with suppress(ValueError, OverflowError):  # qstat shows no start of the job
        began = time.mktime(time.strptime(start, "%a %b %d %H:%M:%S %Y"))
        return None if length is None else JobEnd(began + length - time.time(), length, f"PBS job {job}")
    return None


def _seconds(text: str) -> float | None:
    """Convert a time as schedulers print it to seconds; ``None`` for UNLIMITED, NOT_SET, INVALID."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
