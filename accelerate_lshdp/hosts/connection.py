# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`HostConnection`: an agent on a machine, started over ssh (or beside this process), and what it answers.

The client is the system's ``ssh``, with the keys, names and jumps that its user has set up. It never asks anything: a
machine that wants a password, or whose key is not known, is an error that says what to do once.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import Any

from accelerate_lshdp import __version__
from accelerate_lshdp.documents.hosts import Host
from accelerate_lshdp.hosts.agent import LOST_SECONDS, MARK
from accelerate_lshdp.hosts.started_command import STOP_SECONDS


#: Seconds that an agent has to end what it has started.
END_SECONDS = STOP_SECONDS + 3.0
#: Seconds until ssh gives a machine up that does not answer, and until an agent there has to be ready.
CONNECT_SECONDS, READY_SECONDS = 10, 60.0
_MODULE = "accelerate_lshdp.hosts.agent"
# Not to be the master of a connection that others share, which ends with this one. One that is there may be used.
_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ControlMaster=no", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
# A connection is given up after as long as an agent waits for a word (`agent.LOST_SECONDS`).
_SSH_OPTIONS += ("-o", "ServerAliveInterval=10", "-o", f"ServerAliveCountMax={round(LOST_SECONDS / 10)}")
# A shell's exit codes for what cannot be run, and what is not found; ours for a folder that is not there.
_NOT_EXECUTABLE, _NOT_FOUND, _NO_FOLDER, _SSH_FAILED = 126, 127, 97, 255
_LINES_KEPT = 20


class HostError(RuntimeError):
    """A machine cannot be used from here.

    Attributes:
        fix: what to do about it.
    """

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


class HostConnection:
    """A running agent on a machine; a context manager that ends it.

    Args:
        host: the machine.
        local: whether it is the one on which this process runs, so that no ssh is needed.

    Raises:
        HostError: (when entered) the machine cannot be reached, or the agent cannot be started there.
    """

    def __init__(self, host: Host, *, local: bool) -> None:
        self.host = host
        self._local = local
        self._number = 0
        self._is_ready = False
        self._one_line = threading.Lock()
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors: list[str] = []
        self._hear: Callable[[dict[str, Any]], None] = lambda event: None

    def __enter__(self) -> HostConnection:
        command = agent_command(self.host, local=self._local)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C is for this process, which ends the others in order.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise HostError("found no ssh on this machine", "Install it: apt install openssh-client") from None
        self._readers = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in reversed(self._readers):  # the first waits for the second where the agent ends at once
            reader.start()
        try:
            ready = self._receive(None, time.monotonic() + READY_SECONDS, "to start")
            self._is_ready = True
            if ready.get("version") != __version__:
                raise HostError(
                    f"found accelerate_lshdp {ready.get('version')} there, expected {__version__} as here",
                    "Install the same one there, or name the Python that has it in the file (python: PATH)",
                )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, request: str, timeout: float, **arguments: Any) -> Any:
        """What the agent answers to a request.

        Args:
            request: a method of `MachineAgent`.
            timeout: seconds.
            **arguments: of the method.

        Raises:
            HostError: the method raised, the connection was lost, or there was no answer in time.
        """
        self._number += 1
        message = {"number": self._number, "request": request, "arguments": arguments}
        try:
            self._send(message)
        except OSError:
            raise self._ended() from None
        found = self._receive(self._number, time.monotonic() + timeout, f"to answer {request!r}")
        return result_of(found, request)

    def listen(self, hear: Callable[[dict[str, Any]], None]) -> None:
        """From now on ``hear`` gets the agent's events, in another thread.

        The last one is ``{"event": "lost", "error": a HostError}``, when the agent has ended.
        """
        self._hear = hear

    def say_alive(self) -> None:
        """Tells the agent that this process is there."""
        # Of an agent that has ended, as who listens hears; or of this process, which ends the agent just now.
        with suppress(OSError, ValueError):
            self._send({})

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._one_line:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def give_up(self) -> None:
        """Ends the connection at once; an agent that cannot be reached ends by itself."""
        self._process.kill()

    def close(self) -> None:
        """Ends the agent: it ends when its input does, and ssh with it. Safe to call again."""
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader, stream in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(timeout=1)  # what else holds the pipe must not hold this process
            if not reader.is_alive():
                stream.close()

    def _receive(self, number: int | None, deadline: float, what: str) -> dict[str, Any]:
        while True:
            try:
                found = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise HostError(
                    f"it did not manage {what} in time", f"See whether it is overloaded: {self._by_hand('uptime')}"
                ) from None
            if found is None:
                raise self._ended()
            if number is None or found.get("number") == number:  # answers to what was given up come late
                return found

    def _read_answers(self) -> None:
        for line in self._process.stdout:
            message = _message_of(line)
            if message is None:
                self._note(line)
            elif "event" in message:
                self._hear(message)
            else:
                self._answers.put(message)
        self._answers.put(None)
        self._hear({"event": "lost", "error": self._ended()})

    def _read_errors(self) -> None:
        for line in self._process.stderr:
            self._note(line)

    def _note(self, line: str) -> None:
        if line.strip():
            self._errors.append(line.rstrip())
            del self._errors[:-_LINES_KEPT]

    def _ended(self) -> HostError:
        """The error of an agent that has ended, from the exit code and what was printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._readers[1].join(timeout=5)
        if self._is_ready:  # so it could be reached
            said = f": {self._errors[-1]}" if self._errors else ""
            return HostError(
                f"the connection to its agent ended (code {self._process.returncode}){said}",
                f"See whether it ran out of memory or was switched off: {self._by_hand('uptime')}",
            )
        return explain_end(self.host, self._process.returncode, self._errors, local=self._local)

    def _by_hand(self, command: str) -> str:
        return command if self._local else f"ssh {shlex.quote(destination(self.host))} {shlex.quote(command)}"


def _message_of(line: str) -> dict[str, Any] | None:
    """The message in a line; None: it is something else, or was cut where the connection was lost."""
    if not line.startswith(MARK):
        return None
    try:
        message = json.loads(line.removeprefix(MARK))
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def result_of(found: Mapping[str, Any], request: str) -> Any:
    """The result in an agent's answer to a request. Raises HostError if it is an error."""
    if "error" in found:
        raise HostError(f"{request} failed there: {found['error']}", "Please report this with the whole output")
    return found["result"]


