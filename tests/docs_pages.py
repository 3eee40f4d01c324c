# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The pages of the documentation, their code blocks, and how each block is run.

A page's blocks run in order, in an empty folder. The first word after the backticks is the language, the rest says
what the block stands for:

    ```python               runs; the Python blocks of a page share their names
    ```python train.py      also is the file train.py, which later blocks may launch
    ```bash                 runs; `first machine` or `second machine` behind it: in the folder of that machine, and
                            two such blocks in a row run at the same time
    ```json lshdp_plan.json the file, a plan; without a name: a plan, or sections of one
    ```yaml cluster.yaml    the file
    ```text                 beginnings of lines that the block before it printed, in this order; `...` stands for the
                            rest, and numbers may differ

A block that cannot run has `<!-- not run: REASON -->` before it, with one of `REASONS`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launching import LOOPBACK, base_environment, free_port
from markdown_it import MarkdownIt


ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("bash", "json", "python", "text", "yaml")
MACHINES = ("first machine", "second machine")
BLOCK_TIMEOUT = 600.0
REASONS = ("installs packages", "needs a GPU", "needs other machines", "needs root", "needs the Hugging Face Hub")
REASONS += ("runs these tests",)
_MARKER = re.compile(r"<!-- not run: (.+?) -->\s*$")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")

# Two machines are two folders of this one, connected by its loopback; one that has no GPU trains on CPUs.
SUBSTITUTIONS = (
    (r"192\.0\.2\.[12]", "127.0.0.1"),
    (r"\beth0\b", LOOPBACK),
    (r" --gpu\b", " --cpu"),
)
# `make` takes the packages that are installed instead of a new environment, and two machines need no network to copy.
_PREAMBLE = """\
make() { command make -C "$DOCS_ROOT" VENV="$DOCS_FOLDER/venv" OUTPUT="$PWD/outputs/quickstart" "$@"; }
scp() { cp "${@:1:$#-1}" "$DOCS_FOLDER/second"; }
accelerate-lshdp() {
    if [ "$1" = config ] || [ "$*" != "${*#doctor --nodes}" ]; then set -- "$@" --main-port "$DOCS_PORT"; fi
    command accelerate-lshdp "$@"
}
"""


@dataclass(frozen=True)
class Block:
    """One code block of a page. `about` is what follows the language, `not_run` the reason not to run it."""

    page: Path
    line: int
    language: str
    about: str
    text: str
    not_run: str | None

    @property
    def machine(self) -> str | None:
        return self.about if self.about in MACHINES else None

    @property
    def file(self) -> str | None:
        """The name of the file that the block is."""
        return self.about if self.about and self.machine is None else None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def name_of(page: Path) -> str:
    """As it is called in the ids of tests."""
    return str(page.relative_to(ROOT))


def read_blocks(page: Path) -> list[Block]:
    """All fenced and indented code blocks of a page."""
    blocks = []
    reason = None
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language, _, about = token.info.strip().partition(" ")
            blocks.append(Block(page, token.map[0] + 1, language, about.strip(), token.content, reason))
        if not token.hidden and token.nesting >= 0 and token.level == 0:
            marker = _MARKER.match(token.content) if token.type == "html_block" else None
            reason = None if marker is None else marker[1]
    return blocks


def commands_in(block: Block) -> Iterator[list[str]]:
    """The commands of a bash block as words, without comments and what sets variables for one command."""
    begun = ""
    for line in block.text.replace("\\\n", " ").splitlines(keepends=True):
        begun += line
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # in a text of several lines
            continue
        begun = ""
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def run_page(page: Path, folder: Path, *, launches: bool) -> None:
    """Runs the blocks of a page in the current process and its children.

    Args:
        folder: an empty folder, which becomes the working directory.
        launches: whether bash blocks run, too. Without, Python files run as if by themselves, in one process.

    Raises:
        AssertionError: a command failed or had not ended in time, or an output is another than the page shows.
    """
    _prepare_folder(folder)
    os.chdir(folder)
    run = _PageRun(page, folder)
    sys.path.insert(0, str(run.place))  # for pages whose blocks import what other blocks are
    try:
        _run_blocks(page, run, launches)
    finally:
        sys.path.remove(str(run.place))
        for name in [block.file.removesuffix(".py") for block in read_blocks(page) if block.file]:
            sys.modules.pop(name, None)


