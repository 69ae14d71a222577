"""Split GGUF files: all parts are read, and a part that is missing, misplaced or of another model is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.checkpoint.gguf_file import GGUFFile, open_gguf
from engine.checkpoint.gguf_model import GGUFModel
from engine.checkpoint.source import resolve_model
from engine.errors import ModelError
from engine.loader.cpu_formats import gguf_config, load_gguf
from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoint.gguf_samples import write_gguf


def part_name(folder: Path, number: int, count: int) -> Path:
    return folder / f"m-{number:05}-of-{count:05}.gguf"


def split(folder: Path, count: int = 3, changes: dict[int, dict[str, Any]] | None = None, **options: Any) -> Path:
    """Write a model in parts as llama-gguf-split does, and as one file next to them; return the first part's path.

    Part 1 has all metadata, the others their number only. `changes` replaces integers of a part's metadata.
    """
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "whole.gguf", **options)
    whole = GGUFFile(folder / "whole.gguf")
    names = list(whole.tensors)
    for number in range(count):
        writer = gguf.GGUFWriter(part_name(folder, number + 1, count), "llama")
        if number:
            writer.kv_data[0].clear()
        for key, value in whole.metadata.items() if not number else ():
            if key == "general.architecture":
                continue
            adders = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}
            adders.get(type(value), writer.add_uint32)(key, value)
        numbers = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        for key, value in (numbers | (changes or {}).get(number, {})).items():
            if value is not None:
                writer.add_uint32(key, value)
        for name in names[number * len(names) // count : (number + 1) * len(names) // count]:
            info = whole.info(name)
            kind = gguf.GGMLQuantizationType(info.type_id)
            raw = whole.raw(name)
            writer.add_tensor(name, raw if len(info.shape) > 1 else raw[0], raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return part_name(folder, 1, count)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q4_1])
def test_all_parts_are_read(tmp_path: Path, count: int, kind: gguf.GGMLQuantizationType) -> None:
    first = split(tmp_path, count, matrices=kind, tied=False)
    found, whole = (dict(GGUFModel(GGUFFile(path)).weights()) for path in (first, tmp_path / "whole.gguf"))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert gguf_config(str(first)) == gguf_config(str(tmp_path / "whole.gguf"))


def test_a_model_and_its_tokenizer_load_from_the_first_part(tmp_path: Path) -> None:
    source = resolve_model(str(split(tmp_path)))
    tokenizer = Tokenizer.load(source)
    _, model = load_gguf(source.path, cpu_weight_format="fp32")
    assert tokenizer.encode("the") == Tokenizer.load(str(tmp_path / "whole.gguf")).encode("the")
    assert model.config.num_layers == 2


def test_a_changed_later_part_is_read_again(tmp_path: Path) -> None:
    first = split(tmp_path, 2)
    before = open_gguf(first)
    assert open_gguf(first) is before
    os.utime(part_name(tmp_path, 2, 2), ns=(1, 1))
    assert open_gguf(first) is not before


@pytest.mark.parametrize("number", [2, 3])
def test_a_missing_part_is_named(tmp_path: Path, number: int) -> None:
    first = split(tmp_path)
    part_name(tmp_path, number, 3).unlink()
    with pytest.raises(
        ModelError, match=rf"00001-of-00003\.gguf is part 1 of 3, and .*0000{number}-of-00003\.gguf is mis"
    ):
        Tokenizer.load(str(first))


def test_another_part_than_the_first_is_refused(tmp_path: Path) -> None:
    split(tmp_path)
    with pytest.raises(
        ModelError, match=r"is part 2 of 3: give the first part, whose name ends in -00001-of-00003\.gguf"
    ):
        gguf_config(str(part_name(tmp_path, 2, 3)))


def test_a_renamed_first_part_is_refused(tmp_path: Path) -> None:
    for name in ("model.gguf", "m-00001-of-00009.gguf", "m-00002-of-00002.gguf"):
        first = split(tmp_path / name, 2)
        with pytest.raises(ModelError, match=r"part 1 of 2, and its name doesn't end in -00001-of-00002\.gguf"):
            gguf_config(str(first.rename(first.with_name(name))))


@pytest.mark.parametrize(("number", "changes", "message"), [
    (1, {"split.no": 2}, r"00002-of-00003\.gguf: split\.no is 2, and 1 by "),
    (2, {"split.count": 4}, r"00003-of-00003\.gguf: split\.count is 4, and 3 by "),
    (1, {"split.no": None}, r"00002-of-00003\.gguf: split\.no is missing, and 1 by "),
    (1, {"split.tensors.count": 7}, r"split\.tensors\.count is 7, and \d+ by "),
    (2, {"llama.embedding_length": 63}, r"llama\.embedding_length is 63, and 64 by .*not parts of one model"),
    (0, {"split.no": 3}, r"split\.no is 3 and split\.count 3"),
    (0, {"split.count": 2}, r"is part 1 of 2, and its name"),
])  # fmt: skip
def test_parts_that_disagree_are_refused(tmp_path: Path, number: int, changes: dict, message: str) -> None:
    first = split(tmp_path, changes={number: changes})
    with pytest.raises(ModelError, match=message):
        gguf_config(str(first))


def test_a_part_of_another_split_is_refused(tmp_path: Path) -> None:
    first, other = split(tmp_path / "a", 2), split(tmp_path / "b", 2, tied=False)
    part_name(tmp_path / "b", 2, 2).replace(part_name(tmp_path / "a", 2, 2))
    assert other.exists()
    with pytest.raises(ModelError, match=r"split\.tensors\.count is"):
        gguf_config(str(first))


def test_a_tensor_in_two_parts_is_named(tmp_path: Path) -> None:
    first = split(tmp_path, 2)
    content = part_name(tmp_path, 2, 2).read_bytes()
    own = list(GGUFFile(tmp_path / "whole.gguf").tensors)
    later = next(name for name in own[len(own) // 2 :] if name.startswith("blk.1.attn"))
    earlier = later.replace("blk.1", "blk.0")
    part_name(tmp_path, 2, 2).write_bytes(content.replace(later.encode(), earlier.encode()))
    with pytest.raises(ModelError, match=rf"tensor '{earlier}' is in an earlier part, too"):
        gguf_config(str(first))


def test_too_few_tensors_in_all_parts_are_refused(tmp_path: Path) -> None:
    counts = {number: {"split.tensors.count": 99} for number in range(2)}
    with pytest.raises(ModelError, match=r"its 2 parts have \d+ tensors, and split\.tensors\.count is 99"):
        gguf_config(str(split(tmp_path, 2, counts)))


def test_a_fifo_as_a_part_is_refused(tmp_path: Path) -> None:
    first = split(tmp_path, 2)
    part_name(tmp_path, 2, 2).unlink()
    os.mkfifo(part_name(tmp_path, 2, 2))
    with pytest.raises(ModelError, match=r"00002-of-00002\.gguf is a FIFO"):
        gguf_config(str(first))


def test_a_fifo_as_a_model_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf is a FIFO"):
        GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf is a FIFO"):
        resolve_model(str(tmp_path / "m.gguf"))
