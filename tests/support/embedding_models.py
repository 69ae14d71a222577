"""Tiny random folders for embeddings and reranking, in the layouts of published models, and their references."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
QUERY = "Instruct: find it\nQuery: "
RERANKER_TEMPLATE = (
    "<|im_start|>{{ (messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first)"
    " | default('match', true) }}: "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    " / {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>"
    "{{ '+' if add_generation_prompt }}"
)


def write_folder(tiny: Path, folder: Path, kind: str = "Qwen3Model", seed: int = 0, **config: Any) -> Path:
    """Save a random model of a transformers class, and the tiny model's tokenizer, which ends texts with <|im_end|>."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    for path in tiny.glob("*token*"):
        shutil.copy(path, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    end = next(one for one in tokenizer["added_tokens"] if one["content"] == "<|im_end|>")
    sequence = lambda name: {"Sequence": {"id": name, "type_id": 0}}  # noqa: E731
    special = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [sequence("A"), special],
        "pair": [sequence("A"), sequence("B"), special],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [end["id"]], "tokens": ["<|im_end|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    architecture = getattr(transformers, kind)
    values = architecture.config_class(**SIZES | config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        architecture(values).to(torch.float32).save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    """Write modules.json with sentence-transformers' modules, and the configuration of the pooling."""
    modules = []
    for index, kind in enumerate(kinds):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        if kind == "Pooling":
            modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
            values = {"word_embedding_dimension": SIZES["hidden_size"], **modes} | (pooling or {})
            (folder / path / "config.json").write_text(json.dumps(values))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None})
    )


class EmbeddingReference:
    """Vectors of transformers' hidden states, one text at a time. Shares no code with the engine."""

    def __init__(self, folder: Path, mode: str = "last", normalize: bool = True):
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.mode, self.normalize = mode, normalize

    @torch.inference_mode()
    def vector(
        self, text: str | Sequence[int], dimensions: int | None = None, normalize: bool | None = None
    ) -> np.ndarray:
        ids = self.tokenizer(text)["input_ids"] if isinstance(text, str) else list(text)
        hidden = self.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        vector = (hidden[-1] if self.mode == "last" else hidden.mean(0))[:dimensions]
        if self.normalize if normalize is None else normalize:
            vector = torch.nn.functional.normalize(vector, dim=0)
        return vector.numpy()


class HeadReference:
    """Scores of transformers' sequence classification, one pair at a time."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, *texts: str, special: bool = True) -> torch.Tensor:
        return self.model(**self.tokenizer(*texts, return_tensors="pt", add_special_tokens=special)).logits[0]


class TokenReference:
    """Scores of two tokens' logits after a prompt, as the model card of Qwen3-Reranker computes them."""

    def __init__(self, folder: Path, no: int, yes: int):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.no, self.yes = no, yes

    @torch.inference_mode()
    def score(self, prompt: str) -> float:
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        logits = self.model(ids).logits[0, -1]
        return float(torch.stack([logits[self.no], logits[self.yes]]).softmax(0)[1])
