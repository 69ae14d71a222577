"""Packed sequences padded to a fixed number of documents replay for every batch and equal eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn
from torch.utils import _pytree

from engine import Engine, EngineConfig
from engine.errors import ConfigError
from graph_cache.adapters.megatron.attachment import attachment
from graph_cache.adapters.megatron.packed import PACKED_ARGUMENT, padded, register_packed_sequences, tokens_of
from graph_cache.adapters.megatron.packed_rotary import DeviceRotary
from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from graph_cache.errors import GraphConfigError
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.modules import TrainingGraphs
from tests.support.megatron_models import gpt, tokens

LENGTH = 128
DOCUMENTS = [3, 60, 17, 5, 42, 60, 8, 29, 54, 11]  # for ten steps


class PackedCore(nn.Module):
    """Causal attention within each document in format thd: [t, heads, d] -> [t, heads * d]. No host reads."""

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        at = torch.arange(len(query), dtype=torch.int32)
        document = torch.searchsorted(packed_seq_params.cu_seqlens_q, at, right=True)
        seen = (document[:, None] == document) & (at[:, None] >= at)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), seen, enable_gqa=True
        )
        return out.transpose(0, 1).flatten(1)


def rotary_of_documents(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False):
    """Replaces Transformer Engine's kernel, which reads lengths on the device. Positions restart in each document."""
    at = torch.arange(len(t), dtype=torch.int32)
    angles = freqs[(at - cu_seqlens[torch.searchsorted(cu_seqlens, at, right=True) - 1]).long(), 0]
    left, right = t.chunk(2, -1)
    return t * angles.cos() + torch.cat((-right, left), -1) * angles.sin()


@pytest.fixture(autouse=True)
def fused_rotary(monkeypatch):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", rotary_of_documents)


def model_of(seed=0, **options):
    model = gpt(seed, **{"apply_rope_fusion": True} | options)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = PackedCore()
    return model


