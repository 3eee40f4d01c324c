# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A rank that trains on the emulated device with one statement of the engine left out.

    python mutated_run.py RANK RANKS STORE FILE NUMBER

The statement is the one of that number among those of `sites`. What is found goes to standard output, the first thing
that shows that something is missing: a race, another result, or an error.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import CodeType


_TESTS = Path(__file__).parents[1]
_PACKAGE = Path(__file__).parents[2] / "accelerate_lshdp"
_WAITS = ("wait_stream", "wait_event", "record_stream", "synchronize")
_QUEUED = "_Streamed"


def sites(path: Path) -> list[ast.Expr]:
    """The statements of a file that let one stream, or the host, wait for another, or keep memory for one."""
    tree = ast.parse(path.read_text())
    found = {node.lineno: node for node in ast.walk(tree) if _calls(node, _WAITS)}
    # Of what is queued on a stream, `wait` lets that stream wait; elsewhere it is the host that waits for results.
    queued = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == _QUEUED]
    for node in queued:
        for body in (each for each in node.body if isinstance(each, ast.FunctionDef)):
            found.update((each.lineno, each) for each in ast.walk(body) if _calls(each, ("wait",)))
    return [found[line] for line in sorted(found)]


def _calls(node: ast.AST, names: tuple[str, ...]) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in names
    )


class _Leaver(ast.NodeTransformer):
    """Puts ``pass`` in the place of one statement."""

    def __init__(self, left_out: ast.Expr) -> None:
        self.place = left_out.lineno

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if node.lineno == self.place else node


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, number: int) -> None:
        super().__init__(name, path)
        self._number = number

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        tree = _Leaver(sites(path)[self._number]).visit(ast.parse(path.read_text()))
        return compile(tree, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, path: Path, number: int) -> None:
        self._path, self._number = path, number
        self._name = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        loader = _Loader(name, str(self._path), self._number)
        return importlib.machinery.ModuleSpec(name, loader, origin=str(self._path))


def found_on_the_wire(ranks: int) -> str | None:
    """As `found_by_training`, of trainings whose gradients travel between devices."""
    import device_training
    import single_waits
    import torch_device as device

    device.join_device_world()
    device.join_device_world = lambda: None  # one world for all of them
    nodes = {2: (1, 1), 3: (2, 1), 4: (2, 2)}[ranks]
    if ranks < 4 and (wrong := single_waits.buffers_given_up(nodes)):
        return wrong
    strategies = [("group_sharding", "auto"), ("lsdp", "collectives")] if ranks == 4 else [("ddp", "auto")]
    formats = ["fp32", "int8", "powersgd"] if ranks == 2 else ["fp32"]
    delays = ({"collective_delay": 0.005}, {"compute_delay": 0.0005}, {"copy_delay": 0.005})
    for strategy, intra_node in strategies:
        for wire_format in formats:
            for delay, fails in [*((each, False) for each in delays), (delays[0], strategy == "ddp")]:
                device.reset()
                what = f"{strategy}, {wire_format}, {delay}, fails: {fails}"
                try:
                    found = device_training.train(strategy, nodes, delay, wire_format, intra_node, fails)
                except Exception as error:  # whatever is wrong shows
                    return f"{what}: {type(error).__name__}: {error}"
                if found["races"] or not found["error"] < (1e-5 if wire_format == "fp32" else 0.1):
                    return f"{what}: error {found['error']}, {found['races'][:1]}"
    return None


def found_by_training(ranks: int) -> str | None:
    """What the first training says of all in which something is wrong; None if all are as they should be."""
    import single_waits
    import streamed_training
    import torch_device as device
    from streamed_training import Case

    device.join_device_world()
    device.join_device_world = lambda: None  # one world for all of them
    for program in (single_waits.sums_in_turns, single_waits.slices_given_up, single_waits.slices_of_two_streams):
        if wrong := program():
            return wrong
    slow = (("copy_delay", 0.004), ("to_device", 1e8), ("to_host", 1e8))
    late = (("compute_delay", 0.0005),)
    # With ten samples, activations are large enough to get the memory of a block that was dropped.
    shapes = [
        Case(model="Plain", delays=slow),
        Case(model="Plain", delays=late),
        Case(model="Skipping", delays=slow, samples=10, evaluates=True),
        Case(model="OnStreams", delays=late, samples=10),
        Case(model="OnStreams", delays=late, samples=10, accumulation=3),
        Case(model="OnStreams", delays=late, samples=10, accumulation=3, drops=True),
        Case(model="Alternating", delays=late, samples=10, accumulation=3),
        Case(model="OwnLoss", delays=slow, slices=3),
        Case(model="OwnLoss", delays=late, samples=10, slices=3),
        Case(model="SideEnds", delays=late, samples=10, slices=3),
    ]
    for shape in shapes:
        for nodes in ((ranks,), (1,) * ranks):
            device.reset()
            case = replace(shape, nodes=nodes)
            try:
                found = streamed_training.train(case)
            except Exception as error:  # whatever is wrong shows
                return f"{case}: {type(error).__name__}: {error}"
            if found["races"] or not found["error"] < 1e-12:
                return f"{case}: error {found['error']}, {found['races'][:1]}"
    return None


def main() -> None:
    rank, ranks, store, path, number = sys.argv[1:]
    sys.path[:0] = [str(_TESTS / "emulated_device"), str(_TESTS / "distributed"), str(_TESTS), str(_PACKAGE.parent)]
    if int(number) >= 0:
        sys.meta_path.insert(0, _Finder(_PACKAGE / path, int(number)))
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=20),
    )
    found = found_by_training if path.startswith("engine/stores/streamed") else found_on_the_wire
    print(json.dumps(found(int(ranks))), flush=True)


if __name__ == "__main__":
    main()
