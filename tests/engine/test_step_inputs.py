"""The static inputs of a decode step: what a padded row holds, whatever was in it before."""

from __future__ import annotations

import torch

from engine.request import EngineRequest, Request, SamplingParams
from engine.step_inputs import StepInputs, decode_buffers


def request_at(position: int, pages: list[int]) -> Request:
    """A running request whose next decode computes `position`."""
    name = f"at-{position}-{pages}"
    request = Request(EngineRequest(request_id=name, prompt_token_ids=[5] * (position + 1), params=SamplingParams(),
                                    seed=0), "initial")
    request.pages, request.num_computed = pages, position
    return request


def inputs_of_four() -> tuple[StepInputs, torch.Tensor]:
    buffers = decode_buffers(4, 3, 8, 10, torch.float32, torch.device("cpu"))
    return StepInputs(buffers), buffers["page_table"]


def test_a_row_that_became_padding_points_to_the_scratch_page():
    inputs, table = inputs_of_four()
    inputs.load([request_at(3, [7]), request_at(3, [9, 4])], 2)
    inputs.load([request_at(4, [7])], 2)
    assert table[:2].tolist() == [[7, 0, 0], [0, 0, 0]]


def test_padding_is_cleared_after_forgetting_too():
    # A padded row writes its KV at position 0 of its first page: a page left in it may be another request's by now.
    inputs, table = inputs_of_four()
    inputs.load([request_at(3, [7]), request_at(3, [9, 4])], 2)
    inputs.forget()
    inputs.load([request_at(4, [7])], 2)
    assert table[:2].tolist() == [[7, 0, 0], [0, 0, 0]]


def test_pages_are_written_anew_after_forgetting():
    inputs, table = inputs_of_four()
    request = request_at(3, [7, 8])
    inputs.load([request], 1)
    table[0] = 2
    inputs.forget()
    inputs.load([request], 1)
    assert table[0, :2].tolist() == [7, 8]


def test_a_page_that_a_request_gained_is_added_to_its_row():
    inputs, table = inputs_of_four()
    request = request_at(15, [7])
    inputs.load([request], 1)
    request.pages += [8]
    request.num_computed = 16
    inputs.load([request], 1)
    assert table[0].tolist() == [7, 8, 0]
