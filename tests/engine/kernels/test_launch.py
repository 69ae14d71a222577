"""Sizes of grids and tiles."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.launch import cdiv, next_power_of_2

COUNTS = st.integers(1, 1 << 40)


@given(COUNTS, COUNTS)
def test_cdiv_covers_the_count_with_as_few_tiles_as_possible(count, size):
    tiles = cdiv(count, size)
    assert (tiles - 1) * size < count <= tiles * size


@given(COUNTS)
def test_next_power_of_2_is_the_smallest_that_is_not_below(count):
    power = next_power_of_2(count)
    assert math.log2(power).is_integer() and power / 2 < count <= power
