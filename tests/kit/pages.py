"""The pages of the documentation: what is in them, and how their code is run."""

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
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from kit.commands import environment
from kit.paths import ROOT
from kit.ranks import Nursery, note

LIMIT = 600.0  # seconds, for each command and for the Python blocks of a page together
LANGUAGES = {"python", "diff", "console", "sh", "text", "toml", "json", "yaml"}
HERE = {"ddprun", "python", "torchrun", "mpirun", "mpiexec", "cat", "cd", "head", "ls", "tail"}
# Programs that need a cluster, another machine or the network: the files that they are given must be there.
ELSEWHERE = {"ssh", "ssh-keygen", "ssh-copy-id", "scp", "rsync", "srun", "sbatch", "qsub", "git", "source"}
COLD = {"docs/tutorials/quick_start.md", "docs/how_to/preemptible_jobs.md"}  # run by the real interpreter
_FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_COMMENT = re.compile(r"<!-- *(?P<kind>setup|file|patch|not run|when tested)\b:?(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block, or a hidden comment whose Python code is run like one.

    Attributes:
        page: The path of its page, from the repository's root.
        line: Where its first line of content is, from 1.
        language: What stands behind the fence; ``python`` for a comment.
        text: Its content.
        not_run: The reason, or ``None``.
        file: The name under which it is written to the page's folder, in place of being run.
        patch: The file in which the commands that follow find this diff applied.
        arguments: Added to its commands when they are tested.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None
    file: str | None = None
    patch: str | None = None
    arguments: str = ""

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
        """Compiled, with the page's line numbers. Of a diff what it makes; what it begins with must compile as well."""
        if self.language == "diff":
            old, new = sides(self.text)
            ast.parse(old)
        else:
            new = self.text
        return compile("\n" * (self.line - 1) + new, str(ROOT / self.page), "exec", dont_inherit=True)

    def commands(self) -> list[tuple[str, list[str] | None]]:
        """Each command, with the lines that it prints; ``None`` where these are not shown."""
        if not self.is_commands or self.patch is not None:
            return []
        if self.language == "sh":
            lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
            return [(line, None) for line in lines if line.strip() and not line.lstrip().startswith("#")]
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0].strip(), f"{self}: a console block begins with a command"
        found = []
        for part in parts[1:]:
            command, _, output = re.sub(r"\\\n(> )?\s*", "", part).partition("\n")
            found.append((command, output.splitlines()))
        return found

    @property
    def needs_mpi(self) -> bool:
        return any(command.startswith(("mpirun ", "mpiexec ")) for command, _ in self.commands())


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
        return list(_Reader(self).read())

    @cached_property
    def prose(self) -> str:
        """The text without comments, blocks and inline code."""
        text = re.sub(r"<!--.*?-->", "", "\n".join(self.lines), flags=re.DOTALL)
        text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", "", text, flags=re.DOTALL | re.MULTILINE)
        return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)

    @cached_property
    def links(self) -> list[str]:
        """The targets of links and pictures, without those of other sites."""
        targets = re.findall(r"\]\(([^)\s]+)(?:\s[^)]*)?\)", self.prose)
        targets += re.findall(r"\b(?:src|srcset|href)=\"([^\"\s]+)", self.prose)
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of the headings, as GitHub and MyST make them."""
        text = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", "\n".join(self.lines), flags=re.DOTALL | re.MULTILINE)
        found: set[str] = set()
        for heading in re.findall(r"^#{1,6} +(.+)$", text, re.MULTILINE):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
            base = slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            count = 0
            while slug in found:
                count += 1
                slug = f"{base}-{count}"
            found.add(slug)
        return found


class _Reader:
    """Goes through the lines of a page; a comment counts for the block that follows it."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._at = 0
        self._marks: dict[str, str] = {}

    def read(self) -> Iterator[Block]:
        while self._at < len(self._page.lines):
            line = self._page.lines[self._at]
            if fence := _FENCE.fullmatch(line):
                yield self._fenced(fence)
                self._marks = {}
            elif line.lstrip().startswith("<!--"):
                yield from self._comment()
            else:
                self._at += 1
                if line.strip():
                    self._marks = {}

    def _fenced(self, fence: re.Match[str]) -> Block:
        end = re.compile(rf" *{fence['marks'][0]}{{{len(fence['marks'])},}} *")
        self._at += 1
        first, content = self._at, []
        while self._at < len(self._page.lines) and not end.fullmatch(self._page.lines[self._at]):
            content.append(self._page.lines[self._at])
            self._at += 1
        assert self._at < len(self._page.lines), f"{self._page.name}:{first}: the block has no end"
        self._at += 1
        return self._block(first + 1, fence["info"].strip(), textwrap.dedent("\n".join(content)) + "\n")

    def _comment(self) -> Iterator[Block]:
        first, content = self._at, []
        while self._at < len(self._page.lines):
            content.append(self._page.lines[self._at])
            self._at += 1
            if "-->" in content[-1]:
                break
        text = "\n".join(content)
        assert "-->" in text, f"{self._page.name}:{first + 1}: the comment has no end"
        match = _COMMENT.match(text.strip())
        if match is None:
            return
        head, _, body = match["rest"].partition("-->")[0].partition("\n")
        if match["kind"] == "setup":
            yield Block(self._page.name, first + 2, "python", textwrap.dedent(body))
        elif match["kind"] == "file" and body.strip():
            yield Block(self._page.name, first + 2, "text", textwrap.dedent(body), file=head.strip())
        else:
            self._marks[match["kind"]] = " ".join([head, body]).strip()

    def _block(self, line: int, language: str, text: str) -> Block:
        marks = self._marks
        return Block(
            self._page.name,
            line,
            language,
            text,
            not_run=marks.get("not run"),
            file=marks.get("file"),
            patch=marks.get("patch"),
            arguments=marks.get("when tested", ""),
        )


