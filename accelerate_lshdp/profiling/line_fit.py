# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Least-squares fit of a line to measured times, by relative errors."""

from __future__ import annotations

from collections.abc import Iterable


def fit_line(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(seconds at 0, seconds for each more) with the smallest sum of squared relative errors.

    Relative, so that small sizes count as much as large ones. Neither value is negative: where the best line has a
    negative one, the best line with 0 in its place is taken.

    Args:
        points: (size, seconds), seconds more than 0.

    Raises:
        ValueError: there are no points.
    """
    points = tuple(points)
    if not points:
        raise ValueError("found no measured points, expected at least one")
    # seconds[i] * 1 ~ base + slope * size[i], each divided by seconds[i]: least squares of u*base + v*slope = 1.
    u = [1 / seconds for _, seconds in points]
    v = [size / seconds for size, seconds in points]
    su, sv, uu, vv = sum(u), sum(v), sum(a * a for a in u), sum(b * b for b in v)
    uv = sum(a * b for a, b in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    # Relative to its terms: with one size only, the determinant is zero up to rounding.
    if determinant > 1e-12 * uu * vv:
        base, slope = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
        if base >= 0 and slope >= 0:
            return base, slope
    # A negative value is no time: the optimum under the constraint then lies on one of the two axes.
    candidates = [(su / uu, 0.0)] + ([(0.0, sv / vv)] if vv > 0 else [])

    def error(line: tuple[float, float]) -> float:
        return sum((line[0] * a + line[1] * b - 1) ** 2 for a, b in zip(u, v, strict=True))

    return min(candidates, key=error)
