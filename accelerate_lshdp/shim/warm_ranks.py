# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``python -m accelerate_lshdp.shim.warm_ranks``: a process that has imported what ranks need, and forks them.

Importing torch and transformers takes longer than anything else when ranks start. A process that has done it once
forks a new rank in some milliseconds. It has one thread and no device, so that a fork is a process like any other.
Where ranks train on devices, whose libraries do not survive a fork once they are loaded, it imports nothing, and its
ranks begin as new interpreters.

It reads requests as lines of JSON from one descriptor and writes what becomes of its ranks to another one:

    {"start": NAME, "arguments": [...], "environment": {...}}   ->   {"started": NAME, "pid": N}
                                                                     {"ended": NAME, "code": exit code, or -signal}

When its input ends, or the launcher does, it ends, and its ranks with it.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import select
import signal
import sys
from pathlib import Path
from typing import Any

from accelerate_lshdp.runtime.parent_death import LAUNCHER_VARIABLE, end_with
from accelerate_lshdp.shim import script as shim


#: Packages that are imported before ranks are forked, if the script names them; importing them starts nothing.
_WARMED = ("torch", "numpy", "accelerate", "transformers", "datasets", "evaluate", "safetensors")


def main() -> None:
    """Serves requests; in a rank that it has forked, runs the script there and ends with it."""
    requests, answers, script = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
    end_with(os.getppid())
    if script is not None:
        warm_up(script)
    arguments = _Server(requests, answers).serve()
    if arguments is None:
        return
    if script is None:
        os.execv(sys.executable, [sys.executable, "-m", "accelerate_lshdp.run", *arguments])
    shim.main(arguments)


def warm_up(script: str) -> None:
    """Imports what ranks need anyway, and what a script imports of the packages above."""
    import torch

    import accelerate_lshdp.accelerator.accelerator  # noqa: F401

    # The first optimizer of a process imports torch's compiler, which takes longer than all else that a rank does
    # before its first step.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for module, names in imports_of(script):
        if module.partition(".")[0] not in _WARMED:
            continue
        try:
            imported = importlib.import_module(module)
            for name in names:  # some packages import their modules when they are asked for
                getattr(imported, name, None)
        except Exception:  # the script says it, if it matters: it may be where it is not wanted
            continue
    if any(module == "transformers" or module.startswith("transformers.") for module, _ in imports_of(script)):
        import accelerate_lshdp.trainer.overrides  # noqa: F401


def imports_of(script: str) -> list[tuple[str, list[str]]]:
    """The modules that a Python file imports on its top level, with the names that it takes; none if unreadable."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[tuple[str, list[str]]] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, [alias.name for alias in node.names]))
    return found


class _Server:
    """Forks ranks as it is asked.

    Args:
        requests: descriptor of requests.
        answers: descriptor of answers.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._names: dict[int, str] = {}
        self._pending = b""

    def serve(self) -> list[str] | None:
        """Serves until its input ends; returns None then, and the arguments of the shim in a rank that was forked."""
        hears, bell = os.pipe()
        for descriptor in (hears, bell):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        # Signals for all processes of a terminal are for the ranks and the launcher.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._answer({"ready": True, "threads": _threads()})
        while True:
            ready, _, _ = select.select([self._requests, hears], [], [])
            if hears in ready:
                os.read(hears, 4096)
                self._reap()
            if self._requests not in ready:
                continue
            data = os.read(self._requests, 65536)
            if not data:
                return None
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if self._fork(request["start"]):
                    os.close(hears)
                    os.close(bell)
                    self._become_a_rank(request["environment"])
                    return list(request["arguments"])

    def _fork(self, name: str) -> bool:
        """Forks; whether this is the new process."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both processes would write what is in the buffer
        pid = os.fork()
        if pid:
            self._names[pid] = name
            self._answer({"started": name, "pid": pid})
        return not pid

    def _become_a_rank(self, environment: dict[str, str]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.close(self._requests)
        os.close(self._answers)
        os.environ.update(environment)
        os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
        # Ranks of all nodes have been forked from processes like this one: what they draw must differ.
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

    def _reap(self) -> None:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            name = self._names.pop(pid, None)
            if name is not None:
                self._answer({"ended": name, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]


def _threads() -> list[str]:
    """The names of the threads of this process beside its main one, but for those that know what to do at a fork."""
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())]
    return [name for name in names if not name.startswith("jemalloc")]  # pyarrow's


def command(requests: int, answers: int, script: str | None) -> list[str]:
    """The command line of such a process.

    Args:
        requests, answers: its descriptors.
        script: the file into which it looks for what to import, "" for a module; None: its ranks are new interpreters.
    """
    words = [sys.executable, "-m", "accelerate_lshdp.shim.warm_ranks", str(requests), str(answers)]
    return words if script is None else [*words, script]


if __name__ == "__main__":
    main()
