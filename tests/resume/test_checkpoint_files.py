"""The file that a run goes on from: whole at every moment, the last two kept, one job at a time, clear refusals."""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.ranks import Nursery, note, noting_errors, run_distributed

from ddp_callbacks import Preemption, join_process_group
from ddp_callbacks.checkpoints import CheckpointFile, disk, require_same, transfer
from ddp_callbacks.checkpoints.claim import PATIENCE, Claim
from ddp_callbacks.comm import collectives
from ddp_callbacks.errors import CheckpointError, Preempted
from ddp_callbacks.process_group import get_rank

ABOUT = {"batch size": "8"}


def write_and_read(shared_folder: str) -> list[Any]:
    """On the ranks: what each reads, from a folder that all see and from one that rank 0 alone sees. In pieces."""
    transfer.CHUNK_NBYTES, collectives._GATHERED_NBYTES = 1000, 1000
    found, find = [], disk.find

    def find_and_lose(path: str, weights_only: bool) -> Any:
        """Another job replaces the file once this one has read it."""
        result = find(path, weights_only)
        if result is not None and os.path.dirname(path) != shared_folder:
            os.replace(disk.previous_of(path), path)
        return result

    disk.find = find_and_lose
    for folder in (shared_folder, tempfile.mkdtemp(dir=shared_folder)):
        with CheckpointFile(Path(folder, "run.pt")) as file:
            assert file.read() is None
            for step in (1, 2, 3):
                numbers = torch.arange(1000 * get_rank() + step)  # of another size on each rank
                file.write(lambda step=step: {"step": step, "rank": get_rank()}, {"numbers": numbers}, ABOUT)
            saved = file.read()
        assert saved is not None
        own = [saved.own(rank)["numbers"].tolist() for rank in range(saved.world_size)]
        found.append([saved.shared["step"], saved.shared["rank"], saved.about, own])
    return found


def test_all_ranks_get_the_shared_state_and_those_of_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 must see the checkpoint's folder."""
    for found in run_distributed(write_and_read, 2, str(tmp_path)):
        assert found == [[3, 0, ABOUT, [[*range(3)], [*range(1003)]]]] * 2
    assert {"run.previous.pt", "run.pt"} < set(os.listdir(tmp_path))
    host_alone = torch.load(tmp_path / "run.pt", weights_only=True)
    assert host_alone["step"] == 3 and host_alone["ddp_callbacks"]["world_size"] == 2
    assert torch.load(tmp_path / "run.previous.pt", weights_only=True)["step"] == 2


def content(step: int, numel: int = 1) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((numel,), float(step))}


def write_steps(path: Path, *steps: int, numel: int = 1) -> None:
    """By one process, which closes the file afterwards."""
    with CheckpointFile(path) as file:
        for step in steps:
            file.write(content(step, numel), {"step": step}, ABOUT)


def step_at(path: Path) -> int:
    """What a reader gets; it must be whole."""
    saved = CheckpointFile(path).read()
    assert saved is not None
    step: int = saved.shared["step"]
    assert saved.own(0) == {"step": step}
    assert saved.shared["weight"].unique().tolist() == [step]
    return step


# --- kills and signals ------------------------------------------------------------------------------------------------

EVENTS = ("open", "os.rename", "os.remove", "fcntl.fcntl")  # of a write, as Python's audit hooks see it
NUMEL = 500_000  # 2 MB


def at_event(number: int, action: Callable[[], None]) -> None:
    """Call ``action`` right before this process's next event with this number."""
    count = itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and "run." in str(arguments) and next(count) == number:
            action()

    sys.addaudithook(hook)


