# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exact planning from measured curves. Needs NumPy only: plans can be made where torch is not installed."""

from accelerate_lshdp.documents.curves import MemoryCurve, RankProfile, TimeCurve
from accelerate_lshdp.planning.cuts.batch_sizes import BatchSizes, plan_fixed_total
from accelerate_lshdp.planning.cuts.max_throughput import plan_max_throughput
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.planner import Choice, plan_placement
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.proofs.certificate import CertificateError, verify_certificate
from accelerate_lshdp.planning.proofs.placement import verify_placement


__all__ = [
    "BatchSizes",
    "CertificateError",
    "Choice",
    "MemoryCurve",
    "ModelSizes",
    "PlacementCluster",
    "PlacementResult",
    "PlanningError",
    "RankProfile",
    "TimeCurve",
    "UnitSize",
    "plan_fixed_total",
    "plan_max_throughput",
    "plan_placement",
    "verify_certificate",
    "verify_placement",
]
