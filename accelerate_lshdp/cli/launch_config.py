# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Strict reading of a node's accelerate YAML (or JSON) for ``launch``, with conversion of misread values.

YAML reads an unquoted ``no`` as false, and users quote numbers. accelerate takes both as they are and fails in the
middle of a launch. So such values are converted here, and accelerate gets a corrected file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_lshdp.documents.strict_reading import parse_json, parse_yaml, read_text, require_json
from accelerate_lshdp.documents.value_checks import LARGEST_BATCH, PlanError, at_key, describe, located, require_choice


if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

_ADVICE = "write one with accelerate-lshdp config"
_NOT_SAID = -1  # accelerate's default of num_processes
#: Keys with integers: (least, most).
_WHOLE_NUMBERS = {
    "num_processes": (_NOT_SAID, LARGEST_BATCH),
    "num_machines": (1, LARGEST_BATCH),
    "machine_rank": (0, LARGEST_BATCH),
    "main_process_port": (0, 65535),
}
_SWITCHES = ("use_cpu", "debug", "same_network", "enable_cpu_affinity", "tpu_use_cluster", "tpu_use_sudo")
_WORDS = ("main_process_ip", "rdzv_backend", "main_training_function", "tpu_name", "tpu_zone", "command_file")
_TABLES = (
    *("fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config"),
    "dynamo_config",
)
_LISTS = ("commands", "tpu_vm", "tpu_env")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
#: Keys whose type depends on the version of accelerate.
_UNCHECKED = ("fp16", "dynamo_backend", "downcast_bf16", "compute_environment")


def read_launch_config(file: Path, write: Callable[[str], Path]) -> tuple[ClusterConfig, Path]:
    """A node's configuration, and the file to give to accelerate.

    Args:
        file: the file that the user gave.
        write: writes a YAML text to a file, for accelerate, if it would read `file` differently; returns its path.

    Raises:
        ValueError: the file cannot be read, or is no configuration of one machine; it says where and why.
    """
    if not file.is_file():
        raise ValueError(f"there is no configuration file {str(file)!r}; {_ADVICE}")
    # Every error below names the file, by this one block.
    with located(source=str(file)):
        text = read_text(file, "configuration of accelerate")
        parse = parse_json if file.suffix == ".json" else parse_yaml  # as accelerate chooses
        document = parse(text, "configuration of accelerate")
        require_json(document)
        if not isinstance(document, dict):
            raise PlanError(
                f"found {describe(document)}, which is not a configuration of accelerate, expected keys and values;"
                f" {_ADVICE}"
            )
        normalised = {key: _normalised(key, value) for key, value in document.items()}
        if normalised.get("distributed_type") == "NO" and normalised.get("num_processes", _NOT_SAID) == _NOT_SAID:
            normalised["num_processes"] = 1  # which is what that type says
        _check_whole(normalised)
    if not _is_read_as(normalised, text, file):
        file = write(json.dumps(normalised, indent=1))  # JSON is YAML, too, and quotes all strings
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(file)), file


def _is_read_as(normalised: dict[str, Any], text: str, file: Path) -> bool:
    """Whether accelerate reads the same values from the text as `read_launch_config`, types included."""
    import yaml

    try:
        read = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except ValueError:  # such as of dates, which are strings here
        return False
    # repr, as `==` would take 1, 1.0 and True for the same.
    return repr(read) == repr(normalised)


def _normalised(key: str, value: Any) -> Any:
    """The value of a top-level key, converted to the type that accelerate expects.

    Raises:
        PlanError: the value cannot be converted.
    """
    if value is None or key in _UNCHECKED:
        return value
    if key in _WHOLE_NUMBERS:
        return _whole_number(key, value)
    if key in _SWITCHES:
        spoken = {"true": True, "false": False, "yes": True, "no": False}
        value = spoken.get(value.strip().lower(), value) if isinstance(value, str) else value
        _require(isinstance(value, bool), key, value, "true or false")
    elif key == "gpu_ids":
        # `gpu_ids: 0` is an integer in YAML; accelerate splits a string.
        value = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        _require(isinstance(value, str), key, value, 'the numbers of GPUs, such as "0,2", or all')
    elif key in _TABLES:
        _require(isinstance(value, dict), key, value, "a table of keys and values")
    elif key in _LISTS:
        _require(isinstance(value, list), key, value, "a list")
    elif key in _WORDS:
        _require(isinstance(value, str), key, value, "a string (in quotes, if it looks like a number)")
    elif key == "mixed_precision":
        # YAML 1.1 reads an unquoted no as false.
        value = "no" if value is False else value.lower() if isinstance(value, str) else value
        require_choice(value, key, _PRECISIONS)
    elif key == "distributed_type":
        from accelerate.utils import DistributedType

        value = "NO" if value is False else value  # as above
        require_choice(value, key, [kind.value for kind in DistributedType])
    return value


def _whole_number(key: str, value: Any) -> int:
    least, most = _WHOLE_NUMBERS[key]
    number = value
    # A bound on the length, as int() of thousands of digits is slow and then refused by CPython.
    if isinstance(value, str) and len(value) <= 20:
        try:
            number = int(value)
        except ValueError:
            number = None
    fits = isinstance(number, int) and not isinstance(number, bool) and least <= number <= most
    _require(fits, key, value, f"a whole number from {max(least, 0)} to {most}")
    return number


def _require(holds: bool, key: str, value: Any, expected: str) -> None:
    if not holds:
        raise PlanError(f"found {describe(value)}, expected {expected}; {_ADVICE}.", path=at_key("", key))


def _check_whole(document: dict[str, Any]) -> None:
    """Raises PlanError where the keys together are no configuration that can be launched on this machine."""
    from dataclasses import fields

    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import ComputeEnvironment

    here = ComputeEnvironment.LOCAL_MACHINE.value
    # Checked before unknown keys: a SageMaker file has many of them, and this is the reason.
    environment = document.get("compute_environment", here)
    if environment != here:
        raise PlanError(
            f"found {describe(environment)}, expected LOCAL_MACHINE; {_ADVICE}.", path="compute_environment"
        )
    known = {field.name for field in fields(ClusterConfig)} | set(_UNCHECKED)
    unknown = sorted(key for key in document if key not in known)
    if unknown:
        shown = ", ".join(json.dumps(key[:60]) for key in unknown[:5])
        raise PlanError(f"found the unknown keys {shown}, expected those that accelerate knows; remove them.")
    if document.get("distributed_type") is None:
        raise PlanError(f"found none, expected one such as FSDP or MULTI_GPU; {_ADVICE}.", path="distributed_type")
    engines = [
        f"distributed_type {name}" for name in ("DEEPSPEED", "MEGATRON_LM") if document["distributed_type"] == name
    ]
    engines += ["a parallelism_config"] if document.get("parallelism_config") else []
    if engines:
        raise PlanError(f"found {engines[0]}, which cannot share a model with LSHDP; {_ADVICE}.")
    processes, machines, rank = (
        document.get(key, default)
        for key, default in (("num_processes", _NOT_SAID), ("num_machines", 1), ("machine_rank", 0))
    )
    if processes == _NOT_SAID:
        raise PlanError(
            f"found no number, expected that of the ranks of this node, times num_machines; {_ADVICE}.",
            path="num_processes",
        )
    # accelerate divides the processes by the machines: a quotient of 0 would start nothing, without an error.
    if None in (processes, machines, rank) or not 0 <= rank < machines or processes // machines < 1:
        raise PlanError(
            f"found num_processes {processes}, num_machines {machines} and machine_rank {rank}, which starts no"
            f" process on this node; {_ADVICE}."
        )