def packed_of(documents, seed=0, length=LENGTH):
    """Pack documents of uneven lengths, with one tensor for queries and keys, as Megatron's data sets do."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: documents - 1] + 1
    ends = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([length])]).int()
    longest = int(ends.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def training(**options):
    return Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2, **options))


def train(chunks, documents, microbatches=1, pack=packed_of):
    """Return losses and all gradients of each step. Chunks run as pipeline stages: only the first gets tokens."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer, log = torch.optim.SGD(parameters, lr=0.1, momentum=0.9), []
    for step, count in enumerate(documents):
        optimizer.zero_grad()
        losses = []
        for micro in range(microbatches):
            ids, positions = tokens(10 * step + micro, batch=1, length=LENGTH)
            packed, hidden = pack(count, 10 * step + micro), None
            for index, chunk in enumerate(chunks):
                chunk.set_input_tensor([hidden])
                inputs = (ids, positions) if index == 0 else (None, None)
                labels = ids.roll(-1, 1) if index == len(chunks) - 1 else None
                hidden = chunk(*inputs, None, labels=labels, packed_seq_params=packed)
            losses.append(hidden.mean())
        for loss in losses:
            loss.backward()
        log.append([*[loss.detach().clone() for loss in losses], *[one.grad.clone() for one in parameters]])
        optimizer.step()
    return log


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["layers", "attn"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_batches_of_any_number_of_documents_replay_and_equal_eager_bit_for_bit(modules, microbatches):
    expected = train([model_of()], DOCUMENTS, microbatches)
    model = model_of()
    with training(cuda_graph_modules=list(modules)) as engine:
        engine.attach(model, packed_documents=60)
        assert_same(train([model], DOCUMENTS, microbatches), expected)
        for row in engine.graphs():
            assert (row["graphs"], row["replays"], row["failed"]) == (microbatches, 8 * microbatches, 0)
            assert row["eager"] == {"warming_up": 2 * microbatches}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_unfused_rotary_positions_replay_and_equal_eager_bit_for_bit(microbatches):
    own = rope_utils._apply_rotary_pos_emb_thd  # noqa: SLF001
    expected = train([model_of(apply_rope_fusion=False)], [1, *DOCUMENTS], microbatches)
    model = model_of(apply_rope_fusion=False)
    with training() as engine:
        engine.attach(model, packed_documents=60)
        assert_same(train([model], [1, *DOCUMENTS], microbatches), expected)
        for row in engine.graphs():
            assert (row["replays"], row["failed"]) == (9 * microbatches, 0)
    assert rope_utils._apply_rotary_pos_emb_thd is own  # noqa: SLF001
    assert_same(train([model_of(apply_rope_fusion=False)], DOCUMENTS[:1]), train([model_of()], DOCUMENTS[:1]))


# ---- context parallelism ---------------------------------------------------------------------------------------------


class Ranks:
    """Size and rank of a process group; nothing here communicates."""

    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def spread_over(ranks, documents, seed=0, chunk=2):
    """Pack documents whose lengths are multiples of 2 * ranks, as context parallelism needs. The last one is long."""
    lengths = 2 * ranks * torch.randint(1, 1 + chunk, (documents,), generator=torch.Generator().manual_seed(seed))
    lengths[-1] += ranks * LENGTH - lengths.sum()
    ends = torch.cat([torch.tensor([0]), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_positions_on_each_rank_equal_megatrons_bit_for_bit(ranks, is_absolute):
    packed = spread_over(ranks, 9)
    freqs = torch.randn(ranks * LENGTH + (not is_absolute), 1, 1, 8)
    for rank in range(ranks):
        t, group = torch.randn(LENGTH, 2, 8), Ranks(ranks, rank)
        expected = rope_utils._apply_rotary_pos_emb_thd(t, packed.cu_seqlens_q, freqs, cp_group=group)  # noqa: SLF001
        ends = padded(packed, 12, ranks * LENGTH).cu_seqlens_q
        assert_same(DeviceRotary()(t, ends, freqs, cp_group=group), expected)


class SpreadCore(PackedCore):
    """Attention of this rank's tokens to each other: the other ranks' keys take no part in what is tested."""

    def forward(self, *args, packed_seq_params=None, **kwargs):
        local = copy.copy(packed_seq_params)
        local.cu_seqlens_q = packed_seq_params.cu_seqlens_q // 2
        return super().forward(*args, packed_seq_params=local, **kwargs)


@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel_batches_replay_and_equal_eager_bit_for_bit(rank):
    """cu_seqlens count the tokens of both ranks, so their last entry exceeds the tokens of this one."""

    def make():
        model = model_of(apply_rope_fusion=False)
        object.__setattr__(model.config, "context_parallel_size", 2)
        for layer in model.decoder.layers:
            layer.self_attention.core_attention = SpreadCore()
            layer.self_attention.pg_collection = copy.copy(layer.self_attention.pg_collection)
            layer.self_attention.pg_collection.cp = Ranks(2, rank)
        return model

    def pack(documents, seed):
        return spread_over(2, documents % 25 + 1, seed)

    expected, model = train([make()], DOCUMENTS, pack=pack), make()
    seen = []
    with training() as engine:
        engine.attach(model, packed_documents=30)
        handle = model.decoder.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs[PACKED_ARGUMENT]), with_kwargs=True
        )
        assert_same(train([model], DOCUMENTS, pack=pack), expected)
        handle.remove()
        assert all((row["replays"], row["failed"]) == (8, 0) for row in engine.graphs())
    assert all(len(one.cu_seqlens_q) == 31 and one.max_seqlen_q == 2 * LENGTH for one in seen)


@pytest.mark.parametrize("first", [0, 1])
def test_engines_that_are_detached_in_any_order_restore_megatrons_function(first):
    own, engines = rope_utils._apply_rotary_pos_emb_thd, [training(), training()]  # noqa: SLF001
    for engine in engines:
        engine.attach(model_of(apply_rope_fusion=False), packed_documents=9)
    assert rope_utils._apply_rotary_pos_emb_thd is not own  # noqa: SLF001
    engines[first].detach()
    assert rope_utils._apply_rotary_pos_emb_thd is not own  # noqa: SLF001
    engines[1 - first].detach()
    assert rope_utils._apply_rotary_pos_emb_thd is own  # noqa: SLF001


def test_layers_share_one_set_of_cu_seqlens():
    """Lengths 7 and 5 in a bin of 32: one graph per layer, one buffer for cu_seqlens and one for the padded ones."""
    model, stats = model_of(), CacheStats()
    config = EngineConfig(mode="training").megatron_graph_config()
    graphs = TrainingGraphs(CaptureContext(GraphPool(backend_for("cpu")), stats), warmup_rounds=1)
    graphs.attach(attachment([model], config))
    ids, positions = tokens(0, batch=1, length=32)
    for _ in range(4):
        ends, ends_padded = torch.tensor([0, 7, 12]).int(), torch.tensor([0, 7, 32]).int()
        packed = PackedSeqParams("thd", ends, ends, ends_padded, ends_padded, max_seqlen_q=32, max_seqlen_kv=32)
        model(ids, positions, None, labels=ids, packed_seq_params=padded(packed, 4, 32)).sum().backward()
    assert sum(stats.replays.values()) == 3 * 2
    (recorded,) = graphs.recorded_steps
    entries = recorded.entries()
    assert len(entries) == 2
    buffers = [{one.data_ptr() for one in entry.graphs.inputs if one.dtype == torch.int32} for entry in entries]
    assert buffers[0] == buffers[1] and len(buffers[0]) == 2
    graphs.detach()


def test_the_option_of_the_configuration_pads_as_packed_documents_does():
    expected, model = train([model_of()], DOCUMENTS), model_of()
    arguments = {"cuda_graph_impl": "local", "cuda_graph_packed_seq": True, "cuda_graph_max_packed_seqs": 60}
    with Engine(EngineConfig.from_megatron(arguments, mode="training", cuda_graph_warmup_steps=2)) as engine:
        engine.attach(model)
        assert_same(train([model], DOCUMENTS), expected)
        assert all(row["replays"] == 8 for row in engine.graphs())
    with training(cuda_graph_max_packed_seqs=60) as engine:
        with pytest.raises(ConfigError, match="packed_documents=61 contradicts cuda_graph_max_packed_seqs=60"):
            engine.attach(model, packed_documents=61)
        with pytest.raises(ConfigError, match="cuda_graph_max_packed_seqs=60 pads packed sequences"):
            engine.attach(nn.Linear(2, 2))
        engine.attach(model, packed_documents=60)


def test_without_padding_no_batch_replays():
    model = model_of()
    with training() as engine:
        engine.attach(model)
        assert_same(train([model], DOCUMENTS), train([model_of()], DOCUMENTS))
        assert all(row["replays"] == 0 for row in engine.graphs())


def test_later_pipeline_stages_count_tokens_from_hidden_states():
    def stages():
        return [
            model_of(post_process=False),
            model_of(1, pre_process=False, post_process=False),
            model_of(2, pre_process=False),
        ]

    expected, chunks = train(stages(), DOCUMENTS), stages()
    with training() as engine:
        engine.attach(chunks, packed_documents=64)
        assert_same(train(chunks, DOCUMENTS), expected)
        assert len(engine.graphs()) == 6
        assert all(row["replays"] == 8 and row["eager"] == {"warming_up": 2} for row in engine.graphs())


def test_a_batch_of_more_documents_runs_eager_correctly():
    documents = [*DOCUMENTS[:5], 61, 127, *DOCUMENTS[5:]]
    expected, model = train([model_of()], documents), model_of()
    with training() as engine:
        engine.attach(model, packed_documents=60)
        assert_same(train([model], documents), expected)
        model_row, *layers = sorted(engine.graphs(), key=lambda row: row["module"])
        assert (model_row["module"], model_row["eager"]) == ("GPTModel", {"too_many_documents": 2})
        assert len(layers) == 2
        for row in layers:
            assert row["replays"] == 8 and row["eager"] == {"warming_up": 2, "unseen_signature": 2}


def hooks_of(model):
    return [(list(one._forward_pre_hooks), list(one._forward_pre_hooks_with_kwargs)) for one in model.modules()]


def test_detach_and_refusal_restore_a_wrapped_model():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    model = Wrapper(model_of())
    before, seen = hooks_of(model), []
    model.module.decoder.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    ids, positions = tokens(0, batch=1, length=LENGTH)
    given = [packed_of(3) for _ in range(4)]
    with training() as engine:
        engine.attach(model, packed_documents=9)
        model(ids, positions, None, packed_seq_params=given[0])
        model(ids, positions, None, None, None, None, given[1])  # positional
        engine.detach()
        model(ids, positions, None, packed_seq_params=given[2])
        with pytest.raises(GraphConfigError, match="same module"):
            engine.attach([model, model], packed_documents=9)
        model(ids, positions, None, packed_seq_params=given[3])
    found = [one["packed_seq_params"] for one in seen]
    assert [len(one.cu_seqlens_q) for one in found] == [10, 10, 4, 4]
    assert found[2] is given[2] and found[3] is given[3] and len(given[0].cu_seqlens_q) == 4
    model.module.decoder._forward_pre_hooks.clear()
    model.module.decoder._forward_pre_hooks_with_kwargs.clear()
    assert hooks_of(model) == before


@pytest.mark.parametrize("given", [0, -3, True, 2.0, "64"])
def test_an_invalid_number_of_documents_is_refused(given):
    with training() as engine, pytest.raises(GraphConfigError, match="packed_documents=.* an int of at least 1"):
        engine.attach(model_of(), packed_documents=given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("multi_latent_attention", True, "apply_rope_fusion=True"),
    ],
)
def test_unsupported_packed_models_are_refused(name, value, message):
    model = model_of(apply_rope_fusion=False)
    object.__setattr__(model.config, name, value)
    with training() as engine:
        with pytest.raises(GraphConfigError, match=f"packed_documents=64.*{message}"):
            engine.attach(model, packed_documents=64)
        assert "forward" not in vars(model.decoder.layers[0])


