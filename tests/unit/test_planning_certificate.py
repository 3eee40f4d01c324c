# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A certificate proves to code that does not trust the planner that nothing is better; a changed one does not."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracle import all_choices, random_instance

import accelerate_lshdp.planning as planning
from accelerate_lshdp.planning import (
    CertificateError,
    MemoryCurve,
    PlanningError,
    RankProfile,
    TimeCurve,
    plan_fixed_total,
    plan_max_throughput,
    verify_certificate,
)
from accelerate_lshdp.planning.cuts.bounds import largest_micro_batches_below
from accelerate_lshdp.planning.cuts.problem import pose_problem
from accelerate_lshdp.planning.proofs.digest import profiles_sha256


def linear(seconds_per_sample: float, largest: int, **more: Any) -> RankProfile:
    return RankProfile(TimeCurve([1, largest], [seconds_per_sample, seconds_per_sample * largest]), largest, **more)


def overlapped(seconds_per_sample: float, largest: int) -> RankProfile:
    """With an optimizer step, an overhead, a memory limit that is not reached, and a bucket."""
    return linear(
        seconds_per_sample,
        largest,
        accumulation_overhead_seconds=0.25,
        communication_load_seconds=0.125,
        fixed_seconds=0.5,
        bucket_ready=[TimeCurve([1, largest], [seconds_per_sample / 2, seconds_per_sample * largest / 2])],
        memory=MemoryCurve([largest], [100]),
        memory_limit_bytes=100,
    )


PLAIN = [linear(1.0, 16), linear(2.0, 16)]
FULL = [overlapped(1.0, 4), overlapped(2.0, 4), overlapped(1.5, 3)]
FULL_OPTIONS = {"allow_accumulation": True, "bucket_seconds": [3.0], "shard_groups": [[0, 2], [1]]}


def fixed_total() -> dict[str, Any]:
    return plan_fixed_total(PLAIN, 12).certificate


def fixed_total_full() -> dict[str, Any]:
    return plan_fixed_total(FULL, 23, **FULL_OPTIONS).certificate


def throughput_full() -> dict[str, Any]:
    options = {**FULL_OPTIONS, "shard_groups": [[0, 1], [2]]}
    return plan_max_throughput(FULL, 1.0, max_accumulation_steps=4, **options).certificate


