"""What a rank writes down of the exception that ends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.commands import DEADLINE, environment, finish, start
from kit.paths import ROOT
from test_first_failure import DISAGREE, QUOTED

from ddp_callbacks.launcher.first_failure import read_record

HOOK = ROOT / "ddp_callbacks" / "launcher" / "hook"


def left_by(folder: Path, program: str, cold: bool = False) -> tuple[str, str, str]:
    """What a rank leaves that runs ``program``: its record, what it prints, and what goes to its log alone."""
    path, stacks = folder / "record.json", folder / "stacks"
    for each in (path, stacks):
        each.touch()
    names = {"TORCHELASTIC_ERROR_FILE": str(path), "DDP_CALLBACKS_STACKS": str(stacks)}
    environ = environment(cold=cold) | names | {"PYTHONPATH": str(HOOK)}
    with start(["python", "-c", program], folder, cold=cold, env=environ) as process:
        errors, _ = process.communicate(timeout=DEADLINE)
    return path.read_text(), errors, stacks.read_text()


CHAIN = """
class OutOfMemoryError(RuntimeError): __module__ = "torch.cuda"
try: {}["x"]
except KeyError: raise OutOfMemoryError("out of memory. Tried\\nto allocate much")
"""
LOADER = """
class KeyErrorMessage(KeyError):
    __str__ = lambda self: self.args[0]
KeyErrorMessage.__qualname__ = "KeyError"
raise KeyErrorMessage('''Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "x", line 1
KeyError: 'missing'
A note on it, with a remedy.
''')
"""
DISK = """
try: raise RuntimeError("basic_ios::clear: iostream error")
except RuntimeError: raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
"""
MISMATCH = f"class MismatchError(Exception): __module__ = 'ddp_callbacks.errors'\nraise MismatchError({DISAGREE!r})"
PEER = f"""
from ddp_callbacks.errors import PeerError
try: raise RuntimeError("Connection closed by peer")
except RuntimeError as error: raise PeerError('''{QUOTED}
This is rank 0 (host a, pid 1), which stops because the run cannot continue without it. The other rank's traceback:
Traceback (most recent call last):
  File "train.py", line 7, in <module>
ValueError: x
''', 1) from error
"""
OWN_HOOK = "import sys; sys.excepthook = lambda *_: None; raise ValueError('x')"
CAUGHT = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nraise SystemExit(3)"
FORKED = "import os\nif not os.fork(): raise ValueError('of a child')\nos.wait()"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        pytest.param(CHAIN, "torch.cuda.OutOfMemoryError: out of memory. Tried (after KeyError: 'x')", id="chain"),
        pytest.param("raise KeyboardInterrupt", "KeyboardInterrupt", id="-"),
        pytest.param(LOADER, "KeyError: 'missing', in DataLoader worker process 0", id="a loader's, with a note"),
        pytest.param(
            DISK,
            "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534 (after RuntimeError: "
            "basic_ios::clear: iostream error). torch could not write a file: is its disk full?",
            id="disk",
        ),
        pytest.param(MISMATCH, f"ddp_callbacks.errors.MismatchError: {DISAGREE}", id="mismatch"),
        pytest.param(PEER, f"ddp_callbacks.errors.PeerError: {QUOTED}", id="peer"),
        pytest.param(OWN_HOOK, "ValueError: x", id="a hook of the program's own"),
        pytest.param("raise ValueError('x' * 30_000_000)", f"ValueError: {'x' * 988}...", id="30 megabytes"),
        pytest.param(CAUGHT, None, id="caught and printed"),
        pytest.param(FORKED, None, id="of a forked child"),
    ],
)
def test_an_exception_that_ends_a_rank_is_told_in_few_words_and_one_of_ours_whole(
    tmp_path: Path, program: str, reason: str | None
) -> None:
    """The last lines tell an exception briefly."""
    record = read_record(left_by(tmp_path, program)[0], 0.0)
    assert (record and record.reason, record and record.blames) == (reason, (1,) if program is PEER else None)


PROMPT = "import code\ncode.InteractiveConsole().push('1 / 0')"
THREAD = """
import sys, threading
threading.excepthook = lambda failed: sys.excepthook(*failed[:3])
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
"""
CHAINED = """
import sys
def hook(*failed, previous=sys.excepthook): previous(*failed)
sys.excepthook = hook
1 / 0
"""


@pytest.mark.cold
@pytest.mark.parametrize(("program", "is_over"), [(PROMPT, False), (THREAD, False), (CHAINED, True)])
def test_an_exception_ends_a_program_only_if_it_has_left_it(tmp_path: Path, program: str, is_over: bool) -> None:
    record = read_record(left_by(tmp_path, program, cold=True)[0], 0.0)
    assert record is not None and (record.reason, record.is_over) == ("ZeroDivisionError: division by zero", is_over)


DEEP = "\n".join(f"def f{n}(): f{n + 1}()" for n in range(60)) + "\ndef f60(): raise ValueError('x' * 200_000)\nf0()"


def test_a_long_traceback_and_a_long_line_are_shown_in_part_and_kept_whole(tmp_path: Path) -> None:
    """A long traceback is shortened, not in the log."""
    _, shown, kept = left_by(tmp_path, DEEP)
    head, left_out, *frames, begin, end = shown.splitlines()
    assert head == "Traceback (most recent call last):"
    assert re.fullmatch(r"  \.\.\. 2\d more lines are in the log", left_out)  # Python 3.13 marks places in more of them
    assert len(frames) == 39 and all(line.startswith('  File "<string>", line ') for line in frames)
    assert (begin, end) == (f"ValueError: {'x' * 988}...", f"...{'x' * 999}")
    assert kept.count("File") == 62 and kept.endswith(f"\nValueError: {'x' * 200_000}\n")


def test_ctrl_c_while_a_rank_imports_modules_shows_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    _, shown, kept = left_by(tmp_path, "import slow")
    assert shown == "KeyboardInterrupt\n" and kept.count("File") == 2


def test_a_rank_that_stops_because_of_another_one_shows_one_line(tmp_path: Path) -> None:
    _, shown, kept = left_by(tmp_path, PEER)
    assert shown == f"ddp_callbacks.errors.PeerError: {QUOTED}\n"
    assert "direct cause" in kept and kept.endswith("ValueError: x\n\n")


@pytest.mark.cold
def test_the_user_s_own_sitecustomize_runs_and_no_trace_is_left(tmp_path: Path) -> None:
    """Your own `sitecustomize` runs under `ddprun`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('mine')")
    program = "import os, sys; print(os.environ.get('PYTHONPATH'), [p for p in sys.path if 'hook' in p])"
    for theirs in ("", f"{tmp_path}/site"):
        path = f"{HOOK}:{theirs}" if theirs else str(HOOK)
        environ = environment(cold=True) | {"PYTHONPATH": path}
        said = finish(start(["python", "-c", program], tmp_path, cold=True, env=environ))
        assert said == (f"mine\n{theirs} []\n" if theirs else "None []\n")