def sides(diff: str) -> tuple[str, str]:
    """What a diff begins with, and what it makes, with an empty line where the other has one more."""
    lines = _marked(diff)
    old = [text if mark != "+" else "" for mark, text in lines]
    new = [text if mark != "-" else "" for mark, text in lines]
    return textwrap.dedent("\n".join(old)), textwrap.dedent("\n".join(new))


def patched(text: str, diff: str) -> str:
    """``text`` with a diff applied, whose parts are separated by lines ``...`` and have no numbers."""
    for part in re.split(r"^ *\.\.\.\n", diff, flags=re.MULTILINE):
        lines = _marked(part.strip("\n"))
        old, new = ("".join(f"{line}\n" for mark, line in lines if mark != skipped) for skipped in "+-")
        assert text.count(old) == 1, f"the file has this {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text


def _marked(diff: str) -> list[tuple[str, str]]:
    """The lines, each with its mark, which may be followed by a space."""
    lines = [line for line in diff.splitlines() if not re.match(r"@@|--- |\+\+\+ ", line)]
    width = 2 if all(re.match(r"[-+ ]( |$)", line) for line in lines if line.strip()) else 1
    return [(line[:1], line[width:]) for line in lines]


def pages() -> list[Page]:
    """README.md and the pages of the site."""
    return [
        Page(ROOT / "README.md"),
        *(Page(path) for path in sorted((ROOT / "docs").rglob("*.md")) if _is_source(path)),
    ]


def _is_source(path: Path) -> bool:
    return "_build" not in path.parts


def page_named(name: str) -> Page:
    return Page(ROOT / name)


# --- running ---------------------------------------------------------------------------------------------------------


