"""Decode attention that reads shared prefixes once (cascade attention), against float64 attention."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels import INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.kernels import paged_decode as pd
from engine.kernels.shared_prefixes import SharedPrefixes
from tests.engine.kernels.test_paged_decode import DTYPES, PAGE, TOLERANCE, expected, make_case, new_rows, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]

LONG = 12 if INTERPRETED else 150  # pages of a long prefix


def share(case, groups):
    """Let the rows of each group, given with a number of pages, read the first row's pages; return SharedPrefixes."""
    batch, heads, _ = case.q.shape
    width = pd.prefix_members(heads // case.k_cache.shape[2])
    keys, members = torch.zeros(batch, dtype=torch.int64), torch.zeros(len(groups) + 2, width, dtype=torch.int64)
    for index, (rows, pages) in enumerate(groups):
        for row in rows:
            case.page_table[row, :pages] = case.page_table[rows[0], :pages]
            keys[row] = pages * PAGE
        members[index, : len(rows)] = torch.tensor(rows) + 1
    device = case.q.device
    return SharedPrefixes(keys.to(device), members.to(device), torch.tensor([len(groups)], device=device))


def decode(case, shared, **options):
    return pd.paged_decode(
        case.q, case.k_cache, case.v_cache, case.page_table, case.positions, case.scale, shared=shared, **options
    )


@pytest.mark.interpretable
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(16, 8, 128), (32, 8, 128), (9, 3, 64), (4, 4, 64), (8, 1, 32), (6, 2, 48), (14, 2, 64), (8, 4, 256)],
)
def test_groups_of_any_size_give_the_attention_of_single_rows(device, dtype, heads, kv_heads, dim):
    lengths = [PAGE * LONG + 1, PAGE * LONG + 70, PAGE * LONG + 16, 40, 0, PAGE * 3 + 5, PAGE * 4 + 1, PAGE * 5]
    case = make_case(device, lengths, heads, kv_heads, dim, dtype, seed=heads, max_keys=PAGE * (LONG + 6))
    width = pd.prefix_members(heads // kv_heads)
    groups = [([0, 1, 2][:width], LONG), ([7, 5][:width], 3)]
    shared = share(case, groups)
    assert relative_error(decode(case, shared), expected(case)) < TOLERANCE[dtype]


@pytest.mark.interpretable
@pytest.mark.parametrize("splits", [None, 1, 5, 32])
@pytest.mark.parametrize("pages", [1, 2, 3, 4, 5, 9, 12])
def test_prefixes_of_any_length_with_any_number_of_splits(device, splits, pages):
    lengths = [PAGE * pages + 1, PAGE * pages + 33, PAGE * pages + 100, 7]
    case = make_case(device, lengths, 8, 2, 64, torch.float32, seed=pages)
    shared = share(case, [([2, 0, 1], pages)])
    assert relative_error(decode(case, shared, num_splits=splits), expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpretable
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_a_sink_counts_once_beside_a_shared_prefix(device, splits):
    case = make_case(device, [PAGE * 3 + 1, PAGE * 3 + 33, PAGE * 3 + 100, 7], 8, 2, 64, torch.float32)
    shared = share(case, [([2, 0, 1], 3)])
    sinks = torch.linspace(-3, 6, 8).to(device)
    wanted = pd.paged_decode(
        case.q, case.k_cache, case.v_cache, case.page_table, case.positions, case.scale, sinks=sinks
    )
    assert relative_error(decode(case, shared, num_splits=splits, sinks=sinks), wanted) < TOLERANCE[torch.float32]


@pytest.mark.interpretable
def test_without_groups_the_result_is_that_of_single_rows(device):
    case = make_case(device, [100, 33, 0, 1], 8, 2, 64, torch.float32)
    assert relative_error(decode(case, share(case, [])), expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpretable
@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_are_normed_and_rotated_at_their_own_positions(device, by_slot, normed):
    """Raw projections and new keys: the result must be that of a launch without groups."""
    cases = [make_case(device, [70, 100, 49, 20, 90], 8, 2, 64, torch.float32, max_keys=128, seed=3) for _ in range(2)]
    shared, _ = (share(case, [([1, 0, 4], 3)]) for case in cases)
    case, other = cases
    k, v = new_rows(case)
    generator = torch.Generator().manual_seed(1)
    cos, sin = (torch.randn(128, 64, generator=generator).to(device) for _ in range(2))
    norms = (torch.randn(2, 64, generator=generator) + 1).to(device)
    rotation = pd.NormRope(cos, sin, *(norms if normed else (None, None)), eps=1e-5)
    options = {"new_kv": (k, v), "rotation": rotation}
    if by_slot:
        slots = torch.tensor([2, 4, 0, 1, 3], device=device)
        case.page_table = other.page_table = case.page_table[slots.argsort()].contiguous()
        options["slots"] = slots
    together = decode(case, shared, **options)
    apart = pd.paged_decode(
        other.q, other.k_cache, other.v_cache, other.page_table, other.positions, other.scale, **options
    )
    assert relative_error(together, apart) < TOLERANCE[torch.float32]
    torch.testing.assert_close(case.k_cache, other.k_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(case.v_cache, other.v_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpretable
def test_poisoned_workspace_is_never_read_before_it_is_written(device):
    case = make_case(device, [200, 100, 65, 1], 4, 2, 64, torch.float32)
    shared = share(case, [([0, 1, 2], 4)])
    workspace = pd.decode_workspace(case.q, case.k_cache, case.page_table, num_splits=8, shared=True)
    for _ in range(2):  # the second call also checks that the first reset the arrival counts
        workspace.acc.fill_(float("nan"))
        workspace.lse.fill_(float("nan"))
        found = decode(case, shared, num_splits=8, workspace=workspace)
        assert relative_error(found, expected(case)) < TOLERANCE[torch.float32]
        assert workspace.arrivals.count_nonzero() == 0


@pytest.mark.interpretable
def test_launches_of_all_row_counts_share_one_scratch(device):
    case = make_case(device, [200, 100, 65, 90, 17], 4, 2, 64, torch.float32)
    shared = share(case, [([0, 1, 2], 4)])
    scratch = pd.DecodeScratch(5, case.q, case.k_cache, case.page_table, shared=True)
    wanted = expected(case)
    for rows in (5, 3, 4, 5):
        for workspace in map(scratch.of, range(1, 6)):
            workspace.acc.fill_(float("nan"))
            workspace.lse.fill_(float("nan"))
        found = pd.paged_decode(
            case.q[:rows], case.k_cache, case.v_cache, case.page_table[:rows], case.positions[:rows], 64**-0.5,
            shared=shared, workspace=scratch.of(rows),
        )  # fmt: skip
        assert relative_error(found, wanted[:rows]) < TOLERANCE[torch.float32]


@pytest.mark.interpretable
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(1, dtype=torch.int64)}, "shared must have keys of at least 2 rows"),
        ({"members": torch.zeros(1, 3, dtype=torch.int64)}, r"members \[groups, 32\]"),
        ({"num_groups": torch.zeros(1, dtype=torch.int32)}, "shared must be int64"),
    ],
)
def test_mismatched_groups_are_rejected(device, change, message):
    case = make_case(device, [30, 20], 4, 2, 64, torch.float32)
    shared = share(case, [])._replace(**{name: tensor.to(device) for name, tensor in change.items()})
    with pytest.raises(ValueError, match=message):
        decode(case, shared)
    with pytest.raises(ValueError, match="window is 5"):
        decode(case, share(case, []), window=5)


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_a_captured_launch_follows_positions_and_groups(device):
    case = make_case(device, [PAGE * 40 + 1] * 24 + [0] * 8, 32, 8, 128, torch.bfloat16, max_keys=PAGE * 60)
    table = case.page_table.clone()
    shared = share(case, [(list(range(16)), 40), (list(range(16, 24)), 40)])
    workspace = pd.decode_workspace(case.q, case.k_cache, case.page_table, shared=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decode(case, shared, workspace=workspace)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = decode(case, shared, workspace=workspace)
    for groups, step in (([(list(range(24))[:16], 40)], 0), ([(list(range(4, 12)), 7), ([0, 1], 3)], 100), ([], 250)):
        case.page_table.copy_(table)
        case.k_cache.nan_to_num_(0.5)
        case.v_cache.nan_to_num_(0.5)
        for target, source in zip(shared, share(case, groups), strict=True):
            target.zero_()
            target[: len(source)].copy_(source[: len(target)])
        case.positions[:24] = PAGE * 40 + step
        graph.replay()
        torch.cuda.synchronize()
        wanted = reference(case.q, case.k_cache, case.v_cache, case.page_table, case.positions, case.scale)
        assert relative_error(out, wanted) < TOLERANCE[torch.bfloat16]
        assert torch.equal(out, decode(case, shared))
