# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Programs of Debian's packages that an emulated cluster needs now and then, unpacked into a folder of their own.

Nothing is installed: an ssh server that a package installs would be started, and would stay.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which

from laboratory.emulated_cluster.system import ClusterError


#: By program: the packages that it comes with, libraries that a small system lacks included.
_PACKAGES = {
    "sshd": ("openssh-server", "libwrap0"),
    "iptables-legacy": ("iptables", "libxtables12", "libip4tc2", "libip6tc2"),
}
_SECONDS = 120


class DebianTools:
    """Finds programs on this system, or takes them from Debian's packages.

    Args:
        folder: where packages are unpacked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment: dict[str, str] = {}

    def find(self, program: str) -> str:
        """The path of a program; what it needs in the environment is in `environment` from then on.

        Raises:
            ClusterError: it is not there, and cannot be had.
        """
        found = which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
        if found is not None:
            return found
        unpacked = self._folder / program
        if not unpacked.exists():
            self._unpack(_PACKAGES[program], unpacked)
        paths = [path for path in unpacked.rglob(program) if os.access(path, os.X_OK)]
        if not paths:
            raise ClusterError(f"found no {program} in the packages {', '.join(_PACKAGES[program])}")
        libraries = {str(path.parent) for path in unpacked.rglob("*.so*")}
        before = self.environment.get("LD_LIBRARY_PATH")
        self.environment["LD_LIBRARY_PATH"] = os.pathsep.join([*sorted(libraries), *([before] if before else [])])
        for extensions in unpacked.rglob("xtables"):
            self.environment["XTABLES_LIBDIR"] = str(extensions)
        return str(paths[0])

    def _unpack(self, packages: tuple[str, ...], into: Path) -> None:
        if which("apt-get") is None:
            raise ClusterError(f"not installed: {', '.join(packages)}")
        archives = into.with_name(f"{into.name}-archives")
        archives.mkdir(parents=True, exist_ok=True)
        try:
            if _run(["apt-get", "download", *packages], archives).returncode:
                # A small system comes without the lists of packages.
                _run(["apt-get", "update"], archives)
                downloaded = _run(["apt-get", "download", *packages], archives)
                if downloaded.returncode:
                    raise ClusterError(f"{', '.join(packages)} cannot be had: {downloaded.stderr.strip()[-500:]}")
            for archive in sorted(archives.glob("*.deb")):
                unpacked = _run(["dpkg-deb", "--extract", str(archive), str(into)], archives)
                if unpacked.returncode:
                    raise ClusterError(f"{archive.name} cannot be unpacked: {unpacked.stderr.strip()[-500:]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"{', '.join(packages)} cannot be had: {error}") from None


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