def write_and_be_killed(folder: str, moment: int, async_save: bool) -> None:
    with CheckpointFile(Path(folder, "run.pt"), async_save=async_save) as file:
        for step in (1, 2):
            file.write(content(step, NUMEL), {"step": step}, ABOUT)
        file.wait()
        at_event(moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
        file.write(content(3, NUMEL), {"step": 3}, ABOUT)


def last_step(path: Path) -> int:
    """Of a run that was killed: each file is whole, the next job can claim the path at once, and nothing is left."""
    start = time.monotonic()
    with CheckpointFile(path) as file:
        assert time.monotonic() - start < PATIENCE
        if not path.exists():  # killed between two renames
            os.replace(path.with_name("run.previous.pt"), path)
            return step_at(path)
        saved = file.read()
        assert saved is not None
        assert sorted(os.listdir(path.parent)) == ["run.previous.pt", "run.pt", "run.pt.lock"]
    assert step_at(path) - step_at(path.with_name("run.previous.pt")) == 1
    return step_at(path)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_kill_at_each_moment_of_a_write_leaves_the_old_file_or_the_new_one(
    nursery: Nursery, tmp_path: Path, async_save: bool
) -> None:
    """Kills while writing leave one whole file."""
    steps = []
    for moment in range(1, 30):
        folder = tmp_path / f"{moment}"
        folder.mkdir()
        (rank,) = nursery.run(write_and_be_killed, 1, tmp_path, str(folder), moment, async_save)
        if rank.code == 0:
            break
        assert rank.code == -signal.SIGKILL, rank.stderr
        steps.append(last_step(folder / "run.pt"))
    assert rank.code == 0 and len(steps) >= 5
    assert steps == sorted(steps) and {steps[0], steps[-1]} == {2, 3}, steps


def signal_while_writing(folder: str) -> None:
    with Preemption() as preemption, CheckpointFile(Path(folder, "run.pt")) as file:
        file.write(content(1, NUMEL), {"step": 1}, ABOUT)
        at_event(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        file.write(content(2, NUMEL), {"step": 2}, ABOUT)
        note("asked", [preemption.is_requested(), preemption.reason])


def test_a_signal_during_a_write_is_noted_and_the_write_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    """A signal lets a write finish."""
    (rank,) = nursery.run(signal_while_writing, 1, tmp_path, str(tmp_path))
    assert rank.code == 0, rank.stderr
    asked, reason = rank.notes["asked"]
    assert asked and reason.startswith("SIGTERM, first seen on rank 0")
    assert step_at(tmp_path / "run.pt") == 2


class Fatal:
    """Its rank dies while it saves this."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank(folder: str, which: int) -> None:
    join_process_group()
    with noting_errors(), CheckpointFile(Path(folder, "run.pt")) as file:
        file.write(content(1), {"step": 1}, ABOUT)
        fatal = Fatal() if get_rank() == which else None
        own = {"step": 2, "fatal": fatal} if which else {"step": 2}
        file.write({**content(2), "fatal": fatal}, own, ABOUT)


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_dies_during_a_write_leaves_the_old_file_and_an_error_on_the_others(
    nursery: Nursery, tmp_path: Path, which: int
) -> None:
    ranks = nursery.run(lose_a_rank, 2, tmp_path, str(tmp_path), which)
    assert ranks[which].code == -signal.SIGKILL
    kind, text = ranks[1 - which].notes["error"]
    assert kind == "PeerError" and f"rank {which}" in text, text
    assert step_at(tmp_path / "run.pt") == 1


# --- the disk ---------------------------------------------------------------------------------------------------------


def fill_the_disk(folder: str, async_save: bool) -> dict[str, Any]:
    """On the ranks: a write that fits, one that doesn't, and one that does."""
    found: dict[str, Any] = {}
    with CheckpointFile(Path(folder, "run.pt"), async_save=async_save) as file:
        for step in (0, 1):
            file.write(content(step), {"step": step}, ABOUT)
        file.wait()
        if get_rank() == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
        with redirect_stderr(io.StringIO()) as said, pytest.raises(CheckpointError) as caught:
            file.write(content(2, 2_000_000), {"step": 2}, ABOUT)
            file.wait()
        found["error"], found["said"] = str(caught.value), said.getvalue()
        found["left"] = sorted(os.listdir(folder)) if get_rank() == 0 else []
        file.write(content(3), {"step": 3}, ABOUT)
        file.wait()
        saved = file.read()
        assert saved is not None
        found["step"] = saved.shared["step"]
    return found


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_is_an_error_on_all_ranks_that_says_where_and_what_is_still_there(
    tmp_path: Path, async_save: bool
) -> None:
    """A full disk raises an error everywhere."""
    results = run_distributed(fill_the_disk, 2, str(tmp_path), async_save)
    path = tmp_path / "run.pt"
    for found in results:
        assert re.match(
            rf"{path} cannot be written on host \S+: File too large\. Still there, whole and unchanged: {path} and "
            rf"{tmp_path}/run\.previous\.pt\. Raise the limit on file sizes \(ulimit -f\), or take another",
            found["error"],
        ), found["error"]
        assert found["step"] == 3
    assert results[0]["left"] == ["run.previous.pt", "run.pt", "run.pt.lock"]
    assert (results[0]["error"] in results[0]["said"]) == async_save


def test_a_job_that_is_asked_to_stop_does_not_pass_over_a_write_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr(disk, "write", fail)
    with pytest.raises(CheckpointError, match="no room"), CheckpointFile(tmp_path / "run.pt", async_save=True) as file:
        file.write(content(0), {"step": 0}, ABOUT)
        raise Preempted("SIGTERM", "run.pt")


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def with_other_numbers(whole: bytes) -> bytes:
    before, after = (torch.full((50,), value).numpy().tobytes() for value in (2.0, 7.0))
    return whole.replace(before, after, 1)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "all zeros": lambda whole: bytes(len(whole)),
    "4 zeros at the beginning": lambda whole: bytes(4) + whole[4:],
    "512 zeros at the beginning": lambda whole: bytes(512) + whole[512:],
    "4 KiB of zeros at the end": lambda whole: whole[:-4096] + bytes(4096),
    "other bytes": with_other_numbers,
    "other bytes at both ends": lambda whole: b"1234" + whole[4:-4] + b"5678",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_passed_over_for_the_one_before_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A damaged file gives way to the one before."""
    path = tmp_path / "run.pt"
    write_steps(path, 1, 2, numel=1000)
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.warns(UserWarning, match=r"run\.pt is damaged, so the run resumes from the one before: .*ous"):
        assert step_at(path) == 1
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(os, "fsync", full_disk)
        write_steps(path, 3)
    said = rf"[\d.]+ MB are free there\. Still there, whole and unchanged: {tmp_path}/run\.previous\.pt\. Make room"
    assert re.search(said, str(caught.value)), caught.value
    write_steps(path, 3)  # by another object, as load_checkpoint(path) and save_checkpoint(path) do
    assert [step_at(path), step_at(tmp_path / "run.previous.pt")] == [3, 1]  # not the damaged one


def test_a_file_with_any_one_byte_flipped_is_read_right_or_passed_over(tmp_path: Path) -> None:
    """One flipped byte never stops a run."""
    path = tmp_path / "run.pt"
    write_steps(path, 1, 2)
    whole = path.read_bytes()
    table = whole.index(b"PK\x01\x02")  # each of its bytes means something, and torch reads others than zipfile does
    flips = [(place, 0xFF) for place in [*range(0, table, 23), *range(table, len(whole))]]
    flips += [(place, 1) for place in range(table, len(whole)) if whole[place] in b"01"]  # data/0 becomes data/1
    for place, flip in flips:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step = step_at(path)
        assert [step, "run.pt is damaged" in "".join(str(each.message) for each in warned)] in ([2, False], [1, True])


def test_a_file_with_any_damage_is_passed_over(tmp_path: Path) -> None:
    """No damage to a file stops a run."""
    path, choice = tmp_path / "run.pt", random.Random(0)
    write_steps(path, 1, 2, numel=300)
    whole = path.read_bytes()

    def at_random(whole: bytes) -> bytes:
        place, length = choice.randrange(len(whole)), choice.choice((1, 16, 512, 4096))
        found = choice.choice((bytes(length), choice.randbytes(length), b""))
        return whole[:place] + found + whole[place + length :]

    for end in range(1, len(whole), 61):
        path.write_bytes(at_random(whole) if end % 3 else whole[:end] + bytes((len(whole) - end) * (end % 2)))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step = step_at(path)
        assert step == 2 - any("run.pt is damaged" in str(each.message) for each in warned)


def test_a_lost_file_is_passed_over_and_two_damaged_ones_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    write_steps(path, 1, 2)
    os.remove(path)
    with pytest.warns(UserWarning, match=r"run\.pt is not there, so the run resumes from the one before"):
        assert step_at(path) == 1
    path.write_bytes(b"")
    (tmp_path / "run.previous.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read: .*run\.pt is damaged.*previous.*is damaged"):
        CheckpointFile(path).read()


def of_a_newer_version(path: Path) -> None:
    write_steps(path, 1)
    newer = torch.load(path, weights_only=True)
    newer["ddp_callbacks"] |= {"format": 2, "version": "9.1"}
    torch.save(newer, path)


def numpy_file() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.ones(3))
    return file.getvalue()


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "newer": (of_a_newer_version, r"run\.pt was written by ddp_callbacks 9\.1 in format 2; this is .* to 1"),
    "torch's": (
        lambda path: torch.save({"state_dict": {}}, path),
        r"run\.pt is no checkpoint of ddp_callbacks .* no key 'ddp_callbacks'",
    ),
    "text": (lambda path: path.write_text("epochs: 3\n"), r"run\.pt is no checkpoint of ddp_callbacks"),
    "NumPy's": (lambda path: path.write_bytes(numpy_file()), r"no checkpoint can be read: \S+run\.pt is damaged; "),
    "a folder": (lambda path: path.mkdir(), r"run\.pt cannot be read on host \S+: .*Is a directory"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_others_and_of_newer_versions_are_refused_and_stay(tmp_path: Path, name: str) -> None:
    """Resuming refuses others' files or newer versions."""
    make, says = OTHERS[name]
    path = tmp_path / "run.pt"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(CheckpointError, match=says):
        CheckpointFile(path).read()
    assert before is None or path.read_bytes() == before


def test_objects_other_than_plain_data_are_read_by_those_who_trust_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with CheckpointFile(path) as file:
        file.write({"object": Path("x")}, {}, {})
        with pytest.raises(CheckpointError, match=r"nor plain data \(pathlib\.[\w.]+\).*weights_only=False"):
            file.read()
    trusting = CheckpointFile(path, weights_only=False).read()
    assert trusting is not None and trusting.shared == {"object": Path("x")}


def test_a_path_that_cannot_be_used_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    faults = {
        "folder": r"folder must be the path of a file, but there is a folder",
        "file/run.pt": r"the folder of \S+file/run\.pt cannot be written: .*(exists|Not a dir)",
    }
    for name, says in faults.items():
        with pytest.raises(CheckpointError, match=says):
            CheckpointFile(tmp_path / name).open()


def test_a_file_of_another_run_is_refused_with_both_values() -> None:
    saved = {"model": "Linear", "batch size": "8", "samples": "100"}
    require_same(saved, dict(saved))
    text = r"run\.pt belongs to another run \(batch size: 8 in the file, 16 now; samples: 100 in the file"
    with pytest.raises(CheckpointError, match=text):
        require_same(saved, {"model": "Linear", "batch size": "16"}, "run.pt")


def test_what_killed_processes_of_any_host_have_left_goes_when_the_path_is_claimed(tmp_path: Path) -> None:
    """A new job removes what killed writers left."""
    for name in ("run.pt.node7-12.tmp", "run.previous.pt.node7-12.tmp", "run2.pt.node7-12.tmp", "run.pt.notes"):
        (tmp_path / name).touch()
    with CheckpointFile(tmp_path / "run.pt"):
        assert sorted(os.listdir(tmp_path)) == ["run.pt.lock", "run.pt.notes", "run2.pt.node7-12.tmp"]
    assert sorted(os.listdir(tmp_path)) == ["run.pt.notes", "run2.pt.node7-12.tmp"]


# --- two jobs ---------------------------------------------------------------------------------------------------------


def claim_in_vain(folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFile(Path(folder, "run.pt")).open()
    return str(caught.value)


def test_the_second_job_that_writes_a_path_is_refused_and_hears_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job at a time writes a path."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with CheckpointFile(tmp_path / "run.pt"):
        monkeypatch.delenv("SLURM_JOB_ID")
        (tmp_path / "run.pt.lock").read_bytes()  # as a copy of the folder does
        for text in run_distributed(claim_in_vain, 2, str(tmp_path)):
            assert re.search(
                rf"run\.pt is being written by another job: the process {os.getpid()} on host {socket.gethostname()}, "
                r"SLURM_JOB_ID 4711, which has had it since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
                text,
            ), text
    write_steps(tmp_path / "run.pt", 1)


def fork_with_a_claim(folder: str) -> None:
    """A loader worker that outlives its process, which is killed."""
    claim = Claim(str(Path(folder, "run.pt")))
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)
        os.read(reader, 1)  # until the other process closes its end
        os._exit(0)
    os.close(claim._file)  # as the kernel does for a killed process
    Claim(str(Path(folder, "run.pt"))).release()
    os.close(writer)
    os.wait()
    note("done")


def test_forked_children_do_not_keep_the_claim(nursery: Nursery, tmp_path: Path) -> None:
    (rank,) = nursery.run(fork_with_a_claim, 1, tmp_path, str(tmp_path), deadline=60)
    assert "done" in rank.notes, rank.stderr


# --- beside training --------------------------------------------------------------------------------------------------


def test_a_write_beside_training_holds_the_state_of_its_moment_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A write beside training holds its moment's state."""
    caplog.set_level("INFO")
    go_on, flush = threading.Event(), os.fsync

    def slow_disk(descriptor: int) -> None:
        assert go_on.wait(60)
        flush(descriptor)

    path, weight = tmp_path / "run.pt", torch.zeros(1000)
    shared = {"step": 1, "weight": weight, "tied": weight[:10]}
    monkeypatch.setattr(os, "fsync", slow_disk)
    with CheckpointFile(path, async_save=True) as file:
        file.write(shared, {"step": 1}, ABOUT)
        weight.add_(1)
        assert not path.exists()  # the write is under way, and training goes on
        threading.Timer(0.2, go_on.set).start()
        file.write(lambda: {**shared, "step": 2}, {"step": 2}, ABOUT)
        assert re.search(r"waited 0\.\d s for the last write of \S+run\.pt before the next one", caplog.text)
        first = torch.load(path)
        file.wait()
    assert first["weight"].unique().tolist() == [0]
    assert first["tied"].untyped_storage().data_ptr() == first["weight"].untyped_storage().data_ptr()
    assert torch.load(path)["weight"].unique().tolist() == [1]
    assert torch.load(tmp_path / "run.previous.pt")["step"] == 1


def test_tensors_that_share_memory_and_differ_in_length_are_whole_after_async_save(
    tmp_path: Path,
) -> None:
    memory = np.arange(1000.0)
    views = {"short": torch.from_numpy(memory[:10]), "long": torch.from_numpy(memory)}
    with CheckpointFile(tmp_path / "run.pt", async_save=True) as file:
        file.write(views, {}, {})
    assert torch.load(tmp_path / "run.pt")["long"].tolist() == memory.tolist()
