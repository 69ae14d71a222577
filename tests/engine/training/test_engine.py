"""The engine in training mode, and weight sharing: one process trains and generates from the same storage."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ConfigError, WeightUpdateError
from engine.models import build_model, config_from_dict
from tests.contract.training_models import assert_same, batches, train, twins

WIDTH = 32


def training(**settings):
    return Engine(EngineConfig(mode="training", cuda_graph_impl="local", cuda_graph_warmup_steps=2, **settings))


class Layered(nn.Module):
    """A small model that maps Megatron's module names to its submodules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": nn.Linear(WIDTH, WIDTH), "mlp": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)
        )

    def cuda_graph_modules(self):
        return {
            "layer": ["layers.0", "layers.1"],
            "attn": [f"layers.{i}.attn" for i in range(2)],
            "mlp": [f"layers.{i}.mlp" for i in range(2)],
        }

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer["attn"](x))
            x = x + F.gelu(layer["mlp"](x))
        return x


def steps(model, count):
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(count):
        loss = model(torch.randn(4, WIDTH)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_attn_module_captures_only_attention():
    torch.manual_seed(0)
    eager = Layered()
    graphed = copy.deepcopy(eager)
    engine = training(cuda_graph_modules=("attn",))
    assert engine.attach(graphed) == ["layers.0.attn", "layers.1.attn"]
    assert steps(graphed, 6) == steps(eager, 6)
    rows = {row["module"]: row for row in engine.graphs()}
    assert set(rows) == {"layers.0.attn", "layers.1.attn"}
    assert all(row["replays"] == 4 and row["eager"] == {"warming_up": 2} for row in rows.values())
    assert "forward" not in vars(graphed.layers[0]["mlp"])
    engine.detach()
    assert "forward" not in vars(graphed.layers[0]["attn"])
    assert steps(graphed, 2) == steps(eager, 2)


def test_a_wrapper_whose_buffers_is_a_list_is_attached():
    """Megatron's DistributedDataParallel has an attribute of this name."""
    model, engine = Layered(), training(cuda_graph_modules=("attn",))
    model.buffers = [torch.zeros(2)]
    assert engine.attach(model) == ["layers.0.attn", "layers.1.attn"]
    engine.detach()


class Decoder(nn.Module):
    """Layers with two captured submodules each, with dropout; norms and residuals stay eager."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

        def forward(self, x):
            rows, length, _ = x.shape
            q, k, v = self.qkv(x).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.drop(self.out(attended.transpose(1, 2).reshape(x.shape)))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": self.Attention(),
                    "norm": nn.LayerNorm(WIDTH),
                    "mlp": nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)),
                }
            )
            for _ in range(3)
        )

    def cuda_graph_modules(self):
        return {name: [f"layers.{index}.{name}" for index in range(3)] for name in ("attn", "mlp")}

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["attn"](x)
            x = x + layer["mlp"](layer["norm"](x))
        return x


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
        ),
    ],
)
@pytest.mark.parametrize("names", [("attn",), ("mlp",), ("attn", "mlp")], ids="_".join)
def test_ten_steps_of_captured_submodules_with_two_microbatches_in_flight_equal_eager(device, names):
    eager, graphed = twins(Decoder, torch.device(device))
    data = batches(10, torch.device(device))
    expected = train(eager, data)
    with training(cuda_graph_modules=names) as engine:
        paths = engine.attach(graphed)
        assert paths == [f"layers.{index}.{name}" for name in names for index in range(3)]
        assert_same(train(graphed, data), expected)
        rows = {row["module"]: row for row in engine.graphs()}
        assert set(rows) == set(paths)
        # One instance per microbatch; each replays in all steps except the two of the warm-up.
        assert all(
            (row["graphs"], row["replays"], row["failed"], row["eager"]) == (2, 16, 0, {"warming_up": 4})
            for row in rows.values()
        )
        replaced = {path for path, module in graphed.named_modules() if "forward" in vars(module)}
        assert replaced == set(paths)
    assert len(expected[0]) == 2 + len(list(eager.parameters()))
    assert_same(train(graphed, data[:2]), train(eager, data[:2]))


def test_a_model_without_a_mapping_is_captured_whole_and_refuses_names():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    engine = training()
    assert engine.attach(model) == ["Sequential"]
    engine.detach()
    with pytest.raises(ConfigError, match="cuda_graph_modules"):
        training(cuda_graph_modules=("attn",)).attach(model)
    with pytest.raises(ConfigError, match="no submodule 'nope'"):
        training().attach(model, modules=["nope"])


def test_built_in_models_define_the_mapping():
    config = config_from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 64,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
        }
    )
    model = build_model(config, torch.float32, "cpu")
    for paths in model.cuda_graph_modules().values():
        assert all(isinstance(model.get_submodule(path), nn.Module) for path in paths)


def test_training_mode_rejects_unsupported_calls_and_settings():
    engine = training()
    with pytest.raises(ConfigError, match="mode 'training'"):
        engine.generate(prompts=["a"])
    with pytest.raises(ConfigError, match="NaN|nan"):
        from graph_cache.adapters.megatron.config import MegatronGraphConfig as GraphConfig
        from graph_cache.errors import GraphConfigError

        try:
            GraphConfig(cuda_graph_impl="full_iteration", check_for_nan_in_loss_and_grad=True)
        except GraphConfigError as error:
            raise ConfigError(str(error)) from error
    with pytest.raises(ConfigError, match="full_iteration"):
        Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration")).attach(nn.Linear(2, 2))


def test_the_engine_captures_a_whole_iteration():
    torch.manual_seed(0)
    eager = Layered()
    graphed = copy.deepcopy(eager)

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        return step

    engine = Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=2))
    step, plain = engine.capture_iteration(make(graphed), device="cpu"), make(eager)
    generator = torch.Generator().manual_seed(4)
    for _ in range(8):
        x = torch.randn(4, WIDTH, generator=generator)
        assert torch.equal(step(x), plain(x))
    assert engine.graphs()[0]["replays"] >= 3
    engine.detach()


@pytest.fixture
def llama(tmp_path):
    """A tiny float32 Llama of transformers, and its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            attn_implementation="eager",
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(tmp_path / "model")
    return model, str(tmp_path / "model")


def inference(folder, **settings):
    return Engine(
        EngineConfig(
            model=folder,
            device="cpu",
            cpu_weight_format="fp32",
            max_num_seqs=2,
            warmup="full",
            num_threads=1,
            graph_manifest="none",
            **settings,
        )
    )


GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 44, 7], [3, 80, 12]]


