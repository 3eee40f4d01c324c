# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SshMachines`: gives the nodes of an emulated cluster what machines of their own have.

Each node gets a host name, names of the others in /etc/hosts, a /dev/shm and an ssh server, in mount and UTS
namespaces of its own. Programs that are started on it by `SshMachines.popen` reach the other nodes with the system's
ssh client as root, by a key that is made for the cluster.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from types import TracebackType
from typing import Any

from laboratory.emulated_cluster.cluster import EmulatedCluster
from laboratory.emulated_cluster.debian_tools import DebianTools
from laboratory.emulated_cluster.system import ClusterError, call


_READY_SECONDS = 10.0
# $1: host name, $2: folder of the node, $3...: what becomes of the process. sshd wants its own user and folder.
_BECOME = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/passwd" /etc/passwd
mount -t tmpfs -o size=1G shm /dev/shm
mount -t tmpfs run /run
mkdir /run/sshd
shift 2
exec "$@"
"""
_SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
Subsystem sftp internal-sftp
"""
_CLIENT = """
Host *
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""


class SshMachines:
    """Host names and ssh servers for the nodes of a cluster; a context manager.

    Args:
        cluster: that has been built. Its end takes all of this away.
        folder: for keys and configurations.
        tools: where programs are looked for.

    Raises:
        ClusterError: (when entered) a program is missing, or a server did not start.
    """

    def __init__(self, cluster: EmulatedCluster, folder: Path, tools: DebianTools) -> None:
        self._cluster = cluster
        self._folder = folder
        self._tools = tools
        self._servers: list[subprocess.Popen] = []

    def __enter__(self) -> SshMachines:
        for program in ("ssh", "ssh-keygen", "unshare", "nsenter", "hostname"):
            if which(program) is None:
                raise ClusterError(f"not installed: {program}")
        self._server_program = self._tools.find("sshd")
        _make_key(self._folder / "key")
        known, names = [], ["127.0.0.1 localhost"]
        for node in self._cluster.nodes:
            folder = self.folder(node.index)
            folder.mkdir()
            _make_key(folder / "host_key")
            known.append(f"{node.address} {(folder / 'host_key.pub').read_text()}")
            names.append(f"{node.address} {name_of(node.index)}")
            (folder / "authorized_keys").write_text((self._folder / "key.pub").read_text())
            (folder / "sshd_config").write_text(_SERVER.format(address=node.address, folder=folder))
            user = "sshd:x:997:65534::/run/sshd:/usr/sbin/nologin\n"
            others = [line for line in Path("/etc/passwd").read_text().splitlines(True) if line[:5] != "sshd:"]
            (folder / "passwd").write_text("".join(others) + user)
        (self._folder / "known_hosts").write_text("".join(known))
        (self._folder / "config").write_text(_CLIENT.format(folder=self._folder))
        # ssh reads the home folder of the user that the system knows, so the configuration is given by a wrapper.
        client = self._folder / "bin" / "ssh"
        client.parent.mkdir()
        client.write_text(f'#!/bin/sh\nexec {which("ssh")} -F {self._folder}/config "$@"\n')
        client.chmod(0o755)
        for node in self._cluster.nodes:
            (self.folder(node.index) / "hosts").write_text("\n".join(names) + "\n")
            self._servers.append(self._start(node.index))
        for node, server in zip(self._cluster.nodes, self._servers, strict=True):
            self._wait_for(node.index, server)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.kill()
            server.wait()

    def folder(self, node: int) -> Path:
        """The folder of a node's files: hosts, authorized_keys, ..."""
        return self._folder / name_of(node)

    def popen(self, node: int, argv: Sequence[str | os.PathLike], **keywords: Any) -> subprocess.Popen:
        """Starts a program on a node, as somebody who has logged in there; as `EmulatedCluster.popen`."""
        environment = dict(os.environ if keywords.get("env") is None else keywords["env"])
        environment["PATH"] = f"{self._folder / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
        # Another mount namespace begins in its root folder.
        folder = os.fspath(keywords.pop("cwd", None) or os.getcwd())
        enter = ["nsenter", f"--target={self._servers[node].pid}", "--mount", "--uts", f"--wd={folder}", "--"]
        return self._cluster.popen(node, [*enter, *argv], **{**keywords, "env": environment})

    def run(self, node: int, argv: Sequence[str | os.PathLike], **keywords: Any) -> str:
        """What a program on a node has printed. Raises ClusterError if it fails."""
        process = self.popen(
            node, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **keywords
        )
        output, _ = process.communicate(timeout=60)
        if process.returncode:
            raise ClusterError(f"{' '.join(map(str, argv))} ended with {process.returncode}: {output}")
        return output

    def close_port(self, node: int, *conditions: str) -> None:
        """Lets a node's firewall drop connections to it that meet conditions, in the words of iptables."""
        program = self._tools.find("iptables-legacy")
        rule = ["-A", "INPUT", "-p", "tcp", "--syn", *conditions, "-j", "DROP"]
        self.run(node, [program, *rule], env={**os.environ, **self._tools.environment})

    def drop_datagrams(self, node: int) -> None:
        """Lets a node's firewall drop all datagrams to it."""
        program = self._tools.find("iptables-legacy")
        rule = ["-A", "INPUT", "-p", "udp", "-j", "DROP"]
        self.run(node, [program, *rule], env={**os.environ, **self._tools.environment})

    def stop_server(self, node: int) -> None:
        """Ends a node's ssh server."""
        self._servers[node].kill()
        self._servers[node].wait()

    def _start(self, node: int) -> subprocess.Popen:
        server = [self._server_program, "-D", "-e", "-f", str(self.folder(node) / "sshd_config")]
        become = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", _BECOME, "sh"]
        log = (self.folder(node) / "sshd.log").open("w")
        with log:
            return self._cluster.popen(
                node,
                [*become, name_of(node), str(self.folder(node)), *server],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._tools.environment},
            )

    def _wait_for(self, node: int, server: subprocess.Popen) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        log = self.folder(node) / "sshd.log"
        while "Server listening" not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"the ssh server of node {node} did not start: {log.read_text()}")
            time.sleep(0.02)


def name_of(node: int) -> str:
    """The host name of a node."""
    return f"machine{node}"


def _make_key(path: Path) -> None:
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "emulated", "-f", str(path))
