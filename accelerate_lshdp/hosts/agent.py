# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`MachineAgent`: does, on one machine, what the command on another machine asks for.

`python -m accelerate_lshdp.hosts.agent` serves it over standard input and output, which ssh connects. It ends when
its input does, and ends the command that it has started: with the process that has started it, however that ended.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate_lshdp import __version__
from accelerate_lshdp.hosts.link_probe import ProbeListener, probe_link
from accelerate_lshdp.hosts.machine_facts import MARK, number_of, read_facts
from accelerate_lshdp.hosts.started_command import STOP_SECONDS, StartedCommand
from accelerate_lshdp.runtime.free_port import free_port
from accelerate_lshdp.runtime.listening import listen_everywhere


#: Seconds without a word from the other machine after which a command is ended: it could not be stopped any more.
LOST_SECONDS = 60.0
#: Of files that `MachineAgent.read` returns, such as profiles and reports.
MOST_BYTES = 2**28


class MachineAgent:
    """This machine. Its methods take and return JSON values.

    Args:
        tell: takes what happens later: the events of `StartedCommand`.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self._tell = tell
        self._listeners: list[ProbeListener] = []
        self._command: StartedCommand | None = None

    def facts(self, *, files: Sequence[str], port: int | None) -> dict[str, Any]:
        """The facts of this machine, as `read_facts` has them.

        Another process reads them: torch would hold a part of each GPU's memory in this one, as long as it lives.
        """
        asked = json.dumps({"files": list(files), "port": port})
        command = [sys.executable, "-m", read_facts.__module__, asked]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"the process that reads them ended with code {done.returncode}")
        return json.loads(done.stdout.rpartition(MARK)[2])

    def address_towards(self, *, address: str, port: int) -> str:
        """This machine's own address on the way to another one. Nothing is sent."""
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])

    def resolve(self, *, name: str) -> str | None:
        """The number that a name of a machine stands for here; None: it stands for none."""
        return number_of(name)

    def clock(self) -> float:
        """This machine's clock, in seconds since 1970."""
        return time.time()

    def choose_port(self, *, preferred: int) -> int:
        """The preferred port, or another one on which nobody listens now, if somebody listens on that."""
        try:
            listen_everywhere(preferred).close()
        except OSError:
            return free_port()
        return preferred

    def listen(self, *, token: str, port: int = 0) -> dict[str, Any]:
        """Begins to listen; ``{"port": ...}``, or ``{"error": ...}`` if that port cannot be listened to."""
        try:
            listener = ProbeListener(bytes.fromhex(token), port)
        except OSError as error:
            return {"error": error.strerror or str(error)}
        self._listeners.append(listener)
        return {"port": listener.port}

    def probe(self, *, address: str, port: int, token: str, with_rate: bool) -> dict[str, Any]:
        """The `LinkFigures` of the way to a listener of another machine, by `probe_link`."""
        return asdict(probe_link(address, port, bytes.fromhex(token), with_rate=with_rate))

    def close_listeners(self) -> None:
        """Ends all that `listen` has begun."""
        while self._listeners:
            self._listeners.pop().close()

    def write(self, *, file: str, content: str) -> str:
        """Writes a file, in place of one that is there; returns its SHA-256.

        Args:
            file: its path from the current folder, which it does not leave.
            content: of it, in base64.
        """
        path = Path(file)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"found {file!r}, expected a path inside of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = base64.b64decode(content)
        # Whole or not at all: a run may be reading the one that is there.
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_bytes(data)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return hashlib.sha256(data).hexdigest()

    def read(self, *, path: str) -> dict[str, str]:
        """The contents of a file, or of the files of a folder, in base64, by their paths from the current folder.

        Raises:
            ValueError: there is nothing, or more than is meant to travel this way.
        """
        found = [Path(path)] if Path(path).is_file() else [each for each in Path(path).rglob("*") if each.is_file()]
        total = sum(each.stat().st_size for each in found)
        if not found or total > MOST_BYTES:
            raise ValueError(f"found {len(found)} files of {total} bytes at {path}, expected some, of {MOST_BYTES}")
        return {str(each): base64.b64encode(each.read_bytes()).decode() for each in found}

    def start(self, *, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts ``accelerate-lshdp`` with arguments. What it prints, and its end, are told."""
        if self._command is not None:
            raise RuntimeError("found a command that runs already, expected none")
        argv = [sys.executable, "-m", "accelerate_lshdp.cli.main", *command]
        self._command = StartedCommand(argv, environment, self._tell)

    def signal(self, *, name: str) -> None:
        """Sends the command a signal, by its name."""
        if self._command is not None:
            self._command.signal(signal.Signals[name])

    def stop(self, *, seconds: float = STOP_SECONDS) -> None:
        """Ends the command, if there is one, as `StartedCommand.stop` does."""
        if self._command is not None:
            self._command.stop(seconds)

    @property
    def has_command(self) -> bool:
        """Whether a command was started."""
        return self._command is not None


#: The methods that another machine may call.
REQUESTS = (
    "facts",
    "address_towards",
    "resolve",
    "clock",
    "choose_port",
    "listen",
    "probe",
    "close_listeners",
    "write",
    "read",
    "start",
    "signal",
    "stop",
)


def answer(agent: MachineAgent, message: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request: its result, or an error."""
    number, request = message.get("number"), message.get("request")
    if request not in REQUESTS:
        return {"number": number, "error": f"found the request {request!r}, expected one of {', '.join(REQUESTS)}"}
    try:
        return {"number": number, "result": getattr(agent, request)(**message.get("arguments", {}))}
    except Exception as error:  # of this machine alone: the one that asks has to hear of it
        return {"number": number, "error": f"{type(error).__name__}: {error}"}


def main() -> int:
    """Serves the agent over standard input and output until the input ends."""
    # What libraries print must not come between answers, nor into a line of one.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    one_line = threading.Lock()

    def tell(message: Mapping[str, Any]) -> None:
        try:
            with one_line:
                print(f"{MARK}{json.dumps(message)}", file=answers, flush=True)
        except OSError:  # nobody hears it any more: the input has ended, too, or the watch below ends all
            return

    agent = MachineAgent(tell)
    heard = [time.monotonic()]
    threading.Thread(target=_end_when_lost, args=(agent, heard), daemon=True).start()
    tell({"ready": True, "version": __version__})
    try:
        for line in sys.stdin:
            heard[0] = time.monotonic()
            if not line.endswith("\n"):  # cut, where the connection was lost
                break
            message = json.loads(line)
            if message:  # else a sign of life
                tell(answer(agent, message))
    finally:
        agent.stop()
    return 0


def _end_when_lost(agent: MachineAgent, heard: Sequence[float]) -> None:
    """Ends the command and this process when nothing has been heard for long.

    A machine that is switched off, or whose cable is pulled, ends no connection.
    """
    while not agent.has_command or time.monotonic() - heard[0] < LOST_SECONDS:
        time.sleep(1.0)
    agent.stop()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