def test_shared_weights_train_and_generate_without_recapture(llama):
    trainer, folder = llama
    with inference(folder) as engine:
        assert engine.share_weights(trainer, version="step-0") == len(list(trainer.parameters()))
        addresses = {name: parameter.data_ptr() for name, parameter in trainer.named_parameters()}
        trainer_graphs = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2), pool=engine.pool)
        trainer_graphs.attach(trainer, modules=[f"model.layers.{i}.mlp" for i in range(2)])
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
        tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
        captures, outputs = None, []
        for step in range(6):
            loss = trainer(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            seen = engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)  # between forward and backward
            loss.backward()
            optimizer.step()
            engine.weights_changed(f"step-{step + 1}")
            outputs.append([output.token_ids for output in seen])
            captures = captures or dict(engine.stats().graphs["captures"])
        assert dict(engine.stats().graphs["captures"]) == captures
        assert {name: parameter.data_ptr() for name, parameter in trainer.named_parameters()} == addresses
        assert sum(row["replays"] for row in trainer_graphs.graphs()) == 8
        after = engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)
        assert after[0].weight_version == "step-6"
        expected = [
            trainer.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]
        assert [output.token_ids for output in after] == expected
        trainer_graphs.detach()


def test_interleaved_generation_does_not_change_gradients(llama):
    trainer, folder = llama
    twin = copy.deepcopy(trainer)
    with inference(folder) as engine:
        engine.share_weights(trainer, version="0")
        graphs = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=1), pool=engine.pool)
        graphs.attach(trainer, modules=[f"model.layers.{i}.mlp" for i in range(2)])
        tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            for model in (trainer, twin):
                model.zero_grad()
                loss = model(input_ids=tokens, labels=tokens).loss
                if model is trainer:
                    engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)
                loss.backward()
            for (name, one), other in zip(trainer.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad), name
        assert sum(row["replays"] for row in graphs.graphs()) == 6
        graphs.detach()


OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
}


