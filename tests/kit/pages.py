"""Read the pages of the documentation, and run their code."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from kit.commands import environment
from kit.paths import ROOT
from kit.ranks import Nursery, free_port, note

LIMIT = 600.0  # seconds, for each command and for the Python blocks of a page together
LANGUAGES = {"python", "diff", "console", "sh", "text", "toml", "json", "yaml"}
MPI = ("mpirun ", "mpiexec ")
HERE = {"ddprun", "python", "torchrun", "mpirun", "mpiexec"}
# Programs that need a cluster, another machine or the network: only their files are checked to exist.
ELSEWHERE = {"ssh", "ssh-keygen", "ssh-copy-id", "scp", "rsync", "srun", "sbatch", "qsub", "git", "source", "make"}
COLD = {"docs/tutorials/quick_start.md", "docs/how_to/preemptible_jobs.md"}  # run by the real interpreter
_BLOCK = r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>.*)\n(?P<text>(?:.*\n)*?)(?P=indent)(?P=marks) *$"
_COMMENT = r"^ *<!-- *(?P<kind>setup|file|patch|not run|when tested)\b:?(?P<head>.*?)(?P<body>\n(?:.*\n)*?)?-->"


@dataclass(frozen=True)
class Block:
    """A fenced block, or a hidden comment whose Python code is run like one.

    Attributes:
        page: The path of its page, from the repository's root.
        line: The line number of its first line of content, from 1.
        language: The word after the fence; ``python`` for a comment.
        text: Its content.
        not_run: The reason why it is not run, or ``None``.
        file: The name of the file in the page's folder to which it is written instead of being run.
        patch: The file to which this diff is applied, for the commands that follow.
        when_tested: Arguments added to its commands in the tests.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None
    file: str | None = None
    patch: str | None = None
    when_tested: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_python(self) -> bool:
        return self.language in ("python", "diff") and self.file is None and self.patch is None

    @property
    def is_commands(self) -> bool:
        commands = self.language in ("sh", "console") and self.file is None and not self.text.startswith("#!")
        return commands or self.patch is not None

    def code(self) -> CodeType:
        """Compile it with the page's line numbers. Of a diff, compile the new side; the old side must parse as well."""
        new = self.text
        if self.language == "diff":
            old, new = sides(self.text)
            ast.parse(old)
        return compile("\n" * (self.line - 1) + new, str(ROOT / self.page), "exec", dont_inherit=True)

    def commands(self) -> list[tuple[str, list[str] | None]]:
        """Return each command with the lines that the page shows as its output; ``None`` if it shows none."""
        if not self.is_commands or self.patch is not None:
            return []
        text = re.sub(r"\\\n(> )?\s*", "", self.text)
        if self.language == "sh":
            return [(line, None) for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        nothing, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
        assert not nothing.strip(), f"{self}: a console block begins with a command"
        lines = [part.splitlines() for part in parts]
        return [(command, output) for command, *output in lines]

    @property
    def needs_mpi(self) -> bool:
        return any(command.startswith(MPI) for command, _ in self.commands())


@dataclass
class Page:
    """A Markdown file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks in their order; a comment applies to the block that follows it."""
        text, found = "".join(f"{line}\n" for line in self.lines), list[Block]()
        marks: dict[str, str] = {}
        for part in re.finditer(f"{_BLOCK}|{_COMMENT}", text, re.MULTILINE):
            kind, body = part["kind"], textwrap.dedent((part["body"] or "").removeprefix("\n"))
            line = text.count("\n", 0, part.start("text" if kind is None else "body") + bool(body)) + 1
            if kind is None:
                content = textwrap.dedent(part["text"])
                found.append(Block(self.name, line, part["language"].strip(), content, **marks))
                marks = {}
            elif kind == "setup":
                found.append(Block(self.name, line, "python", body))
            elif kind == "file" and body:
                found.append(Block(self.name, line, "text", body, file=part["head"].strip()))
            else:
                marks[kind.replace(" ", "_")] = f"{part['head']} {body}".strip()
        return found

    @cached_property
    def links(self) -> list[str]:
        """The targets of links and pictures outside of code, without those of other sites."""
        text = re.sub(r"<!--.*?-->", "", self._without_blocks(), flags=re.DOTALL)
        prose = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)
        targets = re.findall(r"\]\(([^)\s]+)(?:\s[^)]*)?\)", prose)
        targets += re.findall(r"\b(?:src|srcset|href)=\"([^\"\s]+)", prose)
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of the headings, as GitHub and MyST make them; of equal ones, the first."""
        headings = re.findall(r"^#{1,6} +(.+)$", self._without_blocks(), re.MULTILINE)
        plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
        return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}

    @cached_property
    def prose(self) -> str:
        """The text outside of code and comments."""
        text = re.sub(r"<!--.*?-->", "", self._without_blocks(), flags=re.DOTALL)
        return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "`", text)

    @property
    def words(self) -> int:
        """The number of words that a reader sees, including code, without marks of Markdown."""
        text = re.sub(r"<!--.*?-->", "", "\n".join(self.lines), flags=re.DOTALL)
        return sum(bool(re.search(r"\w", word)) for word in text.split())

    def _without_blocks(self) -> str:
        return re.sub(_BLOCK, "", "\n".join(self.lines), flags=re.MULTILINE)


def sides(diff: str) -> tuple[str, str]:
    """Return the old and the new side of a diff, with an empty line for each line that only the other side has."""
    lines = _marked(diff)
    old, new = ("\n".join(text if mark != skipped else "" for mark, text in lines) for skipped in "+-")
    return textwrap.dedent(old), textwrap.dedent(new)


def patched(text: str, diff: str) -> str:
    """Apply a diff to ``text``. Lines ``...`` separate the diff's parts, which have no line numbers."""
    for part in re.split(r"^ *\.\.\.\n", diff, flags=re.MULTILINE):
        lines = _marked(part.strip("\n"))
        old, new = ("".join(f"{line}\n" for mark, line in lines if mark != skipped) for skipped in "+-")
        assert text.count(old) == 1, f"the file has this {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text


