"""Whose code and objects are searched for state."""

from __future__ import annotations

import collections
import json
from contextvars import ContextVar

import pytest
import torch

from graph_cache.guards.ownership import (
    Searched,
    is_core_file,
    is_own_class,
    is_own_file,
    is_own_variable,
    searched,
)
from graph_cache.guards.search import reachable


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("my_project.layers", Searched.ALL),
        ("torchvision.models", Searched.ALL),
        ("__main__", Searched.ALL),
        ("torch.nn.modules.linear", Searched.OBJECTS),
        ("torch._dynamo.eval_frame", Searched.NOTHING),
        ("torch.cuda.graphs", Searched.NOTHING),
        ("torch.utils.data.dataloader", Searched.NOTHING),
        ("torch.utils.checkpoint", Searched.OBJECTS),
        ("megatron.core.transformer", Searched.OBJECTS),
        ("numpy.random", Searched.NOTHING),
        ("collections", Searched.OBJECTS),
        ("json.decoder", Searched.NOTHING),
        (None, Searched.NOTHING),
    ],
)
def test_the_longest_name_in_the_table_decides(module, found):
    assert searched(module) is found


def test_files_belong_to_the_user_unless_installed():
    assert is_own_file(__file__) and is_own_file("<stdin>")
    assert not any(map(is_own_file, (torch.__file__, json.__file__, pytest.__file__, "<frozen importlib._bootstrap>")))
    assert is_core_file(reachable.__code__.co_filename) and not is_core_file(__file__)


def test_classes_belong_to_the_user_unless_installed():
    assert is_own_class(type("Mine", (), {}))
    assert not is_own_class(torch.nn.Linear) and not is_own_class(collections.OrderedDict)


def test_context_variables_of_pytorch_and_the_standard_library_are_settings():
    assert is_own_variable(ContextVar("mine"))
    assert not is_own_variable(ContextVar("torch.mine")) and not is_own_variable(ContextVar("decimal_context"))
