# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of the worker pool: joins the process group, then runs one case after another (see workers.py).

Run as `python worker_main.py FD RANK WORLD_SIZE PARENT_PID STACKS_FILE`. Requests and replies are pickles, one a
message, on the inherited socket FD. `os._exit` ends the process whatever happens, because gloo can abort a Python that
exits the ordinary way.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


# Modules stay. Python's collector would look at them again and again while they are made: a third of an import's time.
gc.disable()

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import logging as accelerate_logging  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402


# The pool's own timeouts are shorter; this one only has to stay out of their way.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
# Every process group has sockets and threads. A world that has collected more groups than this is made anew.
MAX_GROUPS = 12
SEED = 0


def watch_parent(parent: int) -> None:
    """End this process soon after its parent, even in the middle of a case."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def forget_meshes() -> None:
    """DTensor's caches hold meshes of the old world, which compare equal to those of the next and name dead groups."""
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribute is None:
        return
    redistribute.clear_redistribute_planner_cache()
    redistribute._gen_transform_infos.cache_clear()
    importlib.import_module("torch.distributed.tensor.debug")._clear_python_sharding_prop_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()


class Worker:
    def __init__(self, connection: Connection, rank: int, world_size: int) -> None:
        self.connection = connection
        self.rank = rank
        self.world_size = world_size
        self.generation = -1
        self.frozen_modules = 0
        self.world: dist.ProcessGroup | None = None
        self.store = self.make_store()
        self.environment = dict(os.environ)
        self.folder = os.getcwd()

    def make_store(self) -> dist.TCPStore:
        """Rank 0 opens the store on a port that the system picks, the pool tells the others: no port is ever lost."""
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.world_size, is_master=True, wait_for_workers=False)
            self.reply({"port": store.port})
            self.request()
            return store
        self.reply({})
        return dist.TCPStore("127.0.0.1", self.request()["port"], self.world_size, wait_for_workers=False)

    def request(self) -> dict[str, Any]:
        return pickle.loads(self.connection.recv_bytes())

    def reply(self, message: dict[str, Any]) -> None:
        self.connection.send_bytes(pickle.dumps(message))

    def join_world(self, generation: int) -> None:
        """Make the default group of this generation; a group in which a case failed is never used again."""
        if generation == self.generation:
            return
        if dist.is_initialized():
            self.world = None
            forget_meshes()
            gc.collect()
            dist.destroy_process_group()
        store = dist.PrefixStore(f"world-{generation}", self.store)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=COLLECTIVE_TIMEOUT
        )
        self.world = dist.group.WORLD
        self.generation = generation

    def world_is_intact(self) -> bool:
        return (
            dist.is_initialized()
            and dist.group.WORLD is self.world
            and len(dist.distributed_c10d._world.pg_map) <= MAX_GROUPS
        )

    def reset(self) -> None:
        """Undo what a case may leave behind in the process, so that no case depends on the one before it."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        # Cases that are the oracle for others do without this package.
        if "accelerate_lshdp.runtime.stop_requests" in sys.modules:
            requests = sys.modules["accelerate_lshdp.runtime.stop_requests"].of_process
            requests.leave()
            requests.forget()
        accelerate_logging.MultiProcessAdapter.warning_once.cache_clear()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        random.seed(SEED)
        numpy.random.seed(SEED)
        torch.manual_seed(SEED)

    def prepare(self, request: dict[str, Any]) -> None:
        """Everything slow that is not the case itself: its clock starts afterwards."""
        self.join_world(request["generation"])
        if request["directory"] not in sys.path:
            sys.path.insert(0, request["directory"])
        gc.disable()
        try:
            importlib.import_module(request["module"])
        finally:
            gc.enable()
        if len(sys.modules) != self.frozen_modules:
            # No later collection has to look at what modules hold, which takes 0.2 s each time.
            gc.collect()
            gc.freeze()
            self.frozen_modules = len(sys.modules)

    def call(self, request: dict[str, Any]) -> Any:
        self.reset()
        os.environ.clear()
        os.environ.update(request["environment"])
        function = importlib.import_module(request["module"])
        for name in request["qualname"].split("."):
            function = getattr(function, name)
        return function(*pickle.loads(request["args"]))

    def serve(self) -> None:
        while True:
            request = self.request()
            if request["action"] == "exit":
                return
            try:
                value = self.prepare(request) if request["action"] == "prepare" else self.call(request)
                message = {"value": pickle.dumps(value), "error": None}
                del value
            except BaseException as error:  # SystemExit and KeyboardInterrupt of a case are its result, too
                message = {
                    "error": {
                        "type": type(error).__name__,
                        "message": str(error),
                        "traceback": traceback.format_exc(),
                        "bases": tuple(base.__name__ for base in type(error).__mro__),
                    }
                }
            sys.stdout.flush()
            sys.stderr.flush()
            self.reset()
            gc.collect()
            message["intact"] = self.world_is_intact()
            self.reply(message)


def main() -> None:
    descriptor, rank, world_size, parent, stacks = sys.argv[1:]
    threading.Thread(target=watch_parent, args=(int(parent),), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "a"), all_threads=True)
    # Tests import helpers beside this file, and a few import each other. Some import
    # the laboratory of the benchmarks.
    here = Path(__file__).resolve().parent
    folders = [folder for folder in sorted(here.iterdir()) if any(folder.glob("test_*.py"))]
    sys.path[:0] = map(str, [here, *folders, here.parent / "benchmarks"])
    torch.set_num_threads(1)
    # For loaders with multiprocessing_context="forkserver".
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    code = 1
    try:
        Worker(Connection(int(descriptor)), int(rank), int(world_size)).serve()
        code = 0
    except EOFError:  # the pool has gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
