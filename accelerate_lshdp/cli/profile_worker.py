# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The process of each rank of ``accelerate-lshdp profile``: imports the script, measures, writes the profile.

    accelerate launch --config_file cfg.yaml -m accelerate_lshdp.cli.profile_worker SCRIPT ARGS

An error on one rank is raised on all of them, before any file is written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.cli.profile import SUBJECT_ADVICE, add_measuring_arguments, add_script_arguments
from accelerate_lshdp.cli.progress import progress
from accelerate_lshdp.documents.plan import Cluster
from accelerate_lshdp.profiling import Profile, ProfilingOptions, Subject, profile_ranks
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks


_NAME = "accelerate_lshdp.cli.profile_worker"
_FAILURE = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank of a profiling run.

    Returns:
        The exit code: 1 if a rank failed, which the first rank of each node explains.
    """
    arguments = _parse(argv)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        _measure(arguments, is_first)
    except (RuntimeError, ValueError) as error:
        if arguments.error_file is None:
            if is_first:
                print(f"{_NAME}: {error}\nNo profile was written.", file=sys.stderr)
            return _FAILURE
        if is_first:
            arguments.error_file.write_text(str(error) or type(error).__name__, encoding="utf-8")
        # Exit code 0: for another one the launcher would print a page about the failure. The command prints the error
        # from the file.
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"accelerate launch ... -m {_NAME}",
        description="Measure this node's ranks, together with those of the other nodes.",
        allow_abbrev=False,
    )
    add_measuring_arguments(parser)
    parser.add_argument("--error-file", type=Path, help=argparse.SUPPRESS)
    add_script_arguments(parser)
    return parser.parse_args(argv)


def _measure(arguments: argparse.Namespace, is_first: bool) -> None:
    """Measures this rank together with all others (collective); the first rank of each node writes the profile.

    Raises:
        RuntimeError: on all ranks, if any of them failed.
        ValueError: the file cannot be written.
    """
    # Equal batches: the accelerator gives ranks, devices and agreement only; profiling makes its own micro-batches.
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy=arguments.strategy))
    options = subject = None
    with _errors_on_all_ranks():
        options = _options(arguments, accelerator)
        if not os.access(arguments.output.absolute().parent, os.W_OK):
            raise ValueError(f"found --output {arguments.output}, expected a file in a folder that can be written to")
    # The first rank of each node loads first: what it downloads or prepares is then there for the node's other ranks.
    for now in (True, False):
        with _errors_on_all_ranks():
            if is_first is now:
                subject = load_subject(arguments.script, arguments.script_args, is_module=arguments.module)
    with progress(is_first) as show:
        profile = profile_ranks(subject, options, accelerator, on_progress=show)
    if is_first:
        _complete(profile, arguments, accelerator).save(arguments.output)


@contextmanager
def _errors_on_all_ranks() -> Iterator[None]:
    """Raises a RuntimeError on all ranks if any rank raises an error inside the block (collective)."""
    error: str | None = None
    try:
        yield
    except (RuntimeError, ValueError) as found:
        error = str(found)
    raise_on_all_ranks(error)


def _options(arguments: argparse.Namespace, accelerator: LSHDPAccelerator) -> ProfilingOptions:
    """The options of this rank from the arguments.

    Raises:
        ValueError: a limit names a rank that does not exist, or there are fewer samples than ranks.
    """
    world, here = accelerator.num_processes, accelerator.process_index
    max_batch = arguments.max_batch
    total = arguments.total_batch_size
    if total is not None:
        if total < world:
            raise ValueError(
                f"found --total-batch-size {total}, expected at least one sample for each of {world} ranks"
            )
        # Every other rank has at least one sample of the total.
        max_batch = min(total - world + 1, max_batch or total)
    limits = dict(arguments.memory_limit)
    unknown = [rank for rank in limits if rank is not None and rank >= world]
    if unknown:
        raise ValueError(f"found --memory-limit for rank {unknown[0]}, expected one of the ranks 0 to {world - 1}")
    # A limit of this rank takes precedence over that of all ranks (None).
    limit = limits.get(here, limits.get(None))
    if arguments.node_memory_limit is not None:
        share = arguments.node_memory_limit // accelerator.topology.node_sizes[accelerator.topology.node]
        limit = share if limit is None else min(limit, share)
    return ProfilingOptions(
        seconds=arguments.seconds,
        strategy=arguments.strategy,
        max_batch=max_batch,
        total_batch_size=total,
        memory_limit_bytes=limit,
        bucket_megabytes=accelerator.lsdp_plugin.bucket_megabytes,
    )


def load_subject(script: str, script_args: Sequence[str], *, is_module: bool = False) -> Subject:
    """The `Subject` that the function ``profiling_subject`` of a script returns.

    Args:
        script: the path of a Python file, or the name of a module.
        script_args: the script's arguments.
        is_module: whether ``script`` is a module's name.

    Raises:
        ValueError: the script has no such function, or it returns something else.
        RuntimeError: the script raised something; it says where.
    """
    # Scripts may parse sys.argv when they are imported.
    sys.argv = [script, *script_args]
    try:
        module = _import(script, is_module)
        function = getattr(module, "profiling_subject", None)
        subject = None if function is None else function(list(script_args))
    except (Exception, SystemExit) as error:
        raise RuntimeError(_explain(error, script)) from error
    if function is None:
        raise ValueError(f"{script} has no function profiling_subject(argv). Add one:\n\n{SUBJECT_ADVICE}")
    if not isinstance(subject, Subject):
        raise ValueError(
            f"profiling_subject of {script} returned {type(subject).__name__}, expected"
            f" accelerate_lshdp.profiling.Subject. It should be like this:\n\n{SUBJECT_ADVICE}"
        )
    return subject


def _import(script: str, is_module: bool) -> ModuleType:
    """The script, imported as a module with the search path that it would have as a script."""
    if is_module:
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(script)
    path = os.path.realpath(script)
    sys.path.insert(0, os.path.dirname(path))
    # By its own name, under which worker processes of its loaders can unpickle its classes, unless that would replace
    # another module.
    name = Path(path).stem
    name = f"profiled_{name}" if name in sys.modules else name
    loader = SourceFileLoader(name, path)
    module = module_from_spec(spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _explain(error: BaseException, script: str) -> str:
    """The text of an error, with the line of the script that led to it."""
    ended = isinstance(error, SystemExit)  # argparse, for example, has said on stderr why
    text = f"the script ended with exit code {error.code}" if ended else f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame inside the script, not in the libraries that it calls.
    own = [frame for frame in frames if frame.filename == os.path.realpath(script)]
    place = f" ({script}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return text + place


def _complete(profile: Profile, arguments: argparse.Namespace, accelerator: LSHDPAccelerator) -> Profile:
    """The profile, completed by what only the launch knows: the script, and the address of node 0."""
    nodes = list(profile.cluster.nodes)
    if len(nodes) > 1 and nodes[0].address is None:
        nodes[0] = replace(nodes[0], address=os.environ.get("MASTER_ADDR"))
    script = replace(profile.subject, script=arguments.script, arguments=tuple(arguments.script_args))
    return replace(profile, subject=script, cluster=Cluster(tuple(nodes), profile.cluster.link))


if __name__ == "__main__":
    sys.exit(main())
