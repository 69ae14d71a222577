"""Log-probabilities of tokens, packed: one bytes object per token until it is read.

A token's log-probabilities as objects (TokenLogprob) take microseconds to build and pickle. While an answer is
generated, tens of thousands of them would also make each full garbage collection slow.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, SupportsIndex, TypeVar, overload

import numpy as np

# A record has 8-byte words: token id, log-probability, rank; log-probability and id of each alternative; then, if there
# are named tokens, their ids, their log-probabilities and their number, which makes the number of words even. An empty
# record stands for None. If the rank has the bit _SUPPORT, the record ends with the kept ids, their mass and number.
_HEADER, _PAIR = struct.Struct("=qdq"), struct.Struct("=dq")
_COUNT = struct.Struct("=q")
_SUPPORT = 1 << 62
_ALL = -1  # as the number of kept ids: all are kept, and none is listed


@dataclass(slots=True)
class TokenLogprob:
    """One token's logprob, its rank, and the logprobs of other tokens at its position."""

    token_id: int  # the token
    logprob: float  # its log-probability
    rank: int  # 1: the most likely token
    top: dict[int, float] = field(default_factory=dict)  # the k most likely token ids with their logprobs
    named: dict[int, float] = field(default_factory=dict)  # logprobs of logprob_token_ids; -inf: could not be sampled
    kept_mass: float | None = None  # log of the probability that top-k, top-p and min-p left; None: not asked for
    kept_ids: list[int] | None = None  # the ids that they left, most likely first; None: all, or not asked for


Entry = TypeVar("Entry", bound=TokenLogprob | None)


class TokenLogprobs(Sequence[Entry], Generic[Entry]):
    """A sequence of TokenLogprob (or None), which are built when they are read. Changing one of them has no effect.

    Like a list, it can be extended in place and equals a list of the same entries.
    """

    __slots__ = ("records",)

    def __init__(self, records: list[bytes] | None = None) -> None:
        self.records = [] if records is None else records
        """One packed entry per token, to be passed on without building it."""

    def append(self, entry: Entry) -> None:
        self.records.append(_packed(entry))

    def extend(self, entries: Iterable[Entry]) -> None:
        self += entries

    def __iadd__(self, entries: Iterable[Entry]) -> TokenLogprobs[Entry]:
        self.records += entries.records if isinstance(entries, TokenLogprobs) else [_packed(one) for one in entries]
        return self

    @property
    def num_alternatives(self) -> int:
        """The number of log-probabilities beside the tokens' own."""
        return sum((len(record) - _HEADER.size) // _PAIR.size for record in self.records if record)

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> TokenLogprobs[Entry]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = self.records[index]
        return TokenLogprobs(found) if isinstance(found, list) else _unpacked(found)

    def __iter__(self) -> Iterator[Entry]:
        return map(_unpacked, self.records)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenLogprobs):
            return self.records == other.records or list(self) == list(other)
        return list(self) == other if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type, tuple[list[bytes]]]:
        return TokenLogprobs, (self.records.copy(),)


def pack_records(
    rows: np.ndarray, top_counts: Sequence[int], named_values: np.ndarray, named: Sequence[Sequence[int]]
) -> list[bytes]:
    """Return the records of a step's rows; empty where there is no token.

    rows int64 [b, 3 + 2k]: the token id, negative if there is none; the bits of its float64 log-probability; its rank;
    then the k most likely tokens, as bits of the log-probability and id of each. Row i gets top_counts[i] of them,
    without tokens of probability 0, which come last. named_values float64 [b, m] starts with the log-probabilities of
    the tokens named[i]. Columns of a row past its top_counts[i] alternatives are not read.
    """
    if not len(rows):
        return []
    rows, k = np.ascontiguousarray(rows), rows.shape[1] // 2 - 1
    records = list(struct.unpack(f"{rows.shape[1] * rows.itemsize}s" * len(rows), rows.data))  # faster than slices
    values = rows.view(np.float64)[:, _HEADER.size // 8 :: 2]
    if rows[:, 0].min() < 0 or min(top_counts) < k or (k and values[:, -1].min() == -math.inf):
        is_given = (values > -math.inf) & (np.arange(k) < np.asarray(top_counts)[:, None])
        num_top = is_given.sum(axis=1)
        sizes = np.where(rows[:, 0] < 0, 0, _HEADER.size + _PAIR.size * num_top).tolist()
        records = [record[:size] for record, size in zip(records, sizes, strict=True)]
    if any(named):
        for row, ids in enumerate(named):
            if ids and records[row]:
                records[row] += array("q", ids).tobytes() + named_values[row, : len(ids)].tobytes()
                records[row] += _COUNT.pack(len(ids))
    return records


def with_support(record: bytes, kept_mass: float, kept_ids: np.ndarray | None) -> bytes:
    """Return a record without support with the kept mass and the kept ids int64 [n]; None: all ids, or not asked for.

    An empty record stays empty.
    """
    if not record:
        return record
    token_id, logprob, rank = _HEADER.unpack_from(record)
    ids = b"" if kept_ids is None else kept_ids.astype(np.int64).tobytes()
    count = _ALL if kept_ids is None else len(kept_ids)
    header = _HEADER.pack(token_id, logprob, rank | _SUPPORT)
    return header + record[_HEADER.size :] + ids + _PAIR.pack(kept_mass, count)


def _packed(entry: TokenLogprob | None) -> bytes:
    if entry is None:
        return b""
    parts = [_HEADER.pack(entry.token_id, entry.logprob, entry.rank)]
    parts += [_PAIR.pack(value, token_id) for token_id, value in entry.top.items()]
    if entry.named:
        ids, values = array("q", entry.named), array("d", entry.named.values())
        parts += [ids.tobytes(), values.tobytes(), _COUNT.pack(len(entry.named))]
    record = b"".join(parts)
    if entry.kept_mass is None:
        return record
    return with_support(record, entry.kept_mass, None if entry.kept_ids is None else np.array(entry.kept_ids, np.int64))


def _unpacked(record: bytes) -> Any:
    if not record:
        return None
    token_id, logprob, rank = _HEADER.unpack_from(record)
    named: dict[int, float] = {}
    end = len(record)
    kept_mass: float | None = None
    kept_ids: list[int] | None = None
    if rank & _SUPPORT:
        rank ^= _SUPPORT
        end -= _PAIR.size
        kept_mass, count = _PAIR.unpack_from(record, end)
        if count != _ALL:
            kept_ids = array("q", record[end - 8 * count : end]).tolist()
            end -= 8 * count
    if (end - _HEADER.size) % _PAIR.size:
        end -= _COUNT.size
        (count,) = _COUNT.unpack_from(record, end)
        middle, last = end - 8 * count, end
        end -= _PAIR.size * count
        named = dict(zip(array("q", record[end:middle]), array("d", record[middle:last]), strict=True))
    top = {other: value for value, other in _PAIR.iter_unpack(record[_HEADER.size : end])}
    return TokenLogprob(token_id, logprob, rank, top, named, kept_mass, kept_ids)
