"""What people type who know other launchers, or who mistype: what is understood, and what is said."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from launcher.jobs import DDPRUN, LIMIT, environment, program, write

TRAIN = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ["OMP_NUM_THREADS"])
"""
FILES = {
    "train.py": TRAIN,
    "my train.py": TRAIN,
    "pack/train.py": TRAIN,
    "proj/p.py": TRAIN,
    "reads.py": "import sys; print(sys.stdin.read().split())",
    "exits.py": "import sys; sys.exit(int(sys.argv[1]))",
    "parses.py": "import argparse; argparse.ArgumentParser().parse_args()",
    "asks.py": "import os; os.environ['RANK'] == '0' or input()",
    "stops.py": "import os; os.environ['RANK'] == '0' or breakpoint()\nprint()",
    "where.py": "import os; print(os.getcwd())",
    "list": "a\nb\nc\n",
    "hosts": "n1:2\nn2 slots=2\n",
}
ONE, TWO = "ddprun --nproc-per-node 1", "ddprun --nproc-per-node 2"

# What is typed in bash, the exit code, and a part of standard output and of standard error.
UNDERSTOOD = [
    (f"{TWO} train.py --lr 3", 0, "[localhost:0] rank 0 of 2 ['--lr', '3']", "ddprun: localhost: ranks 0-1"),
    ("ddprun --nproc_per_node=1 train.py", 0, "rank 0 of 1 []", ""),
    ("ddprun --standalone --nnodes=1 --nproc-per-node=2 train.py", 0, "rank 0 of 2 []", ""),
    (f"{ONE} -m pack.train -H there", 0, "rank 0 of 1 ['-H', 'there']", ""),
    (f"{ONE} --no-python ./train.sh", 0, "rank 0 of 1 ['from sh']", ""),
    (f"{ONE} 'my train.py' \"it's\" ü ''", 0, "[\"it's\", 'ü', '']", ""),
    (f"{ONE} $PWD/train.py", 0, "rank 0 of 1 []", ""),
    (f"{ONE} train.py -- x", 0, "rank 0 of 1 ['--', 'x']", ""),
    ("PBS_NODEFILE=list ddprun --standalone --dry-run train.py | grep -c ^node", 0, "1\n", ""),
    (f"{ONE} --chdir proj p.py", 0, "rank 0 of 1 []", ""),
    (f"{ONE} --chdir=~/proj p.py", 0, "rank 0 of 1 []", ""),
    (f"cd proj && {ONE} ../train.py", 0, "rank 0 of 1 []", ""),
    (f"{ONE} --log-dir=~/logs train.py && ls logs", 0, "\n20", ""),
    (f"{ONE} --no-prefix train.py | cut -c 1-11", 0, "rank 0 of 1\n", ""),
    (f"{TWO} --show-ranks 1 --no-prefix train.py | sort", 0, "rank 1 of 2", ""),
    (f"OMP_NUM_THREADS=3 {ONE} train.py", 0, "rank 0 of 1 [] 3", "3 threads each"),
    (f"OMP_NUM_THREADS=3 {ONE} -x OMP_NUM_THREADS=5 train.py", 0, "rank 0 of 1 [] 5", ""),
    (f"OMP_NUM_THREADS= {ONE} train.py | grep -c ' [1-9]$'", 0, "1\n", ""),
    (f"echo 7 8 | {ONE} reads.py", 0, "['7', '8']", ""),
    ("ddprun --dry-run -H n1:2 -H n2:4 train.py", 0, "node 1: n2\n", ""),
    ("ddprun --dry-run --hostfile=~/hosts train.py", 0, "node 1: n2\n", ""),
    ("ddprun --dry-run -H n1,n2 --python bin/python train.py", 0, "{home}/bin/python -u train.py", ""),
    ("ddprun --dry-run -H n1,n2 --python=~/bin/python train.py", 0, "{home}/bin/python -u train.py", ""),
    ("ddprun --dry-run --python python3 train.py", 0, "command     python3 -u train.py", ""),
    ("ddprun --dry-run --rsh 'ssh -p 2222' -H localhost train.py", 0, "reached by  ssh -p 2222 localhost /bin/sh", ""),
    ("ddprun --help > /dev/full", 1, "", "ddprun: cannot write to standard output: No space left on device\n"),
    (f"ulimit -f 0; {ONE} train.py", 1, "rank 0 of 1 []", "rank-0.log is not complete: File too large\n"),
    (f"ulimit -n 20; {TWO} train.py", 2, "", "/python: Too many open files\n"),
    (f"ulimit -n 24; {TWO} train.py", 1, "", "/python: Too many open files\n"),  # rank 0 has started
    ("ddprun doctor --log-dir /proc/x train.py", 1, "\nFAIL logs: cannot write in /proc/x: ", ""),
    (
        "ddprun doctor -H localhost:9999 train.py",
        1,
        "\nFAIL localhost, processes: 9999 processes are too many for ",
        "",
    ),
    ("ddprun doctor -H localhost,127.0.0.1 train.py", 1, "\nFAIL machines: localhost and 127.0.0.1 are the same ", ""),
    (f"{ONE} exits.py 75", 75, "", ""),
    (
        f"{ONE} train.py --nproc-per-node 2",
        0,
        "rank 0 of 1 ['--nproc-per-node', '2']",
        "ddprun: the script gets --nproc-per-node, as it stands after the script. Put ddprun's flags before it\n",
    ),
    (f"{ONE} train.py -- --nnodes 2 2>&1 | grep -c gets", 1, "0\n", ""),
    (
        f"{ONE} parses.py --nproc_per_node=2; exit 5",
        5,
        "",
        "the script gets --nproc_per_node=2, as it stands after the",
    ),
    (f"{TWO} asks.py", 1, "", "EOF when reading a line. Rank 0 alone reads standard input, and over ssh"),
    (f"{TWO} stops.py", 1, "", "bdb.BdbQuit. Rank 0 alone reads standard input, and over ssh only what you type: let"),
]
SAID = [
    ("ddprun missing.py", "file not found: missing.py (working directory {home})."),
    (f"{ONE} python train.py --lr 3", "ddprun starts Python itself. Leave python out: ddprun train.py --lr 3"),
    (f"{ONE} /usr/bin/python3.11 -u train.py", "Leave /usr/bin/python3.11 out: ddprun train.py"),
    (f"{ONE} python -m pack.train", "Leave python out: ddprun -m pack.train"),
    (f"{ONE} ./train.sh --lr 3", "For each process to run it, type: ddprun --no-python ./train.sh --lr 3"),
    (f"{ONE} train.sh --lr 3", "For each process to run it, type: ddprun --no-python ./train.sh --lr 3"),
    (f"{ONE} --no-python train.sh", "cannot start train.sh: No such file or directory. Name a program in PATH, or by"),
    (f"{ONE} train --lr 3", "there is no file train. Did you mean ddprun train.py --lr 3?"),
    (f"{ONE} 'train.py --lr 3'", "Leave the quotes out: ddprun train.py --lr 3"),
    ("ddprun -x A=1 B=2 train.py", "there is no script B=2, but train.py."),
    ("ddprun -H n1:2 n2:2 train.py", "there is no script n2:2, but train.py. Commas separate hosts: -H a,b."),
    ("ddprun doctr", "there is no file and no command doctr. Did you mean ddprun doctor?"),
    ("ddprun stack", "Did you mean ddprun stacks?"),
    ("ddprun statu", "Did you mean ddprun status?"),
    ("ddprun - < train.py", "each process reads the script from a file: name one, not -."),
    (f"{TWO} /dev/stdin < train.py", "each process reads the script from a file: name one, not /dev/stdin."),
    ("ddprun <(cat train.py)", "each process reads the script from a file: name one, not /dev/fd/"),
    ("ddprun -x PYTHONHOME=/x train.py", "does not start: ModuleNotFoundError: No module named 'encodings'."),
    ("ddprun -H localhost,127.0.0.1 train.py", "localhost and 127.0.0.1 are the same machine."),
    (f"{TWO} --show-ranks 0,5 train.py", "--show-ranks 5: this job has ranks 0-1."),
    ("ddprun --nproc-per-node 100000 train.py", "localhost: 100000 processes are too many for its "),
    ("GLOO_SOCKET_IFNAME=eth7 ddprun train.py", "localhost: GLOO_SOCKET_IFNAME=eth7 does not lead to the others"),
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 ddprun train.py", "ddprun was started as rank 0 of 2."),
    ("ddprun stacks", "ddprun-logs"),
]
HABITS = [*UNDERSTOOD, *((typed, 2, "", says) for typed, says in SAID)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all is typed, also the user's own."""
    folder = tmp_path_factory.mktemp("home")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write(folder, text, name)
    program(folder / "train.sh", "exec python train.py 'from sh'")
    program(folder / "bin" / "ddprun", f'exec {shlex.join(DDPRUN)} "$@"')
    return folder


@pytest.mark.parametrize(("typed", "code", "prints", "says"), HABITS, ids=[row[0] for row in HABITS])
def test_what_is_typed_is_understood_or_said(home: Path, typed: str, code: int, prints: str, says: str) -> None:
    """It understands habits, or corrects them."""
    environ = environment(home)
    environ |= {"PATH": f"{home}/bin:{environ['PATH']}", "HOME": str(home)}
    done = subprocess.run(
        ["bash", "-c", typed],
        cwd=home,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert prints.format(home=home) in done.stdout, done.stdout
    assert says.format(home=home) in done.stderr, done.stderr
    assert code != 2 or (done.stdout == "" and done.stderr.count("\n") == 1), done.stdout + done.stderr
