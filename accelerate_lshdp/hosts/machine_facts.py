# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`MachineFacts`: what a machine says about itself before a run is started on it.

`read_facts` runs on each machine; the facts travel as JSON, and `findings` judges those of all machines together.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from accelerate_lshdp.runtime.listening import listen_everywhere


#: Begins every line that is an answer: shells and sitecustomize may print lines of their own.
MARK = "accelerate-lshdp-agent "
#: Packages whose releases must be the same on all machines.
PACKAGES = ("torch", "accelerate", "transformers")
#: Variables by which a user names network interfaces, for gloo and for NCCL.
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Device:
    """A device of a machine.

    Args:
        name: of the product.
        memory_bytes: all of its memory.
        free_bytes: of it, what no process has now.
    """

    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class MachineFacts:
    """What a machine says about itself. What is None is not known, or not there.

    Args:
        host_name: the machine's own name.
        python: version of the interpreter.
        executable: path of the interpreter.
        packages: version of each of `PACKAGES`; None: not installed.
        torch_error: why torch cannot be imported; None: it can.
        devices: that torch finds.
        cores: that processes may use.
        memory_bytes: of the host.
        shared_bytes: free space in /dev/shm, through which the workers of a loader hand batches over.
        folder: where commands run, as an absolute path.
        folder_error: why it cannot be written to; None: it can.
        free_bytes: free space there.
        files: SHA-256 of each file that was asked for; None: it is not there.
        interfaces: network interfaces that are up, each with its addresses.
        named_interfaces: `GLOO_VARIABLE` and `NCCL_VARIABLE`, where the environment has them.
        own_name_address: the address that the machine's own name stands for and that is the machine's, where gloo
            listens unless a variable names an interface; None: there is none, and gloo takes the loopback.
        own_name_interface: the interface that has it.
        port_error: why the port that was asked for cannot be listened to; None: it can, or none was asked for.
    """

    host_name: str
    python: str
    executable: str
    packages: dict[str, str | None]
    torch_error: str | None
    devices: tuple[Device, ...]
    cores: int
    memory_bytes: int
    shared_bytes: int | None
    folder: str
    folder_error: str | None
    free_bytes: int | None
    interfaces: dict[str, list[str]]
    files: dict[str, str | None] = field(default_factory=dict)
    named_interfaces: dict[str, str] = field(default_factory=dict)
    own_name_address: str | None = None
    own_name_interface: str | None = None
    port_error: str | None = None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> MachineFacts:
        """The facts that `dataclasses.asdict` has written."""
        return cls(**{**document, "devices": tuple(Device(**device) for device in document["devices"])})

    def interface_of(self, address: str) -> str | None:
        """The interface that has an address; None: none of them."""
        return next((name for name, addresses in self.interfaces.items() if address in addresses), None)


def read_facts(files: Sequence[str] = (), port: int | None = None) -> MachineFacts:
    """The facts of this machine, seen from the current folder.

    Args:
        files: to compare between machines, such as the script; relative paths begin in the current folder.
        port: that this machine is to listen on.
    """
    import psutil

    torch_error, devices = _devices()
    folder = os.getcwd()
    folder_error, free_bytes = _room(folder)
    interfaces, own = _interfaces(), _own_name_address()
    named = {name: os.environ[name] for name in (GLOO_VARIABLE, NCCL_VARIABLE) if os.environ.get(name)}
    return MachineFacts(
        host_name=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        packages={name: _version(name) for name in PACKAGES},
        torch_error=torch_error,
        devices=devices,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        shared_bytes=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        folder=folder,
        folder_error=folder_error,
        free_bytes=free_bytes,
        files={name: read_digest(Path(name)) for name in files},
        interfaces={
            name: [each for each in addresses if not _is_of_link(each)] for name, addresses in interfaces.items()
        },
        named_interfaces=named,
        own_name_address=own,
        own_name_interface=next((name for name, addresses in interfaces.items() if own in addresses), None),
        port_error=None if port is None else _port_error(port),
    )


def same_release(version: str) -> str:
    """A version without the part that names its build: 2.13.0+cu126 and 2.13.0+cpu work together."""
    return version.partition("+")[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[str | None, tuple[Device, ...]]:
    """Why torch cannot be imported, and the devices that it finds."""
    try:
        import torch
    except Exception as error:  # a library that is missing raises OSError, a broken build whatever it likes
        return f"{type(error).__name__}: {error}", ()
    if not torch.cuda.is_available():
        return None, ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            free = torch.cuda.mem_get_info(index)[0]
        except RuntimeError:  # so little that not even this process gets what it needs to ask
            free = 0
        found.append(Device(properties.name, properties.total_memory, free))
    return None, tuple(found)


def _room(folder: str) -> tuple[str | None, int | None]:
    """Why a folder cannot be written to, and the space that is free there."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error), None
    return (None if os.access(folder, os.W_OK) else "it cannot be written to", free)


def read_digest(path: Path) -> str | None:
    """The SHA-256 of a file; None: it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _interfaces() -> dict[str, list[str]]:
    """The interfaces that are up, with their IPv4 and IPv6 addresses."""
    import psutil

    up = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        if name in up and up[name].isup:
            kinds = (socket.AF_INET, socket.AF_INET6)
            found[name] = [entry.address.partition("%")[0] for entry in entries if entry.family in kinds]
    return found


def _own_name_address() -> str | None:
    """The first address of the machine's own name that a socket can be bound to, as gloo looks for it."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
        except OSError:
            continue
        return str(place[0]).partition("%")[0]
    return None


def _is_of_link(address: str) -> bool:
    """Whether an address is of its link alone: other machines need to know the interface, too."""
    return ip_address(address).is_link_local


def number_of(name: str) -> str | None:
    """The address that a name stands for, as a number, IPv4 before IPv6; None: it stands for none here."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(min(found, key=lambda place: place[0] != socket.AF_INET)[4][0])


def _port_error(port: int) -> str | None:
    try:
        listen_everywhere(port).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def main(asked: str) -> None:
    """Prints the facts of this machine that are asked for, `read_facts`' arguments as JSON."""
    print(f"\n{MARK}{json.dumps(asdict(read_facts(**json.loads(asked))))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
