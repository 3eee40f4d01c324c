# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ranks of a comparison that are pretended, for tests of what drives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate_lshdp.comparing.launch import ENGINE, PLAIN_DDP, PLAIN_FSDP2
from accelerate_lshdp.comparing.memory_meter import MemoryMeter


MEGABYTE = 1_000_000


class PretendedLaunch:
    """Two ranks whose steps take as many seconds as `seconds` says and send a megabyte."""

    sleeps = several_clocks = False
    node_sizes = [1, 1]

    def __init__(self, seconds: Callable[[str, str], float], fail: Callable[[str, dict], None]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.kinds_called: list[tuple[str, str]] = []
        self.seconds = seconds
        self.fail = fail
        self.network = "full speed"
        self.sent = 0
        self.open: list[str] = []

    def with_kinds(self, kinds: Sequence[str]) -> PretendedLaunch:
        self.kinds = kinds
        return self

    def __enter__(self) -> PretendedLaunch:
        self.open.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(("exit", ""))

    @contextmanager
    def as_described(self, bits_per_second: float) -> Iterator[None]:
        self.network = f"{bits_per_second / 1e6:g}"
        try:
            yield
        finally:
            self.network = "full speed"

    def call(self, method: str, *, kind: str = ENGINE, timeout: float = 60, **arguments: Any) -> list[Any]:
        assert kind in self.kinds
        case = arguments.get("name", "").partition(",")[0]
        expected = PLAIN_DDP if case == "torch_ddp" else PLAIN_FSDP2 if case.startswith("torch_") else ENGINE
        assert kind == expected or not case
        self.kinds_called.append((method, kind))
        self.calls.append((method, arguments.get("name", "")))
        self.fail(method, arguments)
        return [getattr(self, f"_{method}")(**arguments)] * 2

    def sent_between_nodes(self) -> list[int]:
        return [self.sent, self.sent]

    def sent_inside_nodes(self) -> list[int]:
        return [0, 0]

    def memory_meter(self) -> MemoryMeter:
        return MemoryMeter(lambda: [5, 7])

    def _build(self, **arguments: Any) -> dict[str, Any]:
        return {"parameters": 1000, "units": {"first": 1000, "second": 1000}, "samples": "the same"}

    def _wire_bytes(self, names: list[str]) -> dict[str, float]:
        return dict.fromkeys(names, 4000.0)

    def _measure_formats(self, names: list[str]) -> dict[str, Any]:
        points = [(1000, 1.0), (2000, 2.0)]
        return {name: {"points": points, "wire_share": 1.0, "wire_bytes": 4000} for name in names}

    def _begin(self, name: str, **arguments: Any) -> None:
        self.open.append(name)

    def _train(self, name: str, steps: int) -> list[tuple[float, float, int]]:
        assert name in self.open
        self.sent += steps * MEGABYTE
        return [(self.seconds(name, self.network), 1.5, 4)] * steps

    def _batch_sizes(self, name: str) -> list[int]:
        assert name in self.open
        return [5, 3]

    def _statistics(self, name: str) -> dict[str, Any]:
        return {
            "compute_seconds": [1.0, 2.0],
            "wait_seconds": [1.0, 0.0],
            "optimizer_seconds": [0.1, 0.2],
            "idle_fraction": 0.25,
        }

    def _timeline(self, name: str) -> list[dict[str, Any]]:
        return [{"name": "forward", "begin": 1.0, "end": 2.0}]

    def _end(self, name: str) -> None:
        self.open.remove(name)

    def _forget_groups(self) -> None:
        pass

    def _peak_bytes(self) -> int:
        return 11
