# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs a script on a rank that has the emulated device, as a launcher would on another one.

    RANK=... WORLD_SIZE=... python run_on_device.py SCRIPT [ARGUMENTS]

The last line of standard output has the races that were found, and the bytes that were copied to the device.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path


def main() -> None:
    sys.path[:0] = [str(Path(__file__).parent)]
    import torch.distributed as dist
    import torch_device as device
    from accelerate import PartialState

    dist.init_process_group(f"cpu:gloo,{device.NAME}:{device.BACKEND}", timeout=timedelta(seconds=60))
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.NAME}:0"
    # accelerate knows no backend for a device of this name, and takes the world that is there for one of CPUs.
    PartialState(cpu=True)
    del os.environ["ACCELERATE_USE_CPU"]
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    device.synchronize()
    print(json.dumps({"races": device.races(), "to_device_bytes": device.counts()["to_device_bytes"]}), flush=True)


if __name__ == "__main__":
    main()
