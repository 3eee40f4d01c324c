# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Models whose units are hard to stream: what they share, reuse, leave out, recompute and change in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


WIDTH = 16
WORDS = 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """An embedding, blocks in a list and a head; what is special is in the subclasses."""

    block: type[nn.Module] = Block
    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.tensor(1.5))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens)) * self.scale


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class OwnLoss(Tied):
    """A tied head whose loss the model computes itself, so that in slices nothing needs its logits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class OwnLossApart(OwnLoss):
    """Likewise, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().flip(0).clone())


class ReturnsLogits(OwnLoss):
    """Likewise, and the logits are there for who wants them."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits


class TwoHeads(Tied):
    """A weight of three modules, two of which are heads of one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WORDS)
        self.other.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.hidden(tokens)
        return self.head(x) + self.other(x.tanh())


class TiedByHand(Plain):
    """An embedding whose weight is that of a head, too, without a module for it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(tokens), self.embed.weight)


class Projected(Plain):
    """A product in no unit before all blocks."""

    def __init__(self) -> None:
        super().__init__()
        later = {name: self._modules.pop(name) for name in ("blocks", "head")}
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self._modules.update(later)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.project(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return x


class SelfConditioned(Plain):
    """Looks at what it predicts without a gradient first, by its own forward."""

    looks = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.looks:
            self.looks = False
            with torch.no_grad():
                tokens = (tokens + self(tokens).argmax(-1)) % WORDS
            self.looks = True
        return super().forward(tokens)


class UsedTwice(Plain):
    """A head, and an embedding, that compute twice in a forward."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        one = self.embed(tokens.new_full((), 3))
        return super().hidden(tokens) + self.embed(tokens.flip(1)) + one

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.hidden(tokens)
        return self.head(x) + self.head(x.tanh())


class Padded(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=3)


class FrozenEnds(Plain):
    """An embedding and a head that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.head.weight.requires_grad_(False)


class FrozenRest(Plain):
    """Nothing is trained that is in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)


class SideEnds(Plain):
    """An embedding and a head that compute twice, once in a stream of their own, where the device has some."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.device.type == "cpu":
            x = self.embed(tokens) + self.embed(tokens.flip(1))
            for block in self.blocks:
                x = block(x)
            return self.head(x) + self.head(x.tanh())
        streams = torch.get_device_module(tokens.device)
        before = streams.current_stream()
        if not hasattr(self, "side"):
            self.side = streams.Stream(tokens.device)
        x = self.embed(tokens)
        self.side.wait_stream(before)
        tokens.record_stream(self.side)
        with streams.stream(self.side):
            other = self.embed(tokens.flip(1))
        before.wait_stream(self.side)
        other.record_stream(before)
        x = x + other
        for block in self.blocks:
            x = block(x)
        self.side.wait_stream(before)
        x.record_stream(self.side)
        with streams.stream(self.side):
            other = self.head(x.tanh())
        found = self.head(x)
        before.wait_stream(self.side)
        other.record_stream(before)
        return found + other


class Adapted(Block):
    """Its weights are frozen, but for a small addition (LoRA), whose gradients come before the unit is done."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.a, self.b = nn.Linear(3 * WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(h) + self.b(self.a(h))


class LowRank(Plain):
    block = Adapted


class FrozenBelow(Plain):
    """Nothing before the last block is trained, so that no gradient goes there."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)


class FrozenBetween(Plain):
    """A frozen block between trained ones, through which gradients go."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class Recomputed(Plain):
    reentrant = False

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class RecomputedReentrant(Recomputed):
    reentrant = True


class PartRecomputed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(self._middle, x, use_reentrant=False))

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(self.norm(x)))


class RecomputedInside(Plain):
    block = PartRecomputed