def _run_blocks(page: Path, run: _PageRun, launches: bool) -> None:
    names: dict = {"__name__": "__main__"}
    together: list[Block] = []  # on two machines at the same time
    for block in read_blocks(page):
        if together and block.machine in (None, together[0].machine):
            run.bash(together)
            together = []
        if block.file:
            run.write(block)
        if block.not_run:
            run.output = ""
        elif block.language == "python" and not (block.file and launches):
            run.python(block, {"__name__": "__main__"} if block.file else names)
        elif block.language == "bash" and launches and block.machine:
            together.append(block)
        elif block.language == "bash" and launches:
            run.bash([block])
        elif block.language == "text" and launches:
            check_output(block, run.output)
    if together:
        run.bash(together)


def _prepare_folder(folder: Path) -> None:
    """Lets a page find what lies in the repository, from which its commands are to be run."""
    for name in ("accelerate_configs", "benchmarks", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", folder / "docs")  # a page draws its pictures anew
    for machine in MACHINES:
        (folder / machine.split()[0]).mkdir()
    # For `make`: an environment that is installed already.
    (folder / "venv").mkdir()
    (folder / "venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / "venv" / ".installed").touch()


class _PageRun:
    def __init__(self, page: Path, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.output = ""  # of the last block that ran
        has_machines = any(block.machine for block in read_blocks(page))
        self.place = folder / "first" if has_machines else folder  # where files are written

    def write(self, block: Block) -> None:
        """Writes the file that a block is."""
        (self.place / block.file).write_text(block.text, encoding="utf-8")

    def python(self, block: Block, names: dict) -> None:
        """Runs a Python block here, with the line numbers of the page."""
        printed = io.StringIO()
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            exec(code, names)
        self.output = printed.getvalue()

    def bash(self, blocks: Sequence[Block]) -> None:
        """Runs bash blocks, several at the same time; raises AssertionError with their output if one fails."""
        running = [subprocess.Popen(**self._arguments(block)) for block in blocks]
        deadline = time.monotonic() + BLOCK_TIMEOUT
        outputs, late = [], []
        for block, process in zip(blocks, running, strict=True):
            try:
                outputs.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                late.append(str(block))
                os.killpg(process.pid, signal.SIGKILL)
                outputs.append(process.communicate()[0])
        self.output = "\n".join(outputs)
        codes = {str(block): process.returncode for block, process in zip(blocks, running, strict=True)}
        assert not late, f"{late} had not ended after {BLOCK_TIMEOUT:g} s\n{self.output[-8000:]}"
        assert not any(codes.values()), f"found exit codes {codes}\n{self.output[-8000:]}"

    def _arguments(self, block: Block) -> dict:
        text = block.text
        for pattern, replacement in SUBSTITUTIONS:
            text = re.sub(pattern, replacement, text)
        environment = base_environment()
        del environment["ACCELERATE_USE_CPU"], environment["GLOO_SOCKET_IFNAME"]  # what readers do not set
        environment.update(DOCS_ROOT=str(ROOT), DOCS_FOLDER=str(self.folder), DOCS_PORT=str(self.port))
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        return {
            "args": [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", _PREAMBLE + text],
            "cwd": self.folder if block.machine is None else self.folder / block.machine.split()[0],
            "env": environment,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
        }


def check_output(block: Block, output: str) -> None:
    """Checks that the lines of a text block were printed, in this order."""
    printed = iter([_shape(line) for line in output.splitlines()])
    for line in block.text.splitlines():
        beginning = _shape(line.removesuffix("..."))
        if beginning:
            found = any(other.startswith(beginning) for other in printed)
            assert found, f"{block}: {line!r} is not in\n{output[-8000:]}"


def _shape(line: str) -> str:
    """A line without what may differ: numbers, frames of tables, and what a GPU would say."""
    line = re.sub(r"[\u2500-\u257f]", " ", line.replace("GPU", "CPU"))
    return " ".join(_NUMBER.sub("0", line).split())


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), Path(sys.argv[2]), launches=sys.argv[3] == "launches")
    # gloo can abort a Python that exits the ordinary way.
    sys.stdout.flush()
    os._exit(0)