def destination(host: Host) -> str:
    """What ``ssh`` is given for a machine."""
    return host.ssh or host.address


def agent_command(host: Host, *, local: bool) -> list[str]:
    """The command that starts an agent on a machine."""
    python, folder = host.python or sys.executable, host.folder or os.getcwd()
    # `cd` fails before Python starts: a folder that is missing must not look like a package that is.
    script = f"cd {shlex.quote(folder)} || exit {_NO_FOLDER}; exec {shlex.quote(python)} -u -m {_MODULE}"
    if local:
        return ["sh", "-c", script]
    # Nothing that a file holds can become an option of ssh.
    return ["ssh", *_SSH_OPTIONS, "--", destination(host), f"exec sh -c {shlex.quote(script)}"]


def explain_end(host: Host, code: int | None, printed: Sequence[str], *, local: bool) -> HostError:
    """The error for an agent that has ended.

    Args:
        host: the machine.
        code: the exit code of ssh, or of the shell here; None: it has not ended.
        printed: its last lines.
        local: whether no ssh was used.
    """
    target, python = shlex.quote(destination(host)), host.python or sys.executable
    folder = host.folder or os.getcwd()
    there = "" if local else f"ssh {target} "
    text, last = "\n".join(printed), printed[-1] if printed else "it printed nothing"
    if code == _NO_FOLDER:
        return HostError(
            f"found no folder {folder} there",
            f"Make it: {there}mkdir -p {shlex.quote(folder)}; or name another in the file (folder: PATH)",
        )
    if code in (_NOT_FOUND, _NOT_EXECUTABLE):
        return HostError(f"found no Python at {python} there", "Name it in the file (python: PATH)")
    if "No module named 'accelerate_lshdp.hosts" in text:
        return HostError(
            f"found a release of accelerate_lshdp in {python} there that is older than the one here",
            "Install the same one there, or name the Python that has it in the file (python: PATH)",
        )
    if "No module named" in text and "accelerate_lshdp" in text:
        return HostError(
            f"found no accelerate_lshdp in {python} there",
            "Install it there as on this machine, or name the Python that has it in the file (python: PATH)",
        )
    if "No module named" in text:
        return HostError(f"found a package missing in {python} there ({last})", "Install what it names")
    if code != _SSH_FAILED or local:
        return HostError(f"the agent ended there with code {code}: {last}", "See what it says")
    for sign, fix in (
        ("Permission denied", f"Let this machine in: ssh-copy-id {target} (and ssh-add, for a key with a passphrase)"),
        ("Host key verification failed", f"Connect once by hand and check the key it shows: ssh {target} true"),
        ("Could not resolve hostname", "Correct its address, or ssh: in the file"),
        ("Connection refused", f"Start an ssh server there: apt install openssh-server; or correct ssh: ({target})"),
        ("No route to host", f"Start it, connect it, or correct its address ({host.address})"),
        ("timed out", f"Start it, let ssh through its firewall, or correct its address ({host.address})"),
    ):
        if sign in text:
            return HostError(f"cannot be reached by ssh ({last})", fix)
    return HostError(f"cannot be reached by ssh ({last})", f"Try it by hand: ssh {target} true")


def connect_to_all(hosts: Sequence[Host], stack: ExitStack) -> tuple[dict[int, HostConnection], dict[int, HostError]]:
    """Starts an agent on each host, on all of them at the same time.

    Args:
        hosts: in the order of the run's nodes.
        stack: that ends the agents.

    Returns:
        By node, the connections, and why others are missing.
    """

    def connect(host: Host) -> HostConnection | HostError:
        try:
            return stack.enter_context(HostConnection(host, local=is_this_machine(host)))
        except HostError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        found = dict(enumerate(pool.map(connect, hosts)))
    connections = {node: each for node, each in found.items() if isinstance(each, HostConnection)}
    return connections, {node: each for node, each in found.items() if isinstance(each, HostError)}


def is_this_machine(host: Host) -> bool:
    """Whether a host's address is one of this machine, which needs no ssh. One with an ``ssh`` of its own is not."""
    if host.ssh is not None:
        return False
    import psutil

    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    try:
        found = socket.getaddrinfo(host.address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    numbers = [str(place[0]).partition("%")[0] for *_, place in found]
    return any(number in own or ip_address(number).is_loopback for number in numbers)
