"""Copies of static gradients: equal values in order, separate memory, aligned for vector loads."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from graph_cache.training.gradients import ALIGNED, Copies

SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3)
GRADS = st.lists(
    st.none() | st.tuples(SHAPES, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()), max_size=8
)


@given(GRADS)
def test_copies_equal_their_gradients_and_share_no_memory_with_them(specs):
    grads = [None if spec is None else torch.randn(spec[0]).to(spec[1]) for spec in specs]
    grads = [
        grad.t() if grad is not None and grad.dim() == 2 and spec[2] else grad
        for grad, spec in zip(grads, specs, strict=True)
    ]
    copies = Copies(grads)
    found, again = copies(), copies()
    assert [copy is None for copy in found] == [grad is None for grad in grads]
    pairs = [(copy, grad) for copy, grad in zip(found, grads, strict=True) if grad is not None]
    for copy, grad in pairs:
        assert torch.equal(copy, grad) and copy.dtype == grad.dtype and copy.is_contiguous()
        assert copy.numel() == 0 or copy.data_ptr() % ALIGNED == 0
        grad.fill_(7)
    for copy in [copy for copy in again if copy is not None]:
        copy.fill_(8)
    for copy, _ in pairs:
        assert not (copy == 7).all() or copy.numel() == 0
        assert not (copy == 8).all() or copy.numel() == 0


def test_gradients_of_a_layer_take_one_allocation():
    grads = [torch.randn(64, 64), torch.randn(64), torch.randn(3), torch.randn(256, 64)]
    found = Copies(grads)()
    shared = {grad.untyped_storage().data_ptr() for grad in (found[0], found[1], found[3])}
    assert len(shared) == 1 and found[2].untyped_storage().data_ptr() not in shared