def test_context_parallelism_with_unfused_mrope_is_refused():
    model = model_of(apply_rope_fusion=False)
    model.position_embedding_type = "mrope"
    object.__setattr__(model.config, "context_parallel_size", 2)
    with training() as engine, pytest.raises(GraphConfigError, match="packed_documents=64.*context_parallel_size=2"):
        engine.attach(model, packed_documents=64)


def test_models_without_packed_sequences_are_refused():
    with training() as engine:
        with pytest.raises(ConfigError, match="packed_documents=64 .*Linear: leave it out"):
            engine.attach(nn.Linear(2, 2), packed_documents=64)
        with pytest.raises(GraphConfigError, match="found none in TransformerBlock: attach the whole model"):
            engine.attach(model_of().decoder, packed_documents=64)
        assert engine.attach(model_of(), packed_documents=64) == ["decoder.layers.0", "decoder.layers.1"]


def test_padding_reads_no_tensor_and_keeps_every_other_field(monkeypatch):
    def made_anew(self):
        raise AssertionError("the constructor of 0.19 computes further tensors")

    ends, others = torch.zeros(4, dtype=torch.int32, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=others,
        max_seqlen_q=7,
        local_cp_size=1,
    )
    packed.seq_idx, packed.total_tokens, packed.pad_between_seqs = object(), 12, None
    monkeypatch.setattr(PackedSeqParams, "__post_init__", made_anew, raising=False)
    found = padded(packed, 6, 12)  # a host read of a meta tensor would raise
    assert found.cu_seqlens_q is found.cu_seqlens_kv and found.cu_seqlens_q.shape == (7,)
    assert found.cu_seqlens_q_padded.shape == (7,) and found.cu_seqlens_kv_padded is None
    assert (found.max_seqlen_q, found.max_seqlen_kv, found.qkv_format, found.local_cp_size) == (12, 12, "thd", 1)
    assert found.seq_idx is packed.seq_idx and found.total_tokens == 12 and packed.max_seqlen_q == 7
    assert found.pad_between_seqs is True and packed.pad_between_seqs is None
    assert padded(packed, 3, 12).cu_seqlens_q.shape == (4,)
    assert padded(packed, 2, 12) is packed
    packed.qkv_format = "sbhd"  # in this format cu_seqlens has one entry per row of the batch
    assert padded(packed, 6, 12) is packed