class Repeated(Plain):
    """The same block twice in a forward."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0], self.blocks[1]):
            x = block(x)
        return x


class Partner(Block):
    """A block that also looks at what another part of the model has computed, in a list."""

    def forward(self, x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        others.append(x)
        return super().forward(x + sum(others))


class LookingBack(Plain):
    """All blocks use the output of the embedding, and add to a list that the model has."""

    block = Partner

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        seen = [x]
        for block in self.blocks:
            x = block(x, seen)
        assert len(seen) == self.depth + 1
        return x


class ChangesInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(self.down(F.gelu(self.up(self.norm(x * 1.0)))))  # a copy, as backwards need what was normalised
        return x


class InPlace(Plain):
    block = ChangesInput

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * 1.0
        for block in self.blocks:
            block(x)
        return x


@dataclass
class Result:
    value: torch.Tensor
    other: dict[str, torch.Tensor]


class Wrapped(Block):
    def forward(self, x: torch.Tensor) -> Result:
        return Result(super().forward(x), {"norm": self.norm(x)})


class Objects(Plain):
    """Blocks that return objects of the script, with two tensors each."""

    block = Wrapped

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            result = block(x)
            x = result.value + 0.1 * result.other["norm"]
        return x


class WithUnused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A branch of parameters alone, whose gradients nothing orders before those of the input.
        gate = torch.sigmoid(self.first * self.second).tanh()
        return super().forward(x) * gate + F.linear(x, self.up.weight.detach())[..., :WIDTH]


class Unused(Plain):
    """Parameters that get no gradient, a branch beside the input, and a weight that is used without a gradient."""

    block = WithUnused


class Hidden(Block):
    """Keeps a second way to the loss for itself, which no output of its forward shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.aside = self.up(out).square().mean()
        return out


class HiddenLoss(Plain):
    block = Hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + sum(block.aside for block in self.blocks)


class LookedInto(Plain):
    """A loss of activations that hooks have taken out of the middle of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(self.look)

    def look(self, module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.seen.append(output)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        found = super().forward(tokens)
        return found + sum(each.square().mean() for each in self.seen)


class Skipping(Plain):
    """Every second forward leaves the last block out, which is on its way to the device by then."""

    calls = 0

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(tokens)
        for block in self.blocks[: len(self.blocks) - (self.calls + 1) % 2]:
            x = block(x)
        return x


class OnStreams(Plain):
    """Two branches that compute in streams of their own, where the device has some."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if x.device.type == "cpu":
            return self.blocks[2](self.blocks[0](x)) + self.blocks[1](x)
        streams = torch.get_device_module(x.device)
        before = streams.current_stream()
        if not hasattr(self, "sides"):
            self.sides = [streams.Stream(x.device) for _ in range(2)]
        branches: list[torch.Tensor] = [x, x]
        for side in self.sides:
            side.wait_stream(before)
            x.record_stream(side)
        for number, block in ((0, self.blocks[0]), (1, self.blocks[1]), (0, self.blocks[2])):
            with streams.stream(self.sides[number]):
                branches[number] = block(branches[number])
        for side, branch in zip(self.sides, branches, strict=True):
            before.wait_stream(side)
            branch.record_stream(before)
        return branches[0] + branches[1]


class Alternating(OnStreams):
    """Two branches that change their streams with each other from one forward to the next."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        getattr(self, "sides", []).reverse()
        return super().hidden(tokens)


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        Plain,
        Tied,
        OwnLoss,
        OwnLossApart,
        ReturnsLogits,
        TwoHeads,
        TiedByHand,
        Projected,
        SelfConditioned,
        UsedTwice,
        Padded,
        FrozenEnds,
        FrozenRest,
        SideEnds,
        LowRank,
        FrozenBelow,
        FrozenBetween,
        Recomputed,
        RecomputedReentrant,
        RecomputedInside,
        Repeated,
        LookingBack,
        InPlace,
        Objects,
        Unused,
        HiddenLoss,
        LookedInto,
        Skipping,
        OnStreams,
        Alternating,
    )
}


def batch(step: int, samples: int = 12) -> torch.Tensor:
    return torch.randint(0, WORDS, (samples, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found = model(tokens)
    return found if found.ndim == 0 else F.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def paired_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Two forwards before one backward."""
    return loss_of(model, tokens) + 0.5 * loss_of(model, tokens.flip(1))
