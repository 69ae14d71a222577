"""transformers, Trainer, Accelerate, PEFT, TRL, Lightning and timm."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.training.programs.models import CLASSES, ROWS, VOCAB, descend, features, images, labels, mlp, tokens
from benchmarks.training.programs.registry import STEPS, Run, program

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def llama(**changes: Any) -> nn.Module:
    """Return a Llama of transformers with two layers."""
    import transformers

    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False, pad_token_id=0, **changes)
    return transformers.LlamaForCausalLM(config)


def _train(run: Run, model: nn.Module, batch_of, attached: nn.Module | None = None, **options: Any) -> Any:
    """Train a model that returns an object with the loss."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    model.train()
    run.attach(model if attached is None else attached, **options)
    for _ in run.steps():
        loss = model(**batch_of()).loss
        descend(optimizer, loss)
        run.log(loss)
    return model


def _text() -> dict[str, torch.Tensor]:
    batch = tokens()
    return {"input_ids": batch, "labels": batch}


def _padded_text() -> dict[str, torch.Tensor]:
    batch = tokens()
    lengths = torch.randint(3, batch.shape[1] + 1, (len(batch), 1))
    mask = (torch.arange(batch.shape[1]) < lengths).long()
    return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}


@program("transformers")
def llama_of_transformers(run: Run) -> Any:
    return _train(run, llama(), _text)


@program("transformers")
def llama_with_padding(run: Run) -> Any:
    return _train(run, llama(), _padded_text)


@program("transformers")
def llama_with_eager_attention(run: Run) -> Any:
    return _train(run, llama(attn_implementation="eager", attention_dropout=0.1), _padded_text)


@program("transformers")
def llama_checkpointed(run: Run) -> Any:
    model = llama(attention_dropout=0.1)
    model.gradient_checkpointing_enable()
    return _train(run, model, _text)


@program("transformers")
def llama_checkpointed_without_state(run: Run) -> Any:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return _train(run, model, _text)


@program("transformers")
def llama_in_an_iteration(run: Run) -> Any:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batch):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(tokens()))
    return model


@program("transformers")
def llama_with_padding_in_an_iteration(run: Run) -> Any:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(_padded_text()))
        optimizer.step()
    return model


@program("transformers")
def gpt2(run: Run) -> Any:
    import transformers

    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return _train(run, transformers.GPT2LMHeadModel(config), _text)


@program("transformers")
def bert_classifier(run: Run) -> Any:
    import transformers

    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=CLASSES))
    return _train(run, model, lambda: {"input_ids": tokens(), "labels": labels()})


@program("transformers")
def t5(run: Run) -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return _train(run, transformers.T5ForConditionalGeneration(config), _text)


@program("transformers")
def vit_of_transformers(run: Run) -> Any:
    import transformers

    sizes = {name: value for name, value in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=CLASSES)
    return _train(
        run, transformers.ViTForImageClassification(config), lambda: {"pixel_values": images(), "labels": labels()}
    )


@program("transformers")
def mixtral(run: Run) -> Any:
    import transformers

    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=1, num_local_experts=4, use_cache=False, output_router_logits=True
    )
    return _train(run, transformers.MixtralForCausalLM(config), _text)


@program("transformers")
def whisper(run: Run) -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=4, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return _train(run, model, lambda: {"input_features": torch.randn(ROWS, 4, 20), "labels": tokens()})


