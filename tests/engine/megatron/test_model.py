"""Serving a Megatron-Core GPTModel on its own parameters, between training steps."""

from __future__ import annotations

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ConfigError, ModelError
from engine.megatron.checkpoint import load_checkpoint, save_checkpoint
from engine.megatron.weight_layout import named_weights
from tests.engine.megatron.checkpoints import checkpoint, gpt_for, stored
from tests.support.megatron_models import VOCAB, gpt, loss_of, tokens

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9], [11] * 20, [40]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def serve(gpt_model, **options):
    settings = {"max_num_seqs": 4, "page_size": 16, "graph_manifest": "none"} | options
    return Engine(EngineConfig(**settings), model=gpt_model)


def greedy(model, prompt, count):
    """Generate tokens with Megatron's own forward over the whole text for each token."""
    ids, training = list(prompt), model.training
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
            ids.append(int(logits[0, -1, :VOCAB].argmax()))
    model.train(training)
    return ids[len(prompt) :]


def generate_greedy(engine):
    return [list(output.token_ids) for output in engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)]


@pytest.mark.parametrize("scope", ["layer", "block", "none"])
@pytest.mark.parametrize("model_options", [{}, {"qk_layernorm": True, "tied": True}])
def test_tokens_match_megatrons_forward(scope, model_options):
    model = gpt(**model_options)
    with serve(model, inference_cuda_graph_scope=scope) as engine:
        assert generate_greedy(engine) == [greedy(model, prompt, 12) for prompt in PROMPTS]
        replayed = sum(count for _, count in engine.stats().graphs["replays"])
        assert (replayed > 0) == (scope != "none")
        assert engine.info.architecture == "GPTModel" and engine.info.vocab_size == VOCAB


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_match_the_native_model_with_the_same_weights(tmp_path, tied):
    model = gpt(qk_layernorm=True, tied=tied, layernorm_epsilon=1e-6)
    save_checkpoint(
        model,
        tmp_path,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 64,
            "rope_theta": 10000.0,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
        },
    )
    with (
        serve(model) as megatron_engine,
        Engine(
            EngineConfig(
                model=str(tmp_path), cpu_weight_format="fp32", max_num_seqs=4, page_size=16, graph_manifest="none"
            )
        ) as native_engine,
    ):
        assert generate_greedy(megatron_engine) == generate_greedy(native_engine)


def test_a_model_alternates_training_and_generation_without_copies_or_recapture():
    model, reference = gpt(), gpt()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    engine = serve(model, warmup="full")
    training = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2), pool=engine.pool)
    training.attach(model)
    optimizers = {one: torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, reference)}
    captures = None
    for iteration in range(3):
        for step in range(4):
            for one, optimizer in optimizers.items():
                loss = loss_of(one, *tokens(4 * iteration + step))
                if one is model and step == 3:  # inside a training step, between forward and backward
                    engine.weights_changed(f"round {iteration}")
                    assert generate_greedy(engine) == [greedy(reference, prompt, 12) for prompt in PROMPTS]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if captures is None:
            captures = len(training.graphs()), [row["capture_seconds"] for row in engine.graphs()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert captures == (len(training.graphs()), [row["capture_seconds"] for row in engine.graphs()])
    assert all(row["replays"] >= 9 and row["failed"] == 0 for row in training.graphs())
    assert model.training
    training.detach()
    engine.close()


def test_weights_are_updated_by_hugging_face_names():
    model, other = gpt(), gpt(7)
    with serve(model) as engine:
        before = generate_greedy(engine)
        engine.update_weights(((name, tensor.clone()) for name, tensor in named_weights(other)), version="other")
        assert generate_greedy(engine) == [greedy(other, prompt, 12) for prompt in PROMPTS] != before


def test_padding_tokens_are_never_sampled_and_unpadded_checkpoints_load(tmp_path):
    checkpoint(tmp_path, "qwen3")
    model = gpt_for(tmp_path, vocab_size=128)
    load_checkpoint(model, tmp_path)  # sets padding rows to zero, so their logits exceed those of unlikely tokens
    with serve(model, model=str(tmp_path)) as engine:
        assert engine.info.vocab_size == 96
        params = SamplingParams(max_tokens=30, temperature=1.5, ignore_eos=True)
        sampled = engine.generate(prompt_token_ids=PROMPTS * 2, sampling_params=params)
        assert max(token for output in sampled for token in output.token_ids) < 96
        assert engine.update_weights(stored(tmp_path).items(), version="again") > 0


def test_a_larger_vocabulary_is_rejected(tmp_path):
    checkpoint(tmp_path, "qwen3", vocab_size=200)
    with pytest.raises(ModelError, match="a vocabulary of 200 tokens was given for a model of 96"):
        serve(gpt(), model=str(tmp_path))


def test_closing_restores_the_model():
    model = gpt()
    keys = list(model.state_dict())
    engine = serve(model)
    core = model.decoder.layers[0].self_attention.core_attention
    assert "forward" in vars(core) and list(model.state_dict()) == keys
    with pytest.raises(ModelError, match="serves this model already"):
        serve(model)
    engine.close()
    assert "forward" not in vars(core)
    serve(model).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"softmax_scale": 0.3}, "softmax_scale"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl"),
        ({"fp8": "hybrid"}, "fp8"),
    ],
)
def test_unsupported_settings_are_rejected(changes, message):
    model = gpt()
    for name, value in changes.items():
        object.__setattr__(model.config, name, value)
    with pytest.raises(ModelError, match=message):
        serve(model)


def test_a_pipeline_stage_and_forward_hooks_are_rejected_together():
    model = gpt(post_process=False)
    model.decoder.layers[0].mlp.register_forward_pre_hook(lambda *args: None)
    with pytest.raises(ModelError, match=r"(?s)pipeline.*hooks"):
        serve(model)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"cpu_weight_format": "int4"}, {"quantization": "fp8"}, {"kernels": "fused"}]
)
def test_settings_that_contradict_the_model_are_rejected(options):
    model = gpt()
    with pytest.raises(ConfigError, match=next(iter(options))):
        serve(model, **options)
    serve(model).close()


def test_an_interrupted_warm_up_restores_the_model():
    model = gpt()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    model.decoder.layers[1].mlp.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        serve(model, warmup="full")
    del model.decoder.layers[1].mlp.forward
    serve(model, warmup="full").close()


def test_training_graphs_are_captured_when_every_step_is_followed_by_generation():
    model, reference = gpt(), gpt()
    with serve(model) as engine:
        training = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2), pool=engine.pool)
        training.attach(model)
        for step in range(6):
            for one in (model, reference):
                one.zero_grad()
                loss_of(one, *tokens(step)).backward()
            assert all(
                torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)
            )
            generate_greedy(engine)
        assert all(row["replays"] == 4 and row["eager"]["warming_up"] == 2 for row in training.graphs())
        training.detach()
