# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`accelerate_launch`: runs ``accelerate launch`` in this process, and says with which code a script has ended."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from accelerate_lshdp.cli.exit_codes import SIGNAL_BASE, shell_code
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER
from accelerate_lshdp.runtime.parent_death import LAUNCHER_VARIABLE, end_with_launcher
from accelerate_lshdp.runtime.passed_signals import pass_signals_on


if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def accelerate_launch(argv: list[str]) -> int:
    """Runs ``accelerate launch`` in this process, where exceptions hold the script's exit code.

    Args:
        argv: its arguments.

    Returns:
        The exit code of the script on this node: of the process whose failure is the cause of the others', 128 + n if
        signal n ended it; `FOLLOWS_ANOTHER` if the cause is on another node.
    """
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    end_with_launcher()  # where another command has started this one
    # Ranks end with this process, also when it is killed and cannot end them.
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    pass_signals_on()
    try:
        # torch makes a folder for logs that we do not ask for, and leaves it behind.
        arguments = launch_command_parser().parse_args(["--log_dir", os.devnull, *argv])
        # Not SIGTERM, which is passed on: torch's launcher would end by itself, and those of other nodes wait for it.
        arguments.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # accelerate has no flag for it, but hands it on
        launch_command(arguments)
    except ChildFailedError as error:  # several ranks
        print(error, file=sys.stderr)
        return shell_code(_cause(error))
    except CalledProcessError as error:  # a single rank
        return shell_code(error.returncode)
    except SignalException as ended:
        return SIGNAL_BASE + int(ended.sigval)
    return 0


def _cause(error: ChildFailedError) -> int:
    """The return code of the rank whose failure is the cause: the others have lost it, or were ended because of it."""
    by_time = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
    codes = [failure.exitcode for failure in by_time]
    return next((code for code in codes if code not in (FOLLOWS_ANOTHER, -signal.SIGTERM)), codes[0])
