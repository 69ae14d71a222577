"""The engine serves a GPTModel of Megatron-Core on the model's own parameters, between a trainer's steps."""

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


def serve(hosted, **options):
    settings = {"max_num_seqs": 4, "page_size": 16, "graph_manifest": "none"} | options
    return Engine(EngineConfig(**settings), model=hosted)


def greedy(model, prompt, count):
    """Tokens by Megatron's own forward over the whole text each time."""
    ids, training = list(prompt), model.training
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
            ids.append(int(logits[0, -1, :VOCAB].argmax()))
    model.train(training)
    return ids[len(prompt) :]


def generated(engine):
    return [list(output.token_ids) for output in engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)]


@pytest.mark.parametrize("scope", ["layer", "block", "none"])
@pytest.mark.parametrize("kind", [{}, {"qk_layernorm": True, "tied": True}])
def test_tokens_are_those_of_megatrons_own_forward(scope, kind):
    model = gpt(**kind)
    with serve(model, inference_cuda_graph_scope=scope) as engine:
        assert generated(engine) == [greedy(model, prompt, 12) for prompt in PROMPTS]
        replayed = sum(count for _, count in engine.stats().graphs["replays"])
        assert (replayed > 0) == (scope != "none")
        assert engine.info.architecture == "GPTModel" and engine.info.vocab_size == VOCAB


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_are_those_of_our_native_model_with_the_same_weights(tmp_path, tied):
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
        serve(model) as hosted,
        Engine(
            EngineConfig(
                model=str(tmp_path), cpu_weight_format="fp32", max_num_seqs=4, page_size=16, graph_manifest="none"
            )
        ) as native,
    ):
        assert generated(hosted) == generated(native)


def test_one_model_trains_generates_and_trains_on_without_a_copy_or_a_recapture():
    model, alone = gpt(), gpt()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    engine = serve(model, warmup="full")
    training = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2), pool=engine.pool)
    training.attach(model)
    optimizers = {one: torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, alone)}
    captures = None
    for round_ in range(3):
        for step in range(4):
            for one, optimizer in optimizers.items():
                loss = loss_of(one, *tokens(4 * round_ + step))
                if one is model and step == 3:  # in the middle of a step, between forward and backward
                    engine.weights_changed(f"round {round_}")
                    assert generated(engine) == [greedy(alone, prompt, 12) for prompt in PROMPTS]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if captures is None:
            captures = len(training.graphs()), [row["capture_seconds"] for row in engine.graphs()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert captures == (len(training.graphs()), [row["capture_seconds"] for row in engine.graphs()])
    assert all(row["replays"] >= 9 and row["failed"] == 0 for row in training.graphs())
    assert model.training
    training.detach()
    engine.close()


def test_weights_are_updated_by_their_hugging_face_names():
    model, other = gpt(), gpt(7)
    with serve(model) as engine:
        before = generated(engine)
        engine.update_weights(((name, tensor.clone()) for name, tensor in named_weights(other)), version="other")
        assert generated(engine) == [greedy(other, prompt, 12) for prompt in PROMPTS] != before


def test_a_padded_vocabularys_tokens_are_never_drawn_and_its_checkpoints_fit(tmp_path):
    checkpoint(tmp_path, "qwen3")
    model = gpt_for(tmp_path, vocab_size=128)
    load_checkpoint(model, tmp_path)  # which leaves the padding at zero: better than any token that is unlikely
    with serve(model, model=str(tmp_path)) as engine:
        assert engine.info.vocab_size == 96
        params = SamplingParams(max_tokens=30, temperature=1.5, ignore_eos=True)
        drawn = engine.generate(prompt_token_ids=PROMPTS * 2, sampling_params=params)
        assert max(token for output in drawn for token in output.token_ids) < 96
        assert engine.update_weights(stored(tmp_path).items(), version="again") > 0


def test_the_vocabulary_of_another_model_is_refused(tmp_path):
    checkpoint(tmp_path, "qwen3", vocab_size=200)
    with pytest.raises(ModelError, match="a vocabulary of 200 tokens was given for a model of 96"):
        serve(gpt(), model=str(tmp_path))


def test_closing_gives_the_model_back_as_it_was():
    model = gpt()
    keys = list(model.state_dict())
    engine = serve(model)
    core = model.decoder.layers[0].self_attention.core_attention
    assert "forward" in vars(core) and list(model.state_dict()) == keys
    with pytest.raises(ModelError, match="hosted already"):
        serve(model)
    engine.close()
    assert "forward" not in vars(core)
    serve(model).close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"softmax_scale": 0.3}, "softmax_scale"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl"),
        ({"fp8": "hybrid"}, "fp8"),
    ],
)
def test_what_the_engine_would_compute_otherwise_is_refused(changes, says):
    model = gpt()
    for name, value in changes.items():
        object.__setattr__(model.config, name, value)
    with pytest.raises(ModelError, match=says):
        serve(model)


def test_a_stage_of_a_pipeline_and_forward_hooks_are_refused_together():
    model = gpt(post_process=False)
    model.decoder.layers[0].mlp.register_forward_pre_hook(lambda *args: None)
    with pytest.raises(ModelError, match=r"(?s)pipeline.*hooks"):
        serve(model)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"cpu_weight_format": "int4"}, {"kernels": "fused"}])
def test_settings_that_contradict_the_model_are_refused(options):
    model = gpt()
    with pytest.raises(ConfigError, match=next(iter(options))):
        serve(model, **options)
    serve(model).close()


def test_an_engine_that_is_interrupted_while_it_warms_up_gives_the_model_back():
    model = gpt()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    model.decoder.layers[1].mlp.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        serve(model, warmup="full")
    del model.decoder.layers[1].mlp.forward
    serve(model, warmup="full").close()


def test_training_graphs_come_also_where_a_model_generates_after_every_step():
    model, alone = gpt(), gpt()
    with serve(model) as engine:
        training = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2), pool=engine.pool)
        training.attach(model)
        for step in range(6):
            for one in (model, alone):
                one.zero_grad()
                loss_of(one, *tokens(step)).backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
            generated(engine)
        assert all(row["replays"] == 4 and row["eager"]["warming_up"] == 2 for row in training.graphs())
        training.detach()
