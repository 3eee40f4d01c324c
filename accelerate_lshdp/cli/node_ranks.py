# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`NodeRanks`: the ranks of this node in an elastic run, forked from a process that has imported what they need."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from accelerate_lshdp.cli import messages
from accelerate_lshdp.runtime.elastic_rank import NodeFolder, say
from accelerate_lshdp.shim.warm_ranks import command


class NodeRanks:
    """Starts and ends ranks, one set after the other.

    Args:
        script: the file into which the process that forks them looks for what to import, "" for a module; None: ranks
            are new interpreters.
        arguments: of the shim.
        memory: of this node, in which ranks hear what they are to do.
    """

    def __init__(self, script: str | None, arguments: Sequence[str], memory: NodeFolder) -> None:
        self._arguments = list(arguments)
        self._memory = memory
        self._codes: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._set = 0
        self._pending = b""
        self._begin(script)

    def _begin(self, script: str | None) -> None:
        """Starts the process that starts ranks."""
        to_warm, self._requests = os.pipe()
        self._answers, from_warm = os.pipe()
        self._pending, self._is_ready = b"", False
        self._warm = subprocess.Popen(
            command(to_warm, from_warm, script),
            pass_fds=(to_warm, from_warm),
            # numpy's algebra would start threads when it is imported, which a fork does not survive.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            # Signals to all processes of a terminal or a job are for the launcher, which ends the ranks in order.
            start_new_session=True,
        )
        os.close(to_warm)
        os.close(from_warm)

    def __enter__(self) -> NodeRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._end()

    def _end(self) -> None:
        """Ends the process that starts ranks."""
        os.close(self._requests)  # upon which it ends
        try:
            self._warm.wait(10)
        except subprocess.TimeoutExpired:
            self._warm.kill()
            self._warm.wait()
        os.close(self._answers)

    @property
    def has_any(self) -> bool:
        """Whether ranks have been started that have not ended."""
        self._listen(0.0)
        return len(self._codes) < len(self._pids)

    @property
    def codes(self) -> list[int]:
        """The codes of the ranks that have ended, in that order: exit code, or -n for signal n."""
        self._listen(0.0)
        return list(self._codes.values())

    @property
    def count(self) -> int:
        """The ranks that have been started, whether they have ended or not."""
        return len(self._pids)

    def wait_until_ready(self) -> None:
        """Waits until ranks can be forked.

        Raises:
            RuntimeError: the process that forks them has ended.
        """
        while not self._is_ready:
            self._listen(1.0)

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Starts ranks with these variables, once those before have ended.

        Raises:
            RuntimeError: the process that forks them has ended.
        """
        self.wait_until_ready()
        self._set += 1
        self._codes, self._pids = {}, {}
        self._memory.clear_ranks()
        for local_rank, environment in enumerate(environments):
            request = {
                "start": f"{self._set}.{local_rank}",
                "arguments": self._arguments,
                "environment": dict(environment),
            }
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        while len(self._pids) < len(environments):
            self._listen(1.0)

    @property
    def listen(self) -> bool:
        """Whether ranks hear what they are told, as they do once they have an accelerator."""
        return any(self._memory.control(_local_rank(name)).exists() for name in self._pids)

    def tell(self, word: bytes) -> None:
        """Tells the ranks something, as far as they listen: see ``accelerator.state_keeper``."""
        for name in self._pids:
            if name not in self._codes:
                say(self._memory.control(_local_rank(name)), word)

    def wait(self, seconds: float) -> bool:
        """Waits until all ranks have ended; whether they have in so many seconds."""
        deadline = time.monotonic() + seconds
        while len(self._codes) < len(self._pids):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._listen(min(left, 0.5))
        return True

    def kill(self) -> None:
        """Ends the ranks at once, and waits for it."""
        for name, pid in self._pids.items():
            if name not in self._codes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait(10.0)

    def signal(self, number: int) -> None:
        """Sends a signal to all ranks."""
        for name, pid in self._pids.items():
            if name not in self._codes:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _listen(self, seconds: float) -> None:
        """Takes in what the process that forks them says."""
        while select.select([self._answers], [], [], seconds)[0]:
            data = os.read(self._answers, 65536)
            if not data:
                raise RuntimeError("the process from which ranks are forked has ended; its output says why")
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            seconds = 0.0

    def _take(self, answer: dict[str, Any]) -> None:
        if "ready" in answer:
            self._is_ready = True
            if answer["threads"]:
                messages.say(
                    f"a package that the script imports has started the threads {answer['threads']}, so ranks are not"
                    " forked, and take longer to start"
                )
                self._end()
                self._begin(None)
        elif "started" in answer:
            self._pids[answer["started"]] = answer["pid"]
        elif answer["ended"] in self._pids:
            self._codes[answer["ended"]] = answer["code"]


def _local_rank(name: str) -> int:
    """The place on the node of a rank that was started under this name."""
    return int(name.partition(".")[2])
