"""Train examples/digits_lightning on one process and on two, and compare: ``make demo``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "digits_lightning"
PROGRAMS = Path(sys.executable).parent
COMMANDS = {
    "1 process": [sys.executable, "train.py"],
    "2 processes": [str(PROGRAMS / "ddprun"), "--nproc-per-node", "2", "train.py"],
}
NEXT = f"""
Next, with {PROGRAMS} first in your PATH:
  ddprun --nproc-per-node 4 examples/digits_lightning/train.py     # four processes
  ddprun --keep-going --nproc-per-node 2 examples/digits_lightning/train.py --epochs 99 --patience 99
  kill -9 $(pgrep -n -f digits_lightning/train.py)                 # meanwhile, in another terminal: the newest process
  ddprun doctor -H localhost,ANOTHER                               # can another machine take part?
"""


def main() -> None:
    print("The script: examples/digits_lightning/train.py. Two lines of it are from this library.\n")
    print(f"{'':13} {'accuracy':>8} {'loss':>7} {'seconds':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = [train(name, [*command, "--logs", folder]) for name, command in COMMANDS.items()]
    if results[0] != results[1]:
        sys.exit("the results differ: docs/how_to/my_numbers_differ.md")
    print("\nThe same results. (Seconds include the start of Python; a model this small gains no time.)")
    print(NEXT)


def train(name: str, command: list[str]) -> list[str]:
    """Run a command, print a row of the table, and return its accuracy and its loss."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    found = re.search(r"accuracy (\d+\.\d+), loss (\d+\.\d+)", done.stdout)
    if done.returncode or found is None:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    print(f"{name:13} {found[1]:>8} {found[2]:>7} {time.monotonic() - began:8.1f}", flush=True)
    return list(found.groups())


if __name__ == "__main__":
    main()