def shared_steps(trainer, optimizer, first, count, between=None):
    """Train steps with two microbatches in flight; return losses, gradients, parameters and optimizer state."""
    log = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        losses = [
            trainer(input_ids=tokens, labels=tokens).loss
            for tokens in torch.randint(3, 96, (2, 2, 16), generator=generator)
        ]
        if between is not None:
            between()
        for loss in losses:
            loss.backward()
        log.append(
            [
                *(loss.detach().clone() for loss in losses),
                *(parameter.grad.clone() for parameter in trainer.parameters()),
            ]
        )
        optimizer.step()
        states = [value for parameter in trainer.parameters() for value in optimizer.state[parameter].values()]
        log[-1] += [tensor.detach().clone() for tensor in (*trainer.parameters(), *states)]
    return log


@pytest.mark.parametrize("attached_first", [False, True], ids=["shared_then_attached", "attached_then_shared"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stateful_optimizer_continues_unchanged_on_shared_weights(llama, name, attached_first):
    trainer, folder = llama
    twin = copy.deepcopy(trainer)
    optimizer, other = (OPTIMIZERS[name](model.parameters()) for model in (trainer, twin))
    with inference(folder) as engine:
        graphs = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2), pool=engine.pool)
        paths = [f"model.layers.{index}.mlp" for index in range(2)]
        if attached_first:
            graphs.attach(trainer, modules=paths)
        assert_same(shared_steps(trainer, optimizer, 0, 4), shared_steps(twin, other, 0, 4))
        engine.share_weights(trainer, version="shared")
        addresses = [parameter.data_ptr() for parameter in trainer.parameters()]
        if not attached_first:
            graphs.attach(trainer, modules=paths)
        captures, replays = dict(engine.stats().graphs["captures"]), dict(graphs.stats.replays)

        def generate():  # must not overwrite the activations that the forwards saved
            engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)

        assert_same(shared_steps(trainer, optimizer, 4, 10, generate), shared_steps(twin, other, 4, 10))
        engine.weights_changed("trained")
        assert [parameter.data_ptr() for parameter in trainer.parameters()] == addresses
        assert dict(engine.stats().graphs["captures"]) == captures
        assert graphs.stats.invalidations == ({"stale_address": 1} if attached_first else {})
        assert sum(graphs.stats.replays.values()) - sum(replays.values()) >= 7 * 2 * len(paths)
        seen = engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)
        expected = [
            twin.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]
        assert [output.token_ids for output in seen] == expected
        graphs.detach()


def test_quantised_and_mismatched_models_cannot_share_weights(llama, tmp_path):
    trainer, folder = llama
    with inference(folder) as engine:
        trainer.lm_head.weight.data = trainer.lm_head.weight.data[:50]
        before = trainer.model.norm.weight.data_ptr()
        with pytest.raises(WeightUpdateError, match="lm_head.weight: shape"):
            engine.share_weights(trainer, version="1")
        assert trainer.model.norm.weight.data_ptr() == before
    quantised = EngineConfig(
        model=folder, device="cpu", cpu_weight_format="int4", max_num_seqs=1, num_threads=1, graph_manifest="none"
    )
    with Engine(quantised) as engine, pytest.raises(WeightUpdateError, match="quantised"):
        engine.share_weights(trainer, version="1")


def test_an_unknown_argument_names_the_nearest_one():
    with training() as engine, pytest.raises(TypeError, match="no argument 'moduls'; did you mean 'modules'"):
        engine.attach(Layered(), moduls=["layers.0.attn"])


def test_attach_takes_modules_only():
    with training() as engine, pytest.raises(ConfigError, match="takes a module, or a list of modules; found 'model'"):
        engine.attach(["model"])


@pytest.mark.parametrize("masked", (True, False), ids=("mask_of_four_dimensions", "no_mask"))
def test_an_iteration_over_a_model_of_transformers_replays_with_a_mask_from_outside(masked):
    from transformers import LlamaConfig, LlamaForCausalLM

    length = 6
    positions = torch.arange(length).repeat(2, 1)
    mask = torch.full((length, length), float("-inf")).triu(1).repeat(2, 1, 1, 1) if masked else None

    def run(engine):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32,
                hidden_size=WIDTH,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                use_cache=False,
            )
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(ids, mask, positions):
            loss = model(input_ids=ids, labels=ids, attention_mask=mask, position_ids=positions).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = step if engine is None else engine.capture_iteration(step, device="cpu")
        return [call(torch.randint(32, (2, length)), mask, positions).item() for _ in range(6)]

    with training() as engine:
        assert run(engine) == run(None)
        (row,) = engine.graphs()
    if masked:
        assert row["replays"] == 2 and not row["failure"]
    else:
        assert not row["replays"] and "Pass a mask of four dimensions" in row["failure"]
