"""Static buffers: fixed addresses, padding, and validation before any write."""

from __future__ import annotations

import pytest
import torch

from graph_cache.core.buffers import BATCH, BufferSpec, StaticBuffers
from graph_cache.errors import GraphConfigError, SignatureMismatch

SPECS = {
    "ids": BufferSpec((BATCH,), torch.int64, pad=7),
    "x": BufferSpec((BATCH, 3), torch.float32),
    "scale": BufferSpec((2,), torch.float32, pad=1.0),
    "out": BufferSpec((BATCH, 2), torch.float32, pad=None),
}


def inputs(rows):
    return {"ids": torch.arange(rows), "x": torch.ones(rows, 3), "scale": torch.full((2,), 2.0)}


@pytest.mark.parametrize("shape", [(2, BATCH), (BATCH, BATCH), ("rows", 2), (BATCH, -1)])
def test_invalid_shapes_are_rejected(shape):
    with pytest.raises(GraphConfigError, match="only the first may be 'batch'"):
        BufferSpec(shape, torch.float32)


def test_buffers_start_as_padding_and_those_without_as_zeros():
    buffers = StaticBuffers(SPECS, 4, "cpu")
    assert buffers["ids"].tolist() == [7] * 4
    assert buffers["scale"].tolist() == [1.0, 1.0]
    assert not buffers["out"].any()
    assert list(buffers) == list(SPECS) and len(buffers) == 4


def test_existing_tensors_become_buffers_if_they_match():
    out = torch.full((4, 2), 5.0)
    buffers = StaticBuffers(SPECS, 4, "cpu", tensors={"out": out})
    assert buffers["out"] is out and out.eq(5.0).all()
    buffers.view(2)["out"].zero_()
    assert not out[:2].any()
    for wrong in (torch.zeros(3, 2), torch.zeros(4, 2, dtype=torch.int64)):
        with pytest.raises(SignatureMismatch, match="out"):
            StaticBuffers(SPECS, 4, "cpu", tensors={"out": wrong})


def test_every_bucket_is_a_view_at_the_same_address():
    buffers = StaticBuffers(SPECS, 8, "cpu")
    for name in ("ids", "x", "out"):
        assert {buffers.view(bucket)[name].data_ptr() for bucket in (1, 4, 8)} == {buffers[name].data_ptr()}
        assert buffers.view(4)[name].shape[0] == 4
    assert buffers.view(4)["scale"] is buffers["scale"]
    assert buffers.view(4) is buffers.view(4)


def test_load_copies_rows_pads_up_to_the_bucket_and_leaves_the_rest():
    buffers = StaticBuffers(SPECS, 8, "cpu")
    buffers["x"].fill_(9.0)
    buffers["out"].fill_(5.0)
    buffers.load(inputs(3), 3, 4)
    assert buffers["ids"].tolist() == [0, 1, 2, 7, 7, 7, 7, 7]
    assert buffers["x"][:, 0].tolist() == [1, 1, 1, 0, 9, 9, 9, 9]
    assert buffers["scale"].tolist() == [2.0, 2.0]
    assert buffers["out"].eq(5.0).all()


def test_nothing_is_written_when_anything_differs():
    buffers = StaticBuffers(SPECS, 8, "cpu")
    wrong = inputs(3) | {"scale": torch.ones(3), "extra": torch.ones(1)}
    with pytest.raises(SignatureMismatch) as caught:
        buffers.load(wrong, 3, 4)
    assert len(caught.value.differences) == 2
    assert buffers["ids"].tolist() == [7] * 8 and not buffers["x"].any()


def test_an_input_may_be_missing_only_if_it_has_no_padding():
    buffers = StaticBuffers(SPECS, 8, "cpu")
    buffers.load(inputs(2) | {"out": torch.ones(2, 2)}, 2, 4)
    assert buffers["out"].sum() == 4.0
    with pytest.raises(SignatureMismatch, match="x: missing"):
        buffers.load({"ids": torch.arange(2), "scale": torch.ones(2)}, 2, 4)


def test_an_input_that_needs_a_gradient_leaves_no_history_in_the_buffers():
    buffers = StaticBuffers({"x": SPECS["x"]}, 4, "cpu")
    buffers.load({"x": torch.ones(2, 3, requires_grad=True)}, 2, 4)
    assert not buffers["x"].requires_grad and buffers["x"].grad_fn is None
    assert buffers["x"][:2].eq(1).all()


def test_snapshot_and_restore_bring_every_buffer_back():
    buffers = StaticBuffers(SPECS, 4, "cpu")
    buffers.load(inputs(4), 4, 4)
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    saved = buffers.snapshot(4)
    buffers.fill_dummy()
    buffers["out"].fill_(3.0)
    assert buffers["ids"].tolist() == [7] * 4 and buffers["scale"].tolist() == [1.0, 1.0]
    buffers.restore(saved)
    assert all(torch.equal(buffers[name], before[name]) for name in before)


def test_a_dummy_fill_leaves_buffers_without_padding_alone():
    buffers = StaticBuffers(SPECS, 4, "cpu")
    buffers["out"].fill_(3.0)
    buffers.fill_dummy()
    assert buffers["out"].eq(3.0).all()


def test_an_unpadded_run_gets_fresh_memory_for_what_it_writes():
    buffers = StaticBuffers(SPECS, 4, "cpu")
    fresh = buffers.unpadded(9)
    assert list(fresh) == ["out"] and fresh["out"].shape == (9, 2)
    assert fresh["out"].data_ptr() != buffers["out"].data_ptr()
