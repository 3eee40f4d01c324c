# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`LiveBytes`: the memory of what operators make, for tests of peaks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have made and that are alive.

    Args:
        model: whose shards were there before.

    Attributes:
        most: at a time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.most = 0
        own = [p.detach() for p in model.parameters()]
        own = [p.to_local() if isinstance(p, DTensor) else p for p in own]
        self._before = [p.untyped_storage() for p in own]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                if not any(storage is before for before in self._before):
                    self._storages[id(storage)] = weakref.ref(storage)
        self.most = max(self.most, self._live())
        return result

    def _live(self) -> int:
        # Sizes of now: FSDP2 empties storages that it keeps.
        living = {number: storage for number, ref in self._storages.items() if (storage := ref()) is not None}
        self._storages = {number: self._storages[number] for number in living}
        return sum(storage.nbytes() for storage in living.values())
