"""null stands for "not given" in every field of a request that may be left out."""

from __future__ import annotations

import pytest

from server.schemas.anthropic import CountTokensBody
from server.schemas.generate import GenerateBody
from server.schemas.requests import Wire
from server.schemas.responses_api import ResponsesBody

REQUIRED = {
    "messages": [], "prompt": "a", "tokens": [1], "input": "a", "max_tokens": 3, "model": "m", "path": "a",
    "version": "v", "role": "user", "content": "a", "token_ids": [1], "new_version": "v", "action": "reset",
    "model_path": "a", "name": "a", "query": "a", "documents": ["a"], "text_1": "a", "text_2": "a",
    "master_address": "a", "master_port": 1, "world_size": 2, "names": ["a"], "dtypes": ["a"], "dtype_names": ["a"],
    "shapes": [[1]], "sizes": [1], "ipc_handles_pickled": "a", "serialized_named_tensors": ["a"],
    "method": "update_weights_ipc", "init_info": {"master_address": "a", "master_port": 1, "world_size": 2},
}  # fmt: skip


def models(kind=Wire):
    return [found for one in kind.__subclasses__() for found in (one, *models(one))]


CASES = [(one, name) for one in models() for name, field in one.model_fields.items() if not field.is_required()]


def test_all_bodies_are_covered():
    assert {GenerateBody, ResponsesBody, CountTokensBody} <= set(models()) and len(CASES) > 150


@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_null_equals_leaving_a_field_out(model, name):
    body = {key: REQUIRED[key] for key, field in model.model_fields.items() if field.is_required()}
    assert model.model_validate(body | {name: None}) == model.model_validate(body)