def _marked(diff: str) -> list[tuple[str, str]]:
    """Return the lines of a diff, each with its mark; a space may follow the mark in all lines."""
    lines = [line for line in diff.splitlines() if not re.match(r"@@|--- |\+\+\+ ", line)]
    width = 2 if all(re.match(r"[-+ ]( |$)", line) for line in lines if line.strip()) else 1
    return [(line[:1], line[width:]) for line in lines]


def pages() -> list[Page]:
    """Return README.md and the pages of the site."""
    paths = [path for path in sorted((ROOT / "docs").rglob("*.md")) if not {"_build", "_files"} & {*path.parts}]
    return [Page(path) for path in [ROOT / "README.md", *paths]]


def page_named(name: str) -> Page:
    return Page(ROOT / name)


# --- running ---------------------------------------------------------------------------------------------------------


def run_python(name: str, python: str) -> None:
    """In a process of its own, run the Python blocks of a page, in order, in one namespace.

    ``python`` is the interpreter of the processes that they start.
    """
    sys.executable = python
    multiprocessing.set_executable(python)
    namespace = sys.modules["__main__"].__dict__
    script = Path("block.py").absolute()
    namespace |= {"__name__": "__main__", "__file__": str(script)}
    sys.path.insert(0, os.getcwd())
    for block in page_named(name).blocks:
        if block.is_python and block.not_run is None:
            script.write_text(block.text)  # spawned processes begin with it
            try:
                exec(block.code(), namespace)
            except BaseException:
                note(str(block), traceback.format_exc())
                return
            note(str(block))


def try_ddprun(*argv: str) -> None:
    """In a process of its own, run ``ddprun`` with these arguments as far as possible without the nodes."""
    from ddp_callbacks.launcher import cli
    from ddp_callbacks.launcher.options import parse_options

    if argv[0] in ("doctor", "predict"):
        parse_options(argv[1:], {}, command=argv[0])
    else:
        sys.argv[:] = ["ddprun", "--dry-run", *argv]
        cli.main()