@pytest.mark.parametrize(
    ("same", "given", "expected"), [(True, None, False), (False, None, True), (False, False, False)]
)
def test_padding_between_documents_is_told_by_identity_and_never_compared(same, given, expected):
    ends, other = torch.zeros(4, device="meta"), torch.zeros(4, device="meta")
    packed = PackedSeqParams("thd", ends, ends, ends if same else other, ends if same else other)
    packed.pad_between_seqs = given
    assert padded(packed, 6, 12).pad_between_seqs is expected
    assert not hasattr(padded(packed_of(3), 6, LENGTH), "pad_between_seqs")


def test_fields_of_newer_versions_survive_a_capture():
    register_packed_sequences()
    packed = packed_of(5)
    packed.seq_idx, packed.total_tokens, packed.pad_between_seqs = torch.arange(3), LENGTH, False
    values, spec = _pytree.tree_flatten(packed)
    again = _pytree.tree_unflatten(values, spec)
    assert again.seq_idx is packed.seq_idx and (again.total_tokens, again.pad_between_seqs) == (LENGTH, False)


def test_empty_documents_come_last():
    found = padded(packed_of(3), 6, LENGTH)
    assert found.cu_seqlens_q.diff()[3:].tolist() == [0, 0, 0] and found.cu_seqlens_q.dtype == torch.int32
    assert found.cu_seqlens_q[:4].equal(packed_of(3).cu_seqlens_q)


