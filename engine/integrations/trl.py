"""Use the embedded engine for the rollouts of TRL's GRPOTrainer.

    GRPOTrainer(..., rollout_func=RolloutFunc(engine))

Written for the interface of TRL 1.16 (`rollout_func`, experimental there). Imports nothing of TRL.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.protocol.outputs import RequestOutput
from engine.protocol.request import SamplingParams

logger = logging.getLogger(__name__)

WEIGHTS = ("share", "copy")
# Sampling parameters that the adapters set themselves, and why generation_kwargs may not.
RESERVED = {
    "n": "TRL repeats each prompt, and a rollout has one completion per prompt it is given",
    "seed": "all samples of a prompt would be the same; use EngineConfig(seed=…)",
    "logprobs": "TRL takes the log-probability of each sampled token",
}


class RolloutFunc:
    """A `rollout_func` for TRL's GRPOTrainer: generates on `engine`, with the trainer's current weights.

    `weights`: how the engine gets them before each generation.

    - "share": at the first call the trainer's parameters become views of the engine's storage. Nothing is copied
      afterwards. Needs the engine's dtype and device to be the trainer's.
    - "copy": each call copies the trainer's parameters with `update_weights`, which converts dtypes.

    Sampling parameters come from the trainer's GRPOConfig, with its `generation_kwargs`. Raises ConfigError at the
    first call for what the engine can't do: adapters (PEFT), sharded parameters, tools and environments, images.
    """

    def __init__(self, engine: Engine, *, weights: str = "share"):
        if weights not in WEIGHTS:
            raise ConfigError(f"weights={weights!r} is not one of {', '.join(WEIGHTS)}")
        self.engine, self.weights = engine, weights
        self._shared: torch.nn.Module | None = None
        self._is_checked = False

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Generate one completion per prompt; a prompt is a text or a list of messages.

        Returns the lists `prompt_ids`, `completion_ids` and `logprobs`, with an entry per prompt and a value per token.
        """
        model = trainer.accelerator.unwrap_model(trainer.model)
        if not self._is_checked:
            _refuse_unsupported(trainer, model)
            self._say_what_is_dropped(trainer, model)
            self._params = sampling_params(trainer.args, self.engine)
            self._is_checked = True
        self._push(model, f"step-{trainer.state.global_step}")
        outputs = self.engine.generate(
            prompt_token_ids=prompt_ids(prompts, trainer), sampling_params=self._params, use_tqdm=False
        )
        check_finished(outputs)
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [output.token_ids for output in outputs],
            "logprobs": [logprobs_of(output) for output in outputs],
        }

    def _push(self, model: torch.nn.Module, version: str) -> None:
        """Give the engine the model's weights. Also at an unchanged step, since a checkpoint may have been loaded."""
        if self.weights == "copy":
            self.engine.update_weights(model.named_parameters(), version=version)
        elif self._shared is model:
            self.engine.weights_changed(version)
        else:
            self.engine.share_weights(model, version=version)
            self._shared = model

    def _say_what_is_dropped(self, trainer: Any, model: torch.nn.Module) -> None:
        if getattr(trainer, "use_vllm", False):
            return
        found, own = next(model.parameters()).dtype, self.engine.info.dtype
        remark = "is" if str(found) == f"torch.{own}" else "is not"
        logger.warning(
            "TRL applies no importance correction to a rollout_func's log-probabilities unless use_vllm=True, which "
            "needs vllm: a difference between the engine and the trainer's forward goes into the gradient uncorrected. "
            "Give both one dtype; the engine's (%s) %s the trainer's (%s)",
            own, remark, str(found).removeprefix("torch."),
        )  # fmt: skip


def _refuse_unsupported(trainer: Any, model: torch.nn.Module) -> None:
    """Raise ConfigError for a trainer whose rollouts would be wrong."""
    if hasattr(model, "peft_config"):
        raise ConfigError("the trainer has a PEFT model, whose adapters the engine doesn't apply: train all weights")
    if any(hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            "the trainer's parameters are sharded (FSDP or DeepSpeed ZeRO-3), and the engine needs whole ones: "
            "use DDP, with an engine per process"
        )
    for name in ("tools", "environment_factories"):
        if getattr(trainer, name, None):
            raise ConfigError(f"{name}: TRL itself generates the turns after a tool call, without this engine")


def prompt_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Return the token ids of texts, or of conversations in the trainer's chat template."""
    options = {"chat_template": getattr(trainer, "chat_template", None)} | (trainer.args.chat_template_kwargs or {})
    return [encode(prompt, trainer.processing_class, options) for prompt in prompts]


def encode(prompt: Any, processing_class: Any, chat_options: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a text, or of messages with the beginning of an answer. Refuses images by ConfigError."""
    if isinstance(prompt, str):
        return list(processing_class(text=prompt)["input_ids"])
    for message in prompt:
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise ConfigError(f"a prompt has parts other than text: {sorted({part.get('type') for part in content})}")
    encoded = processing_class.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_options
    )
    return list(encoded["input_ids"])


def sampling_params(args: Any, engine: Engine) -> SamplingParams:
    """Return the sampling parameters of a GRPOConfig or AsyncGRPOConfig, with its `generation_kwargs`.

    Raises ConfigError, or warns, if log-probabilities of the engine's `logprobs_mode` aren't those that TRL computes:
    of the whole vocabulary, with the logits divided by the temperature.
    """
    extra = dict(getattr(args, "generation_kwargs", None) or {})
    for name, reason in RESERVED.items():
        if name in extra:
            raise ConfigError(f"generation_kwargs has {name!r}: {reason}")
    values = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "logprobs": 0,
    }
    params = SamplingParams.from_dict(values | extra)
    mode = engine.info.logprobs_mode
    if mode == "raw" and params.temperature != 1.0:
        raise ConfigError(
            f"logprobs_mode='raw' leaves out the temperature {params.temperature:g}, by which TRL divides: use "
            "EngineConfig(logprobs_mode='processed')"
        )
    is_cut = params.top_p < 1.0 or params.top_k or params.min_p or params.is_constrained
    if mode == "processed" and (is_cut or params.has_penalties or params.logit_bias):
        logger.warning(
            "log-probabilities are of the distribution after top_p, top_k, min_p, penalties and masks, and TRL's are "
            "of the whole vocabulary: ratios of the two are off. Sample from the whole vocabulary, or at temperature 1 "
            "use EngineConfig(logprobs_mode='raw')"
        )
    return params


def check_finished(outputs: Sequence[RequestOutput]) -> None:
    """Raise EngineError if a sequence failed or was aborted, so that none is trained on as if it had ended."""
    for output in outputs:
        for one in output.outputs:
            if one.finish_reason not in ("stop", "length") or not one.token_ids:
                raise EngineError(
                    f"a rollout ended as {one.finish_reason!r} after {len(one.token_ids)} tokens: {one.error}"
                )


def logprobs_of(output: Any) -> list[float]:
    """Return the log-probability of each generated token of a RequestOutput or CompletionOutput."""
    return [entry.logprob for entry in output.logprobs]
