# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainers that save their model in a way of their own, as sentence-transformers' does, with sharded parameters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import Sentences, arguments, collate, full_parameters, make_model
from transformers import GPT2Model, Trainer
from workers import WorkerPools

from accelerate_lshdp import LSHDPTrainerMixin, Plan
from accelerate_lshdp.checkpoint.model import plain_name
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.engine.stores.fsdp2.whole_states import whole_states


SIZES = [3, 2]
PLACEMENT = ModelPlacement(
    (("transformer.h.0", UnitPlacement(UnitStore.WORLD)), ("transformer.h.1", UnitPlacement(UnitStore.REPLICATE)))
)


class PartsTrainer(Trainer):
    """Saves parts of the model, whatever the state dict it is given, and does not ask which rank it is."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        assert output_dir is not None
        self.model.transformer.save_pretrained(os.path.join(output_dir, "body"))
        torch.save(self.model.lm_head.state_dict(), os.path.join(output_dir, "head.pt"))
        with open(os.path.join(output_dir, "writers.txt"), "a", encoding="utf-8") as file:
            file.write(f"{self.args.process_index}\n")


class LSHDPPartsTrainer(LSHDPTrainerMixin, PartsTrainer):
    pass


def make_trainer(folder: str, strategy: str) -> Trainer:
    placement = PLACEMENT if strategy == "osdp" else None
    plan = Plan.from_batch_sizes(SIZES, strategy=strategy, placement=placement)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4, "per_device_train_batch_size": 1}
    return LSHDPPartsTrainer(
        model=make_model("gpt2"),
        args=arguments(folder, **options),
        data_collator=collate,
        train_dataset=Sentences(40, "words"),
        plan=plan,
    )


def save_parts(folder: str, strategy: str) -> dict[str, torch.Tensor]:
    trainer = make_trainer(folder, strategy)
    trainer.train()
    return full_parameters(trainer)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "osdp"])
def test_parts_of_the_model_are_saved_whole(workers: WorkerPools, tmp_path: Path, strategy: str) -> None:
    trained, _ = workers(2).run(save_parts, str(tmp_path), strategy, nodes=(1, 1))

    saved = tmp_path / "checkpoint-4"
    body = GPT2Model.from_pretrained(saved / "body")
    for name, parameter in body.named_parameters():
        torch.testing.assert_close(parameter, trained[f"transformer.{name}"], rtol=0, atol=0)
    # The head is tied to the embedding.
    head = torch.load(saved / "head.pt", weights_only=True)
    torch.testing.assert_close(head["weight"], trained["transformer.wte.weight"], rtol=0, atol=0)
    assert (saved / "writers.txt").read_text().split() == ["0"]


def compute_while_saving(folder: str) -> list[str]:
    trainer = make_trainer(folder, "fsdp")
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    whole = trainer.accelerator.get_state_dict(model)
    messages, ids = [], torch.tensor([[1, 2, 3]])
    with pytest.raises(RuntimeError, match="no full tensor of the sharded parameters"):
        with whole_states(model, {}, plain_name):
            pass
    if not whole:  # on one node several ranks have a part each, and one of them the whole
        return messages
    with whole_states(model, whole, plain_name):
        for part in (model, model.transformer.h[0]):
            with pytest.raises(RuntimeError) as found:
                part(ids) if part is model else part(torch.zeros(1, 3, 16))
            messages.append(str(found.value))
    with pytest.raises(RuntimeError, match="save_pretrained without a state_dict"):
        model.save_pretrained(folder)
    model(ids)  # on all ranks again
    return messages


def test_a_forward_of_the_rank_that_saves_is_an_error_and_not_a_wait(workers: WorkerPools, tmp_path: Path) -> None:
    for messages in workers(2).run(compute_while_saving, str(tmp_path), nodes=(1, 1)):
        assert len(messages) == 2 and all("while one rank saves it" in message for message in messages)
