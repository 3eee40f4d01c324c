"""One rank of `test_cuda`: trains a setting on the first GPU, and prints how far it is from one process on the CPU."""

from __future__ import annotations

import json
import os
import sys

from accelerate.utils import InitProcessGroupKwargs
from exactness import Setting, train


if __name__ == "__main__":
    described = json.loads(sys.argv[1])
    setting = Setting(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in described.items()}
    )
    # NCCL refuses two ranks on one GPU.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if int(os.environ["WORLD_SIZE"]) > 1 else []
    print("errors", *train(setting, kwargs_handlers=handlers))