def test_tokens_are_counted_from_the_models_actual_input():
    first, later = model_of(), model_of(pre_process=False)
    ids, hidden = torch.zeros(1, 24), torch.zeros(12, 1, 32)
    later.set_input_tensor(hidden)
    assert tokens_of(first, {"input_ids": ids}) == 24
    assert tokens_of(first, {"input_ids": ids, "decoder_input": hidden}) == 12
    assert tokens_of(first, {}) is None
    assert tokens_of(later, {"input_ids": ids}) == 12
    for model in (first, later):
        model.config.sequence_parallel, model.config.tensor_model_parallel_size = True, 2
    assert tokens_of(later, {}) == tokens_of(first, {"decoder_input": hidden}) == 24
    assert tokens_of(first, {"input_ids": ids}) == 24


def test_a_tensor_in_several_fields_stays_one_after_unflatten():
    """Transformer Engine compares padded and unpadded lengths by identity to detect padding between sequences."""
    register_packed_sequences()
    packed = packed_of(5)
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv.clone()
    packed.cu_seqlens_kv_padded = packed.cu_seqlens_q_padded
    values, spec = _pytree.tree_flatten(packed)
    assert sum(isinstance(value, torch.Tensor) for value in values) == 2
    again = _pytree.tree_unflatten(
        [value.clone() if isinstance(value, torch.Tensor) else value for value in values], spec
    )
    assert again.cu_seqlens_q is again.cu_seqlens_kv and again.cu_seqlens_q_padded is again.cu_seqlens_kv_padded
    assert again.cu_seqlens_q is not again.cu_seqlens_q_padded and again.max_seqlen_kv == packed.max_seqlen_kv
    assert _pytree.tree_flatten(packed_of(9))[1] != spec
