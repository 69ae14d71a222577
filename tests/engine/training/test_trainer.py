"""Hugging Face's Trainer over an attached model: losses and weights equal those of an eager Trainer bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from engine import Engine, EngineConfig

pytest.importorskip("accelerate")  # Trainer needs it

STEPS, ACCUMULATED, ROWS = 6, 2, 2


class Trainer(hf.Trainer):
    """Keeps the loss of every microbatch."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.losses = []

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.detach().clone())
        return loss


class Texts(torch.utils.data.Dataset):
    """Left-padded texts, with a column that the model does not take."""

    def __len__(self):
        return STEPS * ACCUMULATED * ROWS

    def __getitem__(self, index):
        ids = torch.randint(3, 32, (8,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(8) >= index % 4).long()
        ids = torch.where(mask.bool(), ids, 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids, "source": torch.tensor(index)}


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole"])
def test_a_trainer_trains_an_attached_model_as_eager(tmp_path, whole):
    torch.manual_seed(0)
    eager = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            use_cache=False,
            attention_dropout=0.1,
        )
    )
    attached, logs = copy.deepcopy(eager), []
    engine = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2))
    engine.attach(attached, modules=[""] if whole else None)
    for model in (attached, eager):
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=ACCUMULATED,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=7,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
        columns = next(iter(trainer.get_train_dataloader())).keys()
        assert columns >= {"input_ids", "attention_mask", "labels"} and "source" not in columns
        trainer.train()
        logs.append(trainer.losses)
    assert len(logs[0]) == len(logs[1]) == STEPS * ACCUMULATED and all(map(torch.equal, *logs))
    assert all(map(torch.equal, attached.state_dict().values(), eager.state_dict().values()))
    rows = engine.graphs()
    if whole:  # transformers reads a mask with padding on the host
        assert "reads a tensor's values" in rows[0]["failure"] and rows[0]["eager"]["capture_failed"]
    else:
        assert all(row["replays"] for row in rows) and not any(row["failed"] for row in rows)
    engine.detach()