@dataclass
class Running:
    """Runs the code of one page, in a folder of its own with a copy of ``examples``."""

    page: Page
    folder: Path
    nursery: Nursery
    figures: dict[Figures, Figures] = field(default_factory=dict)  # printed figures, by those that the page shows

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        shutil.copytree(ROOT / "examples", self.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        for block in self.page.blocks:
            if block.file is not None:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)

    def failure_of(self, block: Block) -> str | None:
        """Return what went wrong in a block, or ``None``; the first call runs all such blocks of the page."""
        if not block.is_python:
            return self._commands[str(block)]
        left = next((text for text in self._python.values() if text), "it took too long")
        return self._python.get(str(block), f"not reached: {left}")

    @cached_property
    def _commands(self) -> dict[str, str | None]:
        blocks = [block for block in self.page.blocks if block.is_commands and block.not_run is None]
        return {str(block): self._run_commands(block) for block in blocks}

    @cached_property
    def _python(self) -> dict[str, str | None]:
        python = shutil.which("python", path=environment()["PATH"])
        options: dict[str, Any] = {"environ": {"OMP_NUM_THREADS": "1"}, "launched": False, "deadline": LIMIT}
        (rank,) = self.nursery.run(run_python, 1, self.folder, self.page.name, python, **options)
        found = {name: value for name, value in rank.notes.items() if name.startswith(self.page.name)}
        if not any(found.values()) and rank.code:
            found["end"] = f"the process ended with {rank.code} after {list(found)}:\n{rank.stderr}"
        return found

    def _run_commands(self, block: Block) -> str | None:
        if block.patch is not None:
            path = self.folder / block.patch
            path.write_text(patched(path.read_text(), block.text))
        for command, expected in block.commands():
            failure = self._run(f"{command.partition('  #')[0].rstrip()} {block.when_tested}".rstrip(), expected)
            if failure:
                return f"$ {command}\n{failure}"
        return None

    def _run(self, command: str, expected: list[str] | None) -> str | None:
        words = re.sub(r"^(\w+=\S* +)+", "", command)  # without variables set in front
        program, *arguments = shlex.split(words, comments=True)
        if program == "ddprun" and (_is_remote(arguments) or "predict" in arguments):
            (rank,) = self.nursery.run(try_ddprun, 1, self.folder, *arguments, launched=False, deadline=LIMIT)
            return rank.stderr or f"exit code {rank.code}" if rank.code else None
        if program == "pip" or arguments[:2] in (["-m", "pip"], ["-m", "venv"]):
            return _missing_extras(command)
        if program in ELSEWHERE:
            files = [self.folder / word for word in arguments if re.search(r"\.(py|sh|pbs|slurm)$", word)]
            missing = [path.name for path in files if not path.exists()]
            return f"not there: {missing}" if missing else None
        return self._run_here(command, expected) if program in HERE else f"kit.pages does not know {program}"

    def _run_here(self, command: str, expected: list[str] | None) -> str | None:
        inherited = environment(cold=self.page.name in COLD)
        environ = {name: value for name, value in inherited.items() if not name.startswith("PYTEST")}
        environ |= {"PYTHONPATH": str(ROOT), "PWD": str(self.folder), "COLUMNS": "120"}
        if command.startswith(MPI):
            environ["MASTER_PORT"] = str(free_port())  # tests beside this one use MPICH, too
        done = subprocess.run(
            ["timeout", "--signal=TERM", "--kill-after=10", str(LIMIT), "bash", "-c", command],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if expected is None and done.returncode:
            return f"exit code {done.returncode}:\n{done.stdout}"
        if expected is not None and not agrees(expected, done.stdout):
            shown = "\n".join(expected)
            return f"shown:\n{shown}\nprinted (exit code {done.returncode}):\n{done.stdout}"
        # Figures that the page shows as equal, for one process and for two, must be equal.
        for shown_here, found in zip(figures(expected or []), figures(_lines(done.stdout)), strict=False):
            if self.figures.setdefault(shown_here, found) != found:
                return f"shown twice: {shown_here}; printed {self.figures[shown_here]} and {found}"
        return None


def _is_remote(arguments: list[str]) -> bool:
    """Whether the arguments of ``ddprun`` name hosts."""
    hosts = any(word in ("-H", "--hosts", "--hostfile") or word.startswith("--hosts=") for word in arguments)
    return hosts and "--dry-run" not in arguments


def _missing_extras(command: str) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"(?:\.|ddp_callbacks)\[([\w,]+)\]", command)
    missing = [name for name in ",".join(named).split(",") if name and name not in extras]
    return f"no such extra: {missing}" if missing else None


# --- comparing -------------------------------------------------------------------------------------------------------

Figures = tuple[tuple[str, str], ...]
_NUMBER = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|(?<![A-Za-z_])[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")
_NOTICE = re.compile(r"^(\[.*?\] ?)?ddp_callbacks: ")  # goes to another stream than most lines


def figures(lines: list[str]) -> list[Figures]:
    """Return the figures of each line that says what one or more processes have reached."""
    reached = [line for line in lines if re.search(r"\d process(es)?\b", line)]
    found = (tuple(re.findall(r"(accuracy|AUC|loss)[^;,]*?(\d+\.\d+)", line)) for line in reached)
    return [each for each in found if each]


def plain(lines: list[str]) -> list[str]:
    """Remove what differs between runs: numbers, checksums, widths, colours, bars, and where the time went."""
    found = []
    for line in lines:
        line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rstrip("\r\n").rpartition("\r")[2])
        line = _NUMBER.sub("#", line).replace("threads", "thread")
        found.append(re.sub(r"([-─━═])\1+", r"\1", " ".join(line.split())))
    return [line for line in found if line and "%|" not in line and " of training: " not in line]


def _lines(output: str) -> list[str]:
    """Split output into lines, not at the ``\\r`` of a progress bar, but where a rank's line follows an open bar."""
    return re.sub(r"(?<=.)(?=\[[\w.-]+:\d+\] )", "\n", output).split("\n")


def agrees(expected: list[str], output: str) -> bool:
    """Whether ``output`` is what a page shows: a line ``...`` stands for any lines, ``...`` in a line for any text."""
    lines, pattern = plain(_lines(output)), ""
    for line in plain(expected):
        if _NOTICE.search(line) and line not in lines:
            return False
        if _NOTICE.search(line):
            lines.remove(line)
        elif line == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.split("...")) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None