# Each makes one claim of a valid certificate false, and says which complaint must follow.
Change = Callable[[dict[str, Any]], Any]
TAMPERED: dict[str, tuple[Change, str]] = {
    "another cut of the same total": (lambda c: c.update(micro_batches=[[7, 1], [5, 1]]), "slowest rank takes 10.0 s"),
    "a cut of another total": (lambda c: c.update(micro_batches=[[8, 1], [3, 1]]), "sum to 11"),
    "beyond the memory limit": (
        lambda c: c.update(micro_batches=[[17, 1], [-5, 1]]),
        "rank 0 has micro-batches of 17 samples",
    ),
    "an empty rank": (lambda c: c.update(micro_batches=[[12, 1], [0, 1]]), "rank 1 has micro-batches of 0 samples"),
    "accumulation that is not allowed": (
        lambda c: c.update(micro_batches=[[4, 2], [4, 1]]),
        "rank 0 has 2 micro-batches, expected 1, as accumulation was not allowed",
    ),
    "no micro-batch": (lambda c: c.update(micro_batches=[[8, 0], [4, 1]]), "rank 0 has 0 micro-batches"),
    "a better time than is real": (lambda c: c.update(step_seconds=7.0), "claimed step_seconds 7.0"),
    "a worse time than is real": (lambda c: c.update(step_seconds=9.0), "claimed step_seconds 9.0"),
    "a slightly worse time": (lambda c: c.update(step_seconds=8.0 * (1 + 1e-11)), "claimed step_seconds 8.00000"),
    "a bound that is too low": (
        lambda c: c.update(largest_micro_batches_below=[[6], [3]]),
        "rank 0 finishes 1 x 7 samples",
    ),
    "a blocked rank that is not": (
        lambda c: c.update(largest_micro_batches_below=[[], [3]]),
        "ranks [0] finish 1 micro-batches of one sample",
    ),
    "a bound that proves nothing": (
        lambda c: c.update(largest_micro_batches_below=[[8], [4]]),
        "a faster cut is not excluded",
    ),
    "a bound beyond the limit": (
        lambda c: c.update(largest_micro_batches_below=[[17], [3]]),
        "expected micro-batches of 1 to its maximum 16",
    ),
    "a negative bound": (
        lambda c: c.update(largest_micro_batches_below=[[7], [-1]]),
        "expected micro-batches of 1 to its maximum 16",
    ),
    "a slower cut with its own time": (
        lambda c: c.update(micro_batches=[[7, 1], [5, 1]], step_seconds=10.0, largest_micro_batches_below=[[9], [4]]),
        "a faster cut is not excluded",
    ),
    "accumulation allowed afterwards": (
        lambda c: c.update(allow_accumulation=True),
        "ranks [0] finish 2 micro-batches of one sample",
    ),
    "another problem": (
        lambda c: c.update(kind="max_throughput"),
        "expected an object with the keys",
    ),
    "an unknown problem": (lambda c: c.update(kind="fastest"), "expected one of"),
    "no problem": (lambda c: c.pop("kind"), "expected one of"),
    "an unhashable problem": (lambda c: c.update(kind=[]), "expected one of"),
    "other profiles": (lambda c: c.update(profiles_sha256="0" * 64), "about other curves, limits or ranks"),
    "no fingerprint": (lambda c: c.update(profiles_sha256=None), "expected a text"),
    "buckets that nobody measured": (lambda c: c.update(bucket_seconds=[1.0]), "found 0 bucket_ready curves for 1"),
    "buckets of no time": (lambda c: c.update(bucket_seconds=[math.nan]), "expected null or a list of finite seconds"),
    "a missing rank in the groups": (lambda c: c.update(shard_groups=[[0]]), "each of the 2 ranks once"),
    "a rank in two groups": (lambda c: c.update(shard_groups=[[0], [0, 1]]), "each of the 2 ranks once"),
    "a missing key": (lambda c: c.pop("step_seconds"), "expected an object with the keys"),
    "an unknown key": (lambda c: c.update(note=1), "expected an object with the keys"),
    "too few ranks": (lambda c: c.update(micro_batches=[[12, 1]]), "expected a list of 2 pairs"),
    "a fraction of a sample": (lambda c: c.update(micro_batches=[[8.0, 1], [4, 1]]), "expected a list of 2 pairs"),
    "too few bounds": (lambda c: c.update(largest_micro_batches_below=[[7]]), "expected a list of 2 lists"),
    "not a list": (lambda c: c.update(largest_micro_batches_below="73"), "expected a list of 2 lists"),
    "a boolean total": (lambda c: c.update(total_batch_size=True), "expected an integer"),
    "another total": (lambda c: c.update(total_batch_size=13), "sum to 12, expected total_batch_size 13"),
    "an option that is no boolean": (lambda c: c.update(allow_accumulation=0), "expected true or false"),
    "an infinite time": (lambda c: c.update(step_seconds=math.inf), "expected a positive and finite number"),
    "an endless integer": (lambda c: c.update(step_seconds=10**400), "expected a positive and finite number"),
    "no time": (lambda c: c.update(step_seconds=math.nan), "expected a positive and finite number"),
    "a boolean time": (lambda c: c.update(step_seconds=True), "expected a positive and finite number"),
}


def assert_rejected(profiles: list[RankProfile], certificate: dict[str, Any], change: Change, message: str) -> None:
    verify_certificate(profiles, certificate)
    tampered = copy.deepcopy(certificate)
    change(tampered)
    assert repr(tampered) != repr(certificate)
    with pytest.raises(CertificateError) as caught:
        verify_certificate(profiles, tampered)
    assert message in str(caught.value)


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_certificate_is_rejected(case: str) -> None:
    assert_rejected(PLAIN, fixed_total(), *TAMPERED[case])


