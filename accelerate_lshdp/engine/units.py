# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Chooses the units of a model: the modules that are gathered, computed and reduced together.

A unit is the grain of FSDP2 (one ``fully_shard`` call). Good units are the repeated blocks of a network: large enough
that a collective pays off, small enough that two of them fit on the device beside the activations.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from accelerate_lshdp.engine.module_state import parameters_of


class UnitError(ValueError):
    """The units that the user named do not exist in the model."""


def choose_units(model: nn.Module, block_names: Sequence[str] | None = None) -> list[tuple[nn.Module, ...]]:
    """Chooses the units of a model, innermost choice only (units never nest), in order of registration.

    Args:
        model: the model, before sharding.
        block_names: class names or module names (as in ``named_modules``) of the units. None: the model's own
            ``_no_split_modules`` (transformers), else what ``ModuleList`` and ``Sequential`` hold, else none.

    Returns:
        Groups of modules. Blocks that share a parameter (tied weights) form one group, because FSDP2 can keep a
        parameter in one unit only. What belongs to no group stays with the root.

    Raises:
        UnitError: a name in ``block_names`` matches no module.
    """
    return _join_tied(model, choose_blocks(model, block_names))


def choose_blocks(model: nn.Module, block_names: Sequence[str] | None = None) -> list[nn.Module]:
    """The modules that units are made of, before those that share a parameter are joined; see `choose_units`."""
    if block_names:
        return _named_blocks(model, block_names)
    if declared := _declared_blocks(model):
        return _blocks_of_class(model, declared)
    return _repeated_blocks(model)


def _declared_blocks(model: nn.Module) -> set[str]:
    """Class names in ``_no_split_modules`` of the model and of the models inside it."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    # Embeddings are declared "not to be split" by some models; alone they are no block.
    return {type(m).__name__ for m in model.modules() if type(m).__name__ in names and _is_block(m)}


def _is_block(module: nn.Module) -> bool:
    """Whether the module computes something from parameters of more than one submodule."""
    has_forward = type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList)
    holders = [m for m in module.modules() if any(True for _ in parameters_of(m, recurse=False))]
    return has_forward and len(holders) > 1


def _blocks_of_class(model: nn.Module, names: set[str]) -> list[nn.Module]:
    return _outermost(model, lambda name, module: type(module).__name__ in names)


def _named_blocks(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    wanted = set(names)
    found: set[str] = set()

    def matches(name: str, module: nn.Module) -> bool:
        hits = wanted & {name, type(module).__name__}
        found.update(hits)
        return bool(hits)

    blocks = _outermost(model, matches)  # which fills `found`
    if missing := sorted(wanted - found):
        known = sorted({type(m).__name__ for m in model.modules() if next(parameters_of(m), None) is not None})
        raise UnitError(
            f"no module of the model is called, or is of class, {', '.join(missing)}. Its classes with parameters are "
            f"{', '.join(known)}; name units by one of them or by a module's full name"
        )
    return blocks


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Children of ModuleList and Sequential that hold parameters and have a forward of their own."""
    parents = {
        id(child)
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and module is not model
        for child in module.children()
    }
    if isinstance(model, nn.Sequential):
        parents.update(id(child) for child in model.children())
    return _outermost(
        model,
        lambda name, module: (
            id(module) in parents
            and next(parameters_of(module), None) is not None
            and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        ),
    )


def _outermost(model: nn.Module, matches) -> list[nn.Module]:  # noqa: ANN001 - a small local predicate
    """Matching modules, none inside another, each once."""
    chosen: list[nn.Module] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if module is model or id(module) in inside:
            continue
        if matches(name, module) and next(parameters_of(module), None) is not None:
            chosen.append(module)
            inside.update(id(m) for m in module.modules())
    return chosen


def _join_tied(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[nn.Module, ...]]:
    """Merges blocks that share a parameter; a block sharing one with the rest of the model goes to the root."""
    # FSDP2 refuses a parameter in two units, and gathers a unit only around the forwards of its own modules: what is
    # used in two places has to belong to one unit that is gathered in both.
    owners: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        for parameter in parameters_of(block):
            owners.setdefault(id(parameter), []).append(index)
    inside = {id(m) for block in blocks for m in block.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in parameters_of(m, recurse=False)}

    group_of = list(range(len(blocks)))
    to_root: set[int] = set()
    for parameter, indices in owners.items():
        target = min(group_of[i] for i in indices)
        merged = {group_of[i] for i in indices}
        # All members of all groups that meet here, so that chains (a tied to b, b to c) end in one group.
        group_of = [target if g in merged else g for g in group_of]
        if parameter in outside:
            to_root.add(indices[0])
    root_groups = {group_of[i] for i in to_root}
    groups: dict[int, list[nn.Module]] = {}
    for index, block in enumerate(blocks):
        if group_of[index] not in root_groups:
            groups.setdefault(group_of[index], []).append(block)
    return [tuple(group) for group in groups.values()]