def run_python(name: str, python: str) -> None:
    """In a process of its own: run the Python blocks of a page, in order, in one namespace.

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
            script.write_text(block.text)  # processes that are spawned begin with it
            try:
                exec(block.code(), namespace)
            except BaseException:
                note(str(block), traceback.format_exc())
                return
            note(str(block))


def run_ddprun(*argv: str) -> None:
    """In a process of its own: ``ddprun`` with these arguments."""
    from ddp_callbacks.launcher import cli

    sys.argv[:] = ["ddprun", *argv]
    cli.main()


def check_options(*argv: str) -> None:
    """In a process of its own: whether ``ddprun doctor`` or ``ddprun bench`` takes these arguments."""
    from ddp_callbacks.launcher.options import parse_bench_options, parse_doctor_options

    {"doctor": parse_doctor_options, "bench": parse_bench_options}[argv[0]](argv[1:], {})


@dataclass
class Running:
    """One page as its code runs, in a folder of its own, where commands find a copy of ``examples``."""

    page: Page
    folder: Path
    nursery: Nursery
    python: dict[str, str | None] | None = None
    commands: dict[str, str | None] = field(default_factory=dict)
    here: Path | None = None
    figures: dict[Figures, Figures] = field(default_factory=dict)  # printed, by what the page shows for them

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        shutil.copytree(ROOT / "examples", self.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        for block in self.page.blocks:
            if block.file is not None:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
        self.here = self.folder

    def failure_of(self, block: Block) -> str | None:
        """What went wrong in a block; all that stand before it in the page are run, too, once."""
        if block.is_python:
            return self._failure_of_python(block)
        for earlier in self.page.blocks:
            if earlier.is_commands and earlier.not_run is None and str(earlier) not in self.commands:
                self.commands[str(earlier)] = self._run_commands(earlier)
            if earlier == block:
                break
        return self.commands[str(block)]

    def _failure_of_python(self, block: Block) -> str | None:
        if self.python is None:
            python = shutil.which("python", path=environment()["PATH"])
            options: dict[str, Any] = {"environ": {"OMP_NUM_THREADS": "1"}, "launched": False, "deadline": LIMIT}
            (rank,) = self.nursery.run(run_python, 1, self.folder, self.page.name, python, **options)
            self.python = {name: value for name, value in rank.notes.items() if name.startswith(self.page.name)}
            if not any(self.python.values()) and rank.code:
                self.python["end"] = f"the process ended with {rank.code} after {list(self.python)}:\n{rank.stderr}"
        if str(block) in self.python:
            return self.python[str(block)]
        return f"not reached: {next((text for text in self.python.values() if text), 'it took too long')}"

    def _run_commands(self, block: Block) -> str | None:
        if block.patch is not None:
            path = self.folder / block.patch
            path.write_text(patched(path.read_text(), block.text))
            return None
        for command, expected in block.commands():
            failure = self._run(f"{command.partition('  #')[0].rstrip()} {block.arguments}".rstrip(), expected)
            if failure:
                return f"$ {command}\n{failure}"
        return None

    def _run(self, command: str, expected: list[str] | None) -> str | None:
        words = _words(command)
        if words[0] == "ddprun" and _is_remote(words):
            return self._try_ddprun(words[1:])
        if words[0] == "pip" or words[:3] == ["python", "-m", "pip"]:
            return _missing_extras(command)
        if words[1:3] == ["-m", "venv"]:
            return None
        if words[0] == "make":
            done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
            return done.stderr if done.returncode else None
        if words[0] in ELSEWHERE:
            return self._missing_files(words)
        if words[0] not in HERE:
            return f"tests/pages.py does not know what to do with {words[0]}"
        return self._run_here(command, expected)

    def _try_ddprun(self, argv: list[str]) -> str | None:
        """As far as that goes without the nodes."""
        assert self.here is not None
        body = check_options if argv[0] in ("doctor", "bench") else run_ddprun
        argv = argv if body is check_options else ["--dry-run", *argv]
        (rank,) = self.nursery.run(body, 1, self.here, *argv, launched=False, deadline=LIMIT)
        return rank.stderr or f"exit code {rank.code}" if rank.code else None

    def _missing_files(self, words: list[str]) -> str | None:
        assert self.here is not None
        files = [word for word in words if re.search(r"\.(py|sh|pbs|slurm)$", word)]
        missing = [name for name in files if not (self.here / name).exists()]
        return f"not there: {missing}" if missing else None

    def _run_here(self, command: str, expected: list[str] | None) -> str | None:
        assert self.here is not None
        inherited = environment(cold=self.page.name in COLD)
        environ = {name: value for name, value in inherited.items() if not name.startswith("PYTEST")}
        environ |= {"PYTHONPATH": str(ROOT), "PWD": str(self.here), "COLUMNS": "120"}
        place = self.folder / ".cwd"
        script = f"{command}\ncode=$?; pwd > {shlex.quote(str(place))}; exit $code"
        try:
            done = subprocess.run(
                ["timeout", "--signal=TERM", "--kill-after=10", str(LIMIT), "bash", "-c", script],
                cwd=self.here,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT + 15,
            )
        except subprocess.TimeoutExpired as error:
            return f"not ended after {LIMIT} s: {error.stdout}"
        if place.exists():
            self.here = Path(place.read_text().rstrip("\n"))
        if expected is None and done.returncode:
            return f"exit code {done.returncode}:\n{done.stdout}"
        if expected is not None and not agrees(expected, done.stdout):
            shown = "\n".join(expected)
            return f"shown:\n{shown}\nprinted (exit code {done.returncode}):\n{done.stdout}"
        return self._unequal(expected or [], done.stdout.splitlines())

    def _unequal(self, expected: list[str], printed: list[str]) -> str | None:
        """Which figures differ that the page shows as equal, of one process and of two."""
        for shown, found in zip(figures(expected), figures(printed), strict=False):
            if self.figures.setdefault(shown, found) != found:
                return f"shown twice: {shown}; printed {self.figures[shown]} and {found}"
        return None


def _words(command: str) -> list[str]:
    """Without a comment, and without variables that are set in front."""
    words = shlex.split(command, comments=True)
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    return words


def _is_remote(words: list[str]) -> bool:
    """Whether other machines are named, or more time is needed than a test has."""
    hosts = any(word in ("-H", "--hosts", "--hostfile") or word.startswith("--hosts=") for word in words)
    return (hosts and "--dry-run" not in words) or words[1:2] == ["bench"]


def _missing_extras(command: str) -> str | None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [name for group in re.findall(r"(?:\.|ddp_callbacks)\[([\w,]+)\]", command) for name in group.split(",")]
    missing = [name for name in named if name not in project["optional-dependencies"]]
    return f"no such extra: {missing}" if missing else None


# --- comparing -------------------------------------------------------------------------------------------------------

Figures = tuple[tuple[str, str], ...]


def figures(lines: list[str]) -> list[Figures]:
    """Of each line that says what one or more processes have reached."""
    reached = [line for line in lines if re.search(r"\d process(es)?\b", line)]
    found = (tuple(re.findall(r"(accuracy|AUC|loss)[^;,]*?(\d+\.\d+)", line)) for line in reached)
    return [each for each in found if each]


_NUMBER = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|(?<![A-Za-z_])[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")

_NOTICE = re.compile(r"^(\[.*?\] ?)?ddp_callbacks: ")  # goes to another stream than most lines, too


def plain(line: str) -> str:
    """A line of output without what differs from run to run: numbers, checksums, widths, bars and colours."""
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rstrip("\n").rstrip("\r").rpartition("\r")[2])
    line = re.sub(r"[█▏▎▍▌▋▊▉]+ *", "█", _NUMBER.sub("#", line)).replace("s/it", "it/s").replace("threads", "thread")
    return re.sub(r"([-─━═])\1+", r"\1", " ".join(line.split()))


def _without_bars(lines: list[str]) -> list[str]:
    """Progress bars go to another stream than most lines, and come before or after them."""
    return [line for line in lines if "%|" not in line]


def agrees(expected: list[str], output: str) -> bool:
    """Whether ``output`` is what a page shows: a line ``...`` stands for any lines, ``...`` in a line for any text."""
    parted = re.sub(r"(?<=.)(?=\[[\w.-]+:\d+\] )", "\n", output)  # where a rank's bar had not ended
    lines = _without_bars([plain(line) for line in parted.split("\n")])  # not at the \r of a progress bar
    lines = [line for line in lines if line]
    pattern = ""
    for line in _without_bars([plain(line) for line in expected]):
        if _NOTICE.search(line):
            if line not in lines:
                return False
            lines.remove(line)
        elif line == "...":
            pattern += r"(?:.*\n)*?"
        elif line:
            pattern += ".*".join(re.escape(part) for part in line.split("...")) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None