# One change of every field of certificates in which all options matter.
FIELDS: dict[str, tuple[Callable[[], dict[str, Any]], Change, str]] = {
    "total": (fixed_total_full, lambda c: c.update(total_batch_size=22), "sum to 23"),
    "profiles": (fixed_total_full, lambda c: c.update(profiles_sha256="a" * 64), "about other curves"),
    "accumulation": (fixed_total_full, lambda c: c.update(allow_accumulation=False), "accumulation was not allowed"),
    "buckets": (fixed_total_full, lambda c: c.update(bucket_seconds=[2.0]), "the slowest rank takes"),
    "no buckets": (fixed_total_full, lambda c: c.update(bucket_seconds=None), "the slowest rank takes"),
    "groups": (fixed_total_full, lambda c: c.update(shard_groups=[[0, 1], [2]]), "expected equal numbers"),
    "no groups": (fixed_total_full, lambda c: c.update(shard_groups=None), "ranks [0] finish"),
    "choice": (fixed_total_full, lambda c: c["micro_batches"].reverse(), ""),
    "step": (fixed_total_full, lambda c: c.update(step_seconds=c["step_seconds"] * 1.001), "the slowest rank takes"),
    "lists": (fixed_total_full, lambda c: c["largest_micro_batches_below"][1].pop(), "expected a bound for them"),
    "lists of a group": (fixed_total_full, lambda c: c["largest_micro_batches_below"][0].pop(), "expected one"),
    "throughput: total": (throughput_full, lambda c: c.update(total_batch_size=1), "expected total_batch_size 1"),
    "throughput: profiles": (throughput_full, lambda c: c.update(profiles_sha256="a" * 64), "about other curves"),
    "throughput: buckets": (throughput_full, lambda c: c.update(bucket_seconds=[9.0]), "claimed step_seconds"),
    "throughput: groups": (throughput_full, lambda c: c.update(shard_groups=None), "are not excluded"),
    "throughput: accumulation": (throughput_full, lambda c: c.update(allow_accumulation=False), "not allowed"),
    "throughput: more steps": (throughput_full, lambda c: c.update(max_accumulation_steps=5), "are not excluded"),
    "throughput: fewer steps": (throughput_full, lambda c: c.update(max_accumulation_steps=1), "expected at most 1"),
    "throughput: no steps": (throughput_full, lambda c: c.update(max_accumulation_steps=None), "at least 1"),
    "throughput: network": (throughput_full, lambda c: c.update(communication_seconds=2.0), "claimed step_seconds"),
    "throughput: no network": (throughput_full, lambda c: c.update(communication_seconds=-1), "at least 0"),
    "throughput: step": (throughput_full, lambda c: c.update(step_seconds=c["step_seconds"] * 0.999), "claimed"),
    "throughput: first time": (throughput_full, lambda c: c["check_seconds"].pop(0), "all ranks finish something"),
    "throughput: a time": (throughput_full, lambda c: c["check_seconds"].pop(1), "are not excluded"),
    "throughput: last time": (throughput_full, lambda c: c["check_seconds"].pop(), "the last of check_seconds"),
    "throughput: no times": (throughput_full, lambda c: c["check_seconds"].clear(), "at least one"),
    "throughput: order": (throughput_full, lambda c: c["check_seconds"].reverse(), "increasing"),
    "throughput: kind": (throughput_full, lambda c: c.update(kind="fixed_total"), "with the keys"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_every_field_matters(case: str) -> None:
    make, change, message = FIELDS[case]
    assert_rejected(FULL, make(), change, message)


def test_changed_fields_cover_the_certificates() -> None:
    for make, start in ((fixed_total_full, ""), (throughput_full, "throughput: ")):
        certificate = make()
        touched = set()
        for case, (maker, change, _) in FIELDS.items():
            if maker is make and case.startswith(start):
                tampered = copy.deepcopy(certificate)
                change(tampered)
                touched |= {key for key in certificate if tampered[key] != certificate[key]}
        assert touched | {"kind", "micro_batches"} == set(certificate)


@pytest.mark.parametrize(
    "changed",
    [
        linear(1.25, 16),
        linear(0.75, 16),
        linear(1.0, 15),
        linear(1.0, 16, fixed_seconds=0.5),
        linear(1.0, 16, communication_load_seconds=0.5),
        linear(1.0, 16, memory=MemoryCurve([1, 16], [1, 16]), memory_limit_bytes=7),
    ],
)
def test_certificate_does_not_hold_for_other_profiles(changed: RankProfile) -> None:
    profiles = [changed, PLAIN[1]]
    certificate = fixed_total()
    with pytest.raises(CertificateError, match="about other curves, limits or ranks"):
        verify_certificate(profiles, certificate)
    # Not only the fingerprint says so. A smaller maximum that is not reached changes nothing else.
    certificate["profiles_sha256"] = profiles_sha256(profiles)
    if changed == linear(1.0, 15):
        verify_certificate(profiles, certificate)
    else:
        with pytest.raises(CertificateError, match="slowest rank takes|finishes 1 x|expected 1 to its maximum 7"):
            verify_certificate(profiles, certificate)
    with pytest.raises(CertificateError, match="expected a list of 1 pairs"):
        verify_certificate(profiles[:1], certificate)


def test_every_field_of_a_profile_is_in_its_fingerprint() -> None:
    profile = overlapped(1.0, 4)
    changes: dict[str, Any] = {
        "time": TimeCurve([1, 4], [1.0, 3.0]),
        "max_micro_batch_size": 3,
        "accumulation_overhead_seconds": 0.0,
        "bucket_ready": None,
        "communication_load_seconds": 0.0,
        "fixed_seconds": 0.0,
        "memory": MemoryCurve([4], [99]),
        "memory_limit_bytes": 101,
    }
    fields = {name: getattr(profile, name) for name in RankProfile.__dataclass_fields__}
    assert set(changes) == set(fields)
    prints = {profiles_sha256([RankProfile(**{**fields, name: value})]) for name, value in changes.items()}
    assert len(prints | {profiles_sha256([profile]), profiles_sha256([profile, profile])}) == len(fields) + 2


def test_no_certificate_exists_for_a_cut_that_is_not_optimal() -> None:
    profiles = [
        RankProfile(TimeCurve([1, 3, 5, 7], [1.0, 3.0, 2.0, 4.0]), 7),
        RankProfile(TimeCurve([2, 4, 6], [2.0, 2.0, 6.0]), 6),
    ]
    maxima = [profile.max_micro_batch_size for profile in profiles]
    total = 8
    best = plan_fixed_total(profiles, total)
    refused = 0
    for sizes in itertools.product(*(range(1, largest + 1) for largest in maxima)):
        step = max(profile.time(size) for profile, size in zip(profiles, sizes, strict=True))
        if sum(sizes) != total or step <= best.step_seconds:
            continue
        claim = {**best.certificate, "micro_batches": [[size, 1] for size in sizes], "step_seconds": step}
        for below in itertools.product(*(range(largest + 1) for largest in maxima)):
            lists = [[count] if count else [] for count in below]
            with pytest.raises(CertificateError):
                verify_certificate(profiles, {**claim, "largest_micro_batches_below": lists})
            refused += 1
    assert refused >= 2 * 8 * 7  # at least two cuts with every possible bound


def test_slower_cuts_are_rejected_with_any_honest_bound() -> None:
    """Random problems with all options: a slower cut, once with the best cut's bound and once with its own."""
    rng = random.Random(7)
    rejected = 0
    while rejected < 200:
        instance = random_instance(rng, 3, 5)
        total = rng.randint(3, 12)
        try:
            result = plan_fixed_total(instance.profiles, total, **instance.options)
        except PlanningError:
            continue
        sizes, steps, _ = all_choices(instance, total if instance.options["allow_accumulation"] else 1, total)
        problem = pose_problem(instance.profiles, **instance.options)
        kept = (sizes * steps).sum(axis=1) == total
        for pairs in zip(sizes[kept].tolist(), steps[kept].tolist(), strict=True):
            cut = [list(pair) for pair in zip(*pairs, strict=True)]
            step = max(time.finish(*pair) for time, pair in zip(problem.times, cut, strict=True))
            if step <= result.step_seconds * (1 + 1e-9):
                continue
            claim = {**result.certificate, "micro_batches": cut, "step_seconds": step}
            own = {**claim, "largest_micro_batches_below": largest_micro_batches_below(problem, step, total)}
            for certificate in (claim, own, {**claim, "step_seconds": result.step_seconds}):
                with pytest.raises(CertificateError):
                    verify_certificate(instance.profiles, certificate)
            rejected += 1
            break


def test_lower_throughput_is_rejected() -> None:
    """Random problems with all options: worse batch sizes with the best ones' bound, and with one of their own."""
    rng = random.Random(8)
    rejected = 0
    while rejected < 200:
        instance = random_instance(rng, 3, 4)
        most = 3 if instance.options["allow_accumulation"] else None
        result = plan_max_throughput(instance.profiles, 0.5, max_accumulation_steps=most, **instance.options)
        sizes, steps, _ = all_choices(instance, most or 1, 1000)
        problem = pose_problem(instance.profiles, **instance.options)
        place = rng.randrange(len(sizes))
        cut = [list(pair) for pair in zip(sizes[place].tolist(), steps[place].tolist(), strict=True)]
        step = 0.5 + max(time.finish(*pair) for time, pair in zip(problem.times, cut, strict=True))
        total = int((sizes[place] * steps[place]).sum())
        if total / step >= result.samples_per_second * (1 - 1e-9):
            continue
        claim = {**result.certificate, "micro_batches": cut, "step_seconds": step, "total_batch_size": total}
        finishes = {time.finish(1, count) for time in problem.times for count in range(1, (most or 1) + 1)}
        for times in (claim["check_seconds"], sorted(finishes | set(claim["check_seconds"]))):
            with pytest.raises(CertificateError):
                verify_certificate(instance.profiles, {**claim, "check_seconds": times})
        rejected += 1


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a certificate, containers included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, inner in items for leaf in leaves(inner, (*path, key)))]


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.sampled_from([2**63, 10**400, 0.0, -1.0, 1e308, 5e-324, math.inf, math.nan]),
    st.floats(0.1, 40.0),
    st.text(max_size=3),
    st.lists(st.integers(-1, 5), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_change_is_rejected_with_a_clear_error_or_changes_no_claim(data: st.DataObject) -> None:
    make = data.draw(st.sampled_from([fixed_total_full, throughput_full]))
    honest = make()
    tampered = copy.deepcopy(honest)
    *outer, last = data.draw(st.sampled_from(leaves(honest)[1:]))
    place = tampered
    for key in outer:
        place = place[key]
    place[last] = data.draw(JSON_VALUES)
    try:
        verify_certificate(FULL, tampered)
    except CertificateError as error:
        assert str(error)
        return
    assert tampered["step_seconds"] == pytest.approx(honest["step_seconds"], rel=1e-11)
    assert tampered["micro_batches"] == honest["micro_batches"]


def test_certificates_survive_json() -> None:
    for profiles, certificate in ((PLAIN, fixed_total()), (FULL, fixed_total_full()), (FULL, throughput_full())):
        again = json.loads(json.dumps(certificate))
        assert again == certificate
        verify_certificate(profiles, again)


def test_verification_uses_nothing_of_the_solver() -> None:
    """What it imports of the package, directly or not, are the curves' points and their fingerprint."""
    folder = Path(planning.__file__).parents[1]
    open_files, files = ["planning.proofs.certificate"], set()
    while open_files:
        name = open_files.pop()
        files.add(name)
        imported = set()
        for node in ast.walk(
            ast.parse(folder.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
        ):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        if name not in ("documents.curves", "planning.proofs.digest"):
            assert "numpy" not in imported, name
        prefix = "accelerate_lshdp."
        open_files += [module.removeprefix(prefix) for module in imported if module.startswith(prefix)]
        open_files = [module for module in open_files if module not in files]
    own = {f"planning.proofs.{name}" for name in ("certificate", "certificate_fields", "throughput", "exact_times")}
    assert files == own | {"documents.curves", "planning.proofs.digest"}
    for name in own:
        source = folder.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        # Not what the curves' own methods say either: those are the planner's.
        assert not any(text in source for text in (".table(", ".time(", ".largest_micro_batch", "largest_within"))
