# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs an unmodified training script with LSHDP: every ``Accelerator`` that it or the Trainer creates is ours.

    accelerate launch --config_file cfg.yaml -m accelerate_lshdp.run [--plan PLAN] script.py ARGS
    accelerate launch --config_file cfg.yaml -m accelerate_lshdp.run [--plan PLAN] -m package.module ARGS

The script sees the arguments, ``__file__``, ``__main__``, ``sys.path[0]``, working directory and exit code that it
would see without the shim, and a traceback begins in the script. Nothing large is imported before the script does it.
"""

from __future__ import annotations

import argparse
import io
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import TracebackType

from accelerate_lshdp.accelerator.other_engines import refuse_configured_engines
from accelerate_lshdp.documents.plan import PLAN_VARIABLE
from accelerate_lshdp.runtime.parent_death import end_with_launcher
from accelerate_lshdp.shim.after_import import after_import
from accelerate_lshdp.shim.changes import change_accelerate, use_plan


_USAGE_ERROR = 2
#: What torch says of an operation with a sharded and a whole tensor, and what a script that has it can do.
_MIXED_TENSORS = "got mixed torch.Tensor and DTensor"
_OF_MIXED_TENSORS = (
    "accelerate_lshdp: under the plan's strategy a rank has a part of each parameter, and the script computes with one"
    " beside a whole tensor: in an average of weights (EMA), or in a method of the model other than its forward."
    " Train under lsdp or ddp, which keep parameters whole; docs/troubleshooting.md says more."
)
_ENTRY_POINT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "run.py")
_WARM_ENTRY_POINT = os.path.join(os.path.dirname(__file__), "warm_ranks.py")


def main(argv: Sequence[str] | None = None) -> None:
    """Prepares the process and runs the script in it.

    Args:
        argv: what follows ``-m accelerate_lshdp.run``; default: ``sys.argv[1:]``.

    Raises:
        SystemExit: 2 for a plan or a script that cannot be read and for another engine that is switched on; 76 where
            another rank was lost, and the script's error comes from it.
        BaseException: what the script raises.
    """
    end_with_launcher()
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        if arguments.plan is not None:
            use_plan(arguments.plan)
        if not arguments.module and not os.path.isfile(arguments.script):
            raise FileNotFoundError(
                f"there is no script {arguments.script!r} in {os.getcwd()!r}; name a Python file, or a module after -m"
            )
        refuse_configured_engines()
    except (OSError, ValueError) as error:
        print(f"accelerate_lshdp.run: {error}", file=sys.stderr)
        sys.exit(_USAGE_ERROR)
    after_import("accelerate", change_accelerate)
    try:
        if arguments.module:
            _run_module(arguments.script, arguments.script_args)
        else:
            _run_file(arguments.script, arguments.script_args)
    except SystemExit as end:
        _leave_elastic_run(end)
        _end_with_elastic_run()
        raise
    except BaseException as error:
        _hide_own_frames()
        from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER, follows_another

        code = FOLLOWS_ANOTHER if follows_another(error) else _code(error)
        if code != FOLLOWS_ANOTHER and not _is_elastic():
            raise
        _leave_elastic_run(error)
        # As the interpreter would show it; the code tells launchers that another rank's failure is the cause.
        sys.excepthook(type(error), error, error.__traceback__)
        _end_with_elastic_run()
        sys.exit(code)
    _end_with_elastic_run()


def _is_elastic() -> bool:
    return os.environ.get("LSDP_ELASTIC") is not None


def _code(error: BaseException) -> int:
    """The exit code of a script that has ended with an error: for Ctrl-C that of a shell."""
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _leave_elastic_run(error: BaseException) -> None:
    """Ends a rank of an elastic run that has lost others: its launcher starts it again with those that are there.

    Args:
        error: with which the script has ended. If it is the script's own, or none, this returns.
    """
    if not _is_elastic():
        return
    from accelerate_lshdp.accelerator.state_keeper import keeper_in_use
    from accelerate_lshdp.runtime.failures import follows_another

    keeper = keeper_in_use()
    code = error.code if isinstance(error, SystemExit) else _code(error)
    if keeper is None or not code:
        return
    if not follows_another(error):  # a script may make a SystemExit of any error
        # The code of this process also if its state is being kept, which else looks like the loss of a node.
        keeper.own_failure = code if isinstance(code, int) else 1
        return
    keeper.wait_if_leaving()
    found = error.__cause__ or error.__context__ or error
    print(f"accelerate_lshdp.run: other ranks were lost: {found}"[:500], file=sys.stderr, flush=True)
    keeper.leave_after_failure()


def _end_with_elastic_run() -> None:
    """Before a script ends: in an elastic run another thread may be keeping what other ranks need."""
    if not _is_elastic():
        return
    from accelerate_lshdp.accelerator.state_keeper import keeper_in_use

    keeper = keeper_in_use()
    if keeper is not None:
        keeper.script_ends()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="accelerate launch ... -m accelerate_lshdp.run",
        description="Run an unmodified script with LSHDP.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--plan", metavar="PLAN", help=f"the plan file (default: the environment variable {PLAN_VARIABLE})"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("script", help="the Python file (or module) to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser.parse_args(argv)


def _run_file(script: str, script_args: Sequence[str]) -> None:
    """``python script ARGS`` in this process.

    Not by ``runpy.run_path``, which takes the script's module away again when its last line has run, whereas exit
    handlers and threads of the script may still pickle what it defines.
    """
    path = os.path.join(os.getcwd(), script)
    sys.argv = [script, *script_args]
    if not _has_safe_path():
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__.update(__builtins__=__builtins__, __package__=None, __cached__=None)
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str, script_args: Sequence[str]) -> None:
    """``python -m NAME ARGS`` in this process: by the function that the interpreter itself calls for it.

    ``runpy.run_module`` would, like ``run_path``, take the module away again.
    """
    sys.argv = [name, *script_args]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__dict__.update(__builtins__=__builtins__)
    runpy._run_module_as_main(name)


def _has_safe_path() -> bool:
    """Whether Python was told not to put the script's folder first on the path (``-P``, from 3.11 on; ``-I``)."""
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def _hide_own_frames() -> None:
    """Lets the interpreter show the exception that is on its way out without the frames of this package.

    Behind it stands what to do, if torch's own words do not say so.
    """
    show = sys.excepthook  # scripts and torch set their own

    def show_the_scripts(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        error.__traceback__ = _without_own_frames(traceback)
        show(kind, error, error.__traceback__)
        if _MIXED_TENSORS in str(error):
            print(_OF_MIXED_TENSORS, file=sys.stderr)

    sys.excepthook = show_the_scripts


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    own = (__file__, _ENTRY_POINT, _WARM_ENTRY_POINT, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback
