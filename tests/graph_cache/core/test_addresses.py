"""AddressBook: moved tensors are detected and named; in-place updates are not moves."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from graph_cache.core.addresses import GEOMETRY_PARTS, PARTS, AddressBook


def model():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    return net.requires_grad_(False)


def watched(source, **options):
    book = AddressBook()
    book.watch(source, **options)
    return book


def test_parameters_and_buffers_are_watched_by_their_names():
    net = model()
    book = watched(net, prefix="model.")
    held = net[1].running_mean
    net[1].running_mean = held.clone()
    net[0].weight.data = net[0].weight.data.clone()
    assert sorted(one.name for one in book.moved()) == ["model.0.weight", "model.1.running_mean"]
    assert not book.unchanged()


def update_in_place(net):
    net[0].weight.add_(1)
    net.load_state_dict({name: tensor + 1 for name, tensor in net.state_dict().items()})


def test_in_place_updates_do_not_count_as_moves():
    net = model()
    book = watched(net)
    update_in_place(net)
    assert book.unchanged() and book.moved() == []


@pytest.mark.parametrize(
    "move",
    [
        lambda net: setattr(net[0].weight, "data", net[0].weight.data.clone()),
        lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.clone(), requires_grad=False)),
        lambda net: net.double(),
        lambda net: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True),
        lambda net: setattr(net[0], "weight", None),
        lambda net: delattr(net[0], "weight"),
    ],
)
def test_every_way_to_move_a_parameter_is_detected(move):
    net = model()
    book, held = (
        watched(net),
        [one.data for one in net.parameters()],
    )  # held: no address is reused
    move(net)
    assert held
    assert not book.unchanged()
    assert "0.weight" in [one.name for one in book.moved()]


def test_mapping_entries_are_reread_and_deleted_tensors_are_reported():
    table = {"k": torch.zeros(2), "v": torch.zeros(2)}
    book = watched(table, prefix="kv.")
    old = table["k"]
    table["k"] = torch.ones(2)
    del table["v"]
    moved = {one.name: one for one in book.moved()}
    assert (moved["kv.k"].before, moved["kv.k"].now) == (old.data_ptr(), table["k"].data_ptr())
    assert moved["kv.v"].now is None and str(moved["kv.v"]).endswith("gone")


def test_accept_adopts_current_addresses_and_drops_removed_entries():
    table = {"k": torch.zeros(2), "v": torch.zeros(2)}
    book, old = watched(table), table["k"]
    table["k"] = torch.ones(2)
    del table["v"]
    book.accept()
    assert book.unchanged() and len(book) == 1
    table["k"] = old
    assert [one.name for one in book.moved()] == ["k"]


def test_a_check_costs_less_than_two_microseconds_a_tensor():
    book = watched({str(index): torch.zeros(1) for index in range(1000)})
    best = min(_timed(book.unchanged) for _ in range(20))
    assert best < 1000 * 2e-6


def _timed(call):
    started = time.thread_time()
    assert call()
    return time.thread_time() - started


def test_partial_checks_together_find_every_move():
    from graph_cache.core.addresses import PARTS

    table = {str(index): torch.ones(2) for index in range(10)}
    book = AddressBook()
    book.watch(table)
    for name in table:
        table[name], kept = torch.ones(2), table[name]
        assert [book.unchanged(part) for part in range(PARTS)].count(False) == 1
        table[name] = kept
    assert all(book.unchanged(part) for part in range(PARTS))


def test_replaced_and_removed_submodules_are_detected_and_accepted():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
    book = AddressBook()
    book.watch(model, prefix="model.")
    assert book.unchanged() and book.has_its_modules() and book.moved() == []
    model[1][0] = nn.GELU()
    assert not book.unchanged() and not book.has_its_modules()
    assert [one.name for one in book.moved()] == ["model.1.0"]
    assert [part for part in range(PARTS) if not book.unchanged(part)] == [2]  # index 2 of the modules 0, 1, 1.0, 1.1
    book.accept()
    assert book.unchanged()
    del model[1][0]
    assert [str(one) for one in book.moved() if one.name == "model.1.0"][0].endswith(" -> gone")


@pytest.mark.parametrize(
    "reshape",
    [
        lambda weight: weight.data.t(),
        lambda weight: weight.data.view(1, 9),
        lambda weight: weight.data[:2],
        lambda weight: weight.data.view(torch.int32),
        lambda weight: weight.data.as_strided((3, 3), (0, 1)),
    ],
)
def test_a_change_of_geometry_at_the_same_address_is_detected_and_described(reshape):
    net = model()
    book = watched(net)
    before = net[0].weight.data_ptr()
    net[0]._parameters["weight"] = nn.Parameter(reshape(net[0].weight), requires_grad=False)
    assert net[0].weight.data_ptr() == before and not book.unchanged()
    [found] = book.moved()
    assert found.name == "0.weight" and "float32 [3, 3] with strides [3, 1] ->" in str(found)
    book.accept()
    assert book.unchanged() and book.moved() == []


def test_geometry_is_checked_in_turn_at_step_boundaries():
    net = model()
    book = watched(net)
    net[2].weight.data = net[2].weight.data.t()
    assert [book.unchanged(geometry_part=part) for part in range(GEOMETRY_PARTS)].count(False) == 1
    assert sorted(book.unchanged(part) for part in range(PARTS)) == [False, True, True, True]