class Texts(torch.utils.data.Dataset):
    """Tokens for a Trainer."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = torch.randint(VOCAB, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": batch, "labels": batch}


def _trainer(run: Run, model: nn.Module, **changes: Any) -> Any:
    import transformers

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            run.end_step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=STEPS, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, logging_steps=4, **changes,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), callbacks=[Steps()])
        run.attach(model)
        run.log(trainer.train().training_loss)
    return model


@program("transformers", "accelerate")
def trainer(run: Run) -> Any:
    return _trainer(run, llama())


@program("transformers", "accelerate")
def trainer_with_accumulation(run: Run) -> Any:
    return _trainer(run, llama(), gradient_accumulation_steps=2, max_grad_norm=0.5, lr_scheduler_type="cosine")


@program("transformers", "accelerate")
def trainer_in_bf16_with_checkpoints(run: Run) -> Any:
    return _trainer(run, llama(), bf16=True, gradient_checkpointing=True)


def _adapted(run: Run, config: Any, model: nn.Module | None = None, prepare=lambda model: None, batch_of=_text) -> Any:
    import peft

    base = llama() if model is None else model
    prepare(base)
    model = peft.get_peft_model(base, config)
    return _train(run, model, batch_of)


@program("peft")
def lora(run: Run) -> Any:
    import peft

    return _adapted(run, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@program("peft")
def lora_with_dropout_everywhere(run: Run) -> Any:
    import peft

    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return _adapted(run, config)


@program("peft")
def dora(run: Run) -> Any:
    import peft

    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    return _adapted(run, config)


@program("peft")
def prefix_tuning(run: Run) -> Any:
    import peft

    return _adapted(run, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@program("peft")
def prompt_tuning(run: Run) -> Any:
    import peft

    return _adapted(run, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@program("peft")
def ia3(run: Run) -> Any:
    import peft

    config = peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    return _adapted(run, config)


@program("peft")
def lora_with_checkpoints(run: Run) -> Any:
    import peft

    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()

    return _adapted(run, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), prepare=prepare)


@program("peft")
def lora_on_a_plain_model(run: Run) -> Any:
    import peft

    model = peft.get_peft_model(mlp(), peft.LoraConfig(r=2, target_modules=["0", "2"]))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program("peft", "accelerate")
def trainer_with_lora(run: Run) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return _trainer(run, peft.get_peft_model(llama(), config))


@program("accelerate")
def accelerate_loop(run: Run) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features(64), labels(64)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    run.attach(model)
    batches = iter(data)
    for _ in run.steps():
        x, y = next(batches)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss)
    return model


def _trl(run: Run, trainer: Any, model: nn.Module) -> Any:
    import transformers

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            run.end_step()

    trainer.add_callback(Steps())
    run.attach(trainer.model)
    run.log(trainer.train().training_loss)
    return model


def _tokenizer() -> Any:
    import tokenizers
    import transformers

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{index}" for index in range(VOCAB - 4))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def _common(folder: str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "max_steps": STEPS, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False, **changes,
    }  # fmt: skip


@program("trl", "datasets")
def sft(run: Run) -> Any:
    import datasets
    import trl

    model = llama()
    data = datasets.Dataset.from_list([{"text": "w1 w2 w3 w4 w5 w6"}] * 32)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.SFTConfig(**_common(folder), max_length=8)
        return _trl(run, trl.SFTTrainer(model, config, train_dataset=data, processing_class=_tokenizer()), model)


@program("trl", "datasets")
def dpo_of_trl(run: Run) -> Any:
    import datasets
    import trl

    model = llama()
    data = datasets.Dataset.from_list([{"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5 w6"}] * 32)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.DPOConfig(**_common(folder), max_length=8)
        return _trl(run, trl.DPOTrainer(model, args=config, train_dataset=data, processing_class=_tokenizer()), model)


def _lightning(run: Run, manual: bool) -> Any:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = mlp(), not manual

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            if manual:
                descend(self.optimizers(), loss)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    class Steps(pytorch_lightning.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            run.end_step()

    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features(64), labels(64)), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pytorch_lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Steps()], default_root_dir=folder, gradient_clip_val=None if manual
            else 1.0,
        )  # fmt: skip
        run.attach(module.net)
        trainer.fit(module, data)
    return module.net


@program("pytorch_lightning")
def lightning(run: Run) -> Any:
    return _lightning(run, manual=False)


@program("pytorch_lightning")
def lightning_by_hand(run: Run) -> Any:
    return _lightning(run, manual=True)


def _timm(run: Run, name: str, size: int, **options: Any) -> Any:
    import timm

    model = timm.create_model(name, num_classes=CLASSES, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(images(2, size=size)), labels(2))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program("timm")
def timm_resnet(run: Run) -> Any:
    return _timm(run, "resnet10t", 32)


@program("timm")
def timm_vit_with_drop_path(run: Run) -> Any:
    return _timm(run, "vit_tiny_patch16_224", 32, img_size=32, embed_dim=24, depth=2, num_heads=2, drop_path_rate=0.1)
