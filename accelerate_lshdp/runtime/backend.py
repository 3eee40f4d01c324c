# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Chooses the device that this process trains on, and sets it for accelerate before any of its state exists."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from accelerate_lshdp.runtime.cpu_binding import apply_cpu_share
from accelerate_lshdp.runtime.cpu_memory import keep_freed_memory
from accelerate_lshdp.runtime.groups import is_gloo
from accelerate_lshdp.runtime.launched_devices import choose_backend, group_exists
from accelerate_lshdp.runtime.shutdown import install_clean_exit


def has_accelerator(*, several_ranks: bool) -> bool:
    """Whether torch has a device other than the CPU on which one rank, or several together, can train."""
    if torch.backends.cuda.is_built():
        # Counted without initialising CUDA, so that a script may still set CUDA_VISIBLE_DEVICES.
        return torch.cuda.device_count() > 0
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # MPS has no collectives: several ranks on a Mac train on its CPU.
    return accelerator is not None and not (several_ranks and accelerator.type == "mps")


def prepare_environment() -> bool:
    """Sets what a run needs before the first accelerate state exists.

    accelerate has no launcher for several CPU processes on a node but FSDP's (see ``commands/config.py``), which does
    not tell the processes that they are on CPUs: without this they would not form a group at all. The variable
    ``ACCELERATE_USE_FSDP`` that comes with it is dropped: accelerate would build a plugin that is not used, and
    transformers would leave the weights of all ranks but the first empty in ``from_pretrained``.

    CPU ranks get their share of the node's cores (``apply_cpu_share``) and keep freed memory.

    Returns:
        Whether training runs on the CPU.
    """
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes", "on", "t", "y")
    on_cpu = on_cpu or not has_accelerator(several_ranks="LOCAL_RANK" in os.environ)
    if on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        # Before the process group: threads of gloo that are started later inherit where this process may run.
        apply_cpu_share()
        keep_freed_memory()
    return on_cpu


def prepare_at_first_state() -> None:
    """Lets a launched rank prepare its environment, and join the others, when its first accelerate state is made.

    CPU ranks join at all, and those on nodes with different devices find a backend in which they can meet. Where that
    is gloo, the process ends its groups before the interpreter shuts down, whether or not it makes an accelerator.

    For modules whose import says that the script trains with them: importing changes nothing yet, but the
    ``TrainingArguments`` that a script makes before its Trainer already tell it which rank it is.
    """
    from accelerate.state import PartialState

    # accelerate has no hook there. Marked, as several modules may ask for it, and each would wrap the one before.
    initialise = PartialState.__init__
    if getattr(initialise, "_prepares_environment", False):
        return

    @functools.wraps(initialise)
    def settled(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        # Only the first: later states share its values, and the environment must not change under a script that
        # trains.
        if not PartialState._shared_state and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            cpu = prepare_environment() or cpu
            kwargs["backend"] = choose_backend(cpu, kwargs.get("backend"), kwargs.get("timeout"))
            # Not for NCCL, whose groups wait for their peers when they are destroyed: a rank that fails would not end.
            if cpu or is_gloo(kwargs["backend"] or ""):
                install_clean_exit()
        initialise(self, cpu, **kwargs)
        group_exists()

    settled._prepares_environment = True
    PartialState.__init__ = settled


def _is_single_process_state() -> bool:
    """Whether accelerate's state was made before, as one process, although several were launched.

    On CPUs ``PartialState()`` alone forms no group. Every rank would train for itself, without a word.
    """
    from accelerate.state import PartialState  # here, because the shim needs this module while accelerate is imported

    # Private, but it is read without making a state, which would be the one process that this asks about.
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    return launched > 1 and PartialState._shared_state.get("num_processes", launched) == 1


def refuse_single_process_state() -> None:
    """Raises RuntimeError if accelerate's state was made before, as one process, although several were launched."""
    if _is_single_process_state():
        raise RuntimeError(
            f"accelerate's state was made before the accelerator and knows of 1 process, but the launcher started "
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}. Create the LSHDPAccelerator first, or PartialState(cpu=True), "
            "before anything else of accelerate"
        )


def join_launched_ranks() -> None:
    """Makes the state of a CPU rank that knows one process anew, in place: objects that hold it see all ranks then.

    Leaves it alone once an accelerator was made with it.
    """
    from accelerate.state import AcceleratorState, PartialState

    # The state is one dictionary that all its instances share, so what is made here is seen by those made before. An
    # accelerator has taken its values from it already, and would keep the old ones.
    if _is_single_process_state() and not AcceleratorState._shared_state:
        PartialState._reset_state()
        install_clean_exit()
        PartialState(cpu=True)
