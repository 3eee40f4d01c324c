# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp estimate``: predicts memory, bytes and step times of all strategies on a described cluster.

Needs neither weights nor devices nor the cluster.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from accelerate_lshdp.estimation.advice import Advice
    from accelerate_lshdp.estimation.estimates import Estimate
    from accelerate_lshdp.estimation.model_measurement import MeasuredModel
    from accelerate_lshdp.planning import RankProfile

from accelerate_lshdp.documents.value_checks import located
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


_PRECISIONS = ("no", "bf16", "fp16")
_FORMATS = tuple(WIRE_FORMATS)
_EPILOG = """\
a cluster file:
  nodes:
    - {device: RTX 3090, ranks: 2, memory: 64 GiB}          # one rank a device; memory: of the host
    - {device: another, tflops: 12, device_memory: 16 GiB}  # tflops: what it reaches in training
    - {cpu: 8, memory: 32 GiB}                              # computes on its cores
  network: {rate: 1 Gb/s, delay: 0.2 ms}

examples:
  accelerate-lshdp estimate --model gpt2-xl --cluster cluster.yaml --precision bf16 --sequence-length 512
  accelerate-lshdp estimate --model my_model/config.json --cluster cluster.yaml --total-batch-size 256
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand's parser."""
    parser = subparsers.add_parser(
        "estimate",
        help="predict memory, bytes and step time of every strategy for a model on a described cluster",
        description="Predict memory, bytes between nodes and step time of every strategy, and say which to choose."
        " The model is built without weights; nothing is trained, and no device is needed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME_OR_CONFIG",
        help="a JSON configuration of transformers, a folder with a config.json, a name on the Hugging Face Hub, or a"
        " well-known one that needs no download, such as gpt2 or vit-large-patch16",
    )
    parser.add_argument("--cluster", required=True, metavar="YAML", help="the nodes and the network between them")
    parser.add_argument(
        "--total-batch-size", type=int, default=32, metavar="B", help="samples in a global batch (default: 32)"
    )
    parser.add_argument(
        "--precision", choices=_PRECISIONS, default="no", help="mixed precision of the computation (default: no)"
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="T",
        help="tokens in a sample of text (default: the model's, up to 1024)",
    )
    parser.add_argument(
        "--formats",
        default=",".join(_FORMATS),
        metavar="LIST",
        help=f"how gradients travel, of {','.join(_FORMATS)} (default: all)",
    )
    parser.add_argument(
        "--profile",
        metavar="PROFILE",
        help="speeds of this model on these ranks, as accelerate-lshdp profile measured them",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Estimates all strategies; prints a table and the strategy to choose.

    Returns:
        0.

    Raises:
        ValueError: impossible arguments or files; it says what to change.
    """
    formats = [name.strip() for name in arguments.formats.split(",")]
    if not formats or set(formats) - set(_FORMATS):
        raise ValueError(f"found --formats {arguments.formats}, expected some of {','.join(_FORMATS)}")
    if arguments.sequence_length is not None and arguments.sequence_length < 1:
        raise ValueError(f"found --sequence-length {arguments.sequence_length}, expected at least 1")
    from accelerate_lshdp.documents.cluster_file import load_cluster
    from accelerate_lshdp.estimation.hardware import Hardware

    # Files before the imports below, which take seconds: a wrong path is answered at once.
    with located(source=str(arguments.cluster)):
        hardware = Hardware.of(load_cluster(arguments.cluster))
    profiles = None if arguments.profile is None else _profiles(arguments.profile)
    from transformers.utils import logging

    from accelerate_lshdp.cli.estimate_table import print_estimates
    from accelerate_lshdp.estimation.advice import advise
    from accelerate_lshdp.estimation.estimates import estimate_all
    from accelerate_lshdp.estimation.model_measurement import measure_config
    from accelerate_lshdp.estimation.model_sources import load_config

    logging.set_verbosity_error()  # its warnings are about models that will be used
    model = measure_config(
        load_config(arguments.model),
        mixed_precision=arguments.precision,
        sequence_length=arguments.sequence_length,
    )
    estimates = estimate_all(
        model,
        hardware,
        arguments.total_batch_size,
        mixed_precision=arguments.precision,
        formats=formats,
        profiles=profiles,
    )
    advice = advise(model, hardware, estimates)
    print_estimates(model, hardware, estimates, advice, is_measured=profiles is not None)
    if arguments.json is not None:
        document = _document(arguments, model, estimates, advice)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {arguments.json}", file=sys.stderr)
    return 0


def _profiles(path: str) -> list[RankProfile]:
    """The measured ranks, without the load of communication, which the estimate adds for each strategy itself."""
    from accelerate_lshdp.documents.profile import Profile

    return [
        replace(rank, communication_load_seconds=0.0, memory=None, memory_limit_bytes=None).profile()
        for rank in Profile.load(path).ranks
    ]


def _document(
    arguments: argparse.Namespace, model: MeasuredModel, estimates: list[Estimate], advice: Advice
) -> dict[str, Any]:
    """The JSON document of ``--json``: seconds, bytes and samples."""
    return {
        "version": 1,
        "kind": "estimate",
        "model": {
            "source": arguments.model,
            "name": model.name,
            "parameters": model.counts.parameters,
            "trainable_parameters": model.counts.trainable,
            "activation_bytes_per_sample": model.activations(1),
            "flops_per_sample": model.flops,
        },
        "total_batch_size": arguments.total_batch_size,
        "precision": arguments.precision,
        "estimates": [
            {
                "strategy": estimate.strategy,
                "communication_dtype": estimate.communication_dtype,
                "fits": estimate.fits,
                "problem": estimate.problem,
                "micro_batches": [list(entry) for entry in estimate.micro_batches],
                "device_bytes": list(estimate.device_bytes),
                "host_bytes": list(estimate.host_bytes),
                "prediction": estimate.prediction and asdict(estimate.prediction),
                "placement": estimate.placement and estimate.placement.placement.to_dict(),
            }
            for estimate in estimates
        ],
        "choose": advice.exact and advice.exact.label,
        "choose_lossy": advice.lossy and advice.lossy.label,
        "reasons": list(advice.reasons),
    }
