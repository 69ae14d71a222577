"""Compiled CPU kernels: products beside a float32 reference, and every way in which they can be unavailable."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu_library import (
    LEVELS,
    KernelsUnavailable,
    cpu_kernels_loaded,
    cpu_level,
    int4_linear,
    int8_linear,
    int8_rows,
    load_kernels,
)
from engine.layers.int4 import dequantize
from engine.layers.int4_layout import CompiledLayout
from engine.layers.int8_table import Int8Table, dequantize_int8
from graph_cache.backends.cpu import CpuBackend

ROOT = Path(__file__).resolve().parents[3]
needs_kernels = pytest.mark.skipif(not cpu_kernels_loaded(), reason="needs a C++ compiler and AVX2")
SHAPES = [(16, 32), (48, 96), (160, 64), (576, 1536), (1040, 288)]


def levels() -> list[str]:
    """The levels that this CPU can run: they are in order, each a subset of the one before."""
    names, level = list(LEVELS), cpu_level()
    return names[names.index(level) :] if level else []


def random_int4(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a random weight as packed codes and scales, and in float32."""
    rng, layout = torch.Generator().manual_seed(rows + inputs), CompiledLayout()
    codes = torch.randint(0, 16, (rows, inputs), generator=rng, dtype=torch.uint8)
    values = torch.rand(rows, inputs // 32, 2, generator=rng).sub(0.3).mul(0.02).bfloat16()
    scales = torch.empty(layout.scales_shape(rows, inputs), dtype=torch.bfloat16)
    layout.write_scales(scales, 0, values)
    return layout.pack(codes), scales, dequantize(codes, values[..., 0], values[..., 1])


def random_int8(rows: int, inputs: int, group: int = 32) -> tuple[Int8Table, torch.Tensor]:
    """Return a random table and its weight in float32; some scales are too small to be normal float16 numbers."""
    rng, table = torch.Generator().manual_seed(rows + inputs), Int8Table(rows, inputs, group)
    codes = torch.randint(-128, 128, (rows, inputs), generator=rng, dtype=torch.int8)
    scales = torch.randn(rows, inputs // group, generator=rng).mul(0.01).half()
    scales[::5] = 3e-6
    table.store(codes, scales)
    return table, dequantize_int8(codes, scales)


def check_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, step: float) -> None:
    """Assert that out is x Wᵀ up to float32 sums and one rounding, by `step` of the result."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert bool(((out.double() - exact).abs() <= exact.abs() * step + size * 2.0**-18).all())


def check_products() -> None:
    """Check all kernels that this process has loaded on many shapes."""
    for outputs, inputs in SHAPES:
        packed, scales, weight = random_int4(outputs, inputs)
        tables = [random_int8(outputs - 5, inputs, group) for group in (16, 32)]
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21):
            # a row of a wider matrix, so that rows are not next to each other
            x = torch.randn(rows, inputs + 8, generator=torch.Generator().manual_seed(rows)).bfloat16()[:, :inputs]
            check_product(int4_linear(x, packed, scales, None), x, weight, 2.0**-8)
            for table, table_weight in tables:
                check_product(int8_linear(x, table.codes, table.scales, table.rows), x, table_weight, 0.0)
        ids = torch.tensor([outputs - 6, 0, 3, 0])
        for table, table_weight in tables:
            rows = int8_rows(ids, table.codes, table.scales, inputs)
            assert torch.equal(rows, table_weight[ids].bfloat16())


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run Python code in a separate process, whose cache is `folder`, and return its output."""
    variables = {name: value for name, value in os.environ.items() if name not in ("ENCORE_CPU_KERNELS", "CXX")}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ENCORE_CACHE": str(folder), **environment}
    setup = "import logging; logging.basicConfig(format='%(levelname)s %(message)s')\n"
    return subprocess.run([sys.executable, "-c", setup + code], env=variables, capture_output=True, text=True, cwd=ROOT)


LOAD = """
from engine.kernels.cpu_library import load_kernels
from tests.engine.kernels.test_cpu_library import check_products
load_kernels({level!r}, {folder!r})
from tests.engine.kernels.test_cpu_operations import check_operations
check_products()
check_operations()
"""

FALLBACK = """
import torch
from engine.kernels.cpu_library import cpu_kernels_loaded
from engine.layers.int4 import Int4Weight, effective_weight, load_dense
from engine.layers.linear import Linear
assert not cpu_kernels_loaded() and not cpu_kernels_loaded()
layer = Linear({"w": 48}, 64, bias=False, dtype=torch.bfloat16, device="cpu", method=Int4Weight(keep_dense=False))
load_dense(layer, torch.randn(48, 64))
x = torch.randn(3, 64).bfloat16()
assert (layer(x).float() - x.float() @ effective_weight(layer).T).abs().max() < 0.1
"""


@pytest.fixture
def nothing_loaded(monkeypatch) -> None:
    """Let this process look as if it had loaded no kernels."""
    monkeypatch.setattr(torch.ops, "encore_cpu", object())


@needs_kernels
def test_products_match_a_float32_reference() -> None:
    check_products()


@needs_kernels
def test_each_level_has_a_file_in_a_shared_folder_and_matches(tmp_path: Path) -> None:
    """Machines with other CPUs may share the cache: none loads another's file."""
    found = levels()[1:]  # the test above checks the first
    for level in found:
        done = run(LOAD.format(level=level, folder=str(tmp_path / "kernels")), tmp_path, ENCORE_CPU_KERNELS="off")
        assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in (tmp_path / "kernels").iterdir()) if found else []
    assert [name.split("-")[1] for name in files] == sorted(found)


@needs_kernels
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads() -> None:
    packed, scales, _ = random_int4(1040, 288)
    table, _ = random_int8(1000, 288)
    x, bias = torch.randn(13, 288).bfloat16(), torch.randn(1040).bfloat16()

    def products(rows: torch.Tensor) -> list[torch.Tensor]:
        return [
            int4_linear(rows, packed, scales, bias),
            int8_linear(rows, table.codes, table.scales, table.rows),
        ]

    before, whole = torch.get_num_threads(), products(x)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, products(x), whole))
            for row in range(len(x)):
                assert all(
                    torch.equal(one[0], all_[row]) for one, all_ in zip(products(x[row : row + 1]), whole, strict=True)
                )
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_wrong_tensors_are_refused() -> None:
    packed, scales, _ = random_int4(48, 96)
    x = torch.randn(2, 96).bfloat16()
    wrong = [
        lambda: int4_linear(x.float(), packed, scales, None),
        lambda: int4_linear(x, packed, scales[:-1], None),
        lambda: int4_linear(x, packed, scales.float(), None),
        lambda: int4_linear(x, packed, scales, torch.zeros(47, dtype=torch.bfloat16)),
        lambda: int4_linear(x[:, :64].contiguous(), packed, scales, None),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError, match="encore_cpu"):
            call()
    table, _ = random_int8(20, 32)
    for token in (-1, 32):
        with pytest.raises(RuntimeError, match="out of range"):
            int8_rows(torch.tensor([token]), table.codes, table.scales, 32)


@needs_kernels
def test_a_capture_records_the_kernels_and_replays_them_without_python() -> None:
    packed, scales, weight = random_int4(48, 96)
    table, table_weight = random_int8(37, 32)
    x, logits, backend = torch.zeros(3, 96).bfloat16(), torch.empty(3, 37), CpuBackend()

    def step() -> None:
        hidden = int4_linear(x, packed, scales, None) * 2
        logits.copy_(int8_linear(hidden[:, 8:40], table.codes, table.scales, table.rows))

    graph = backend.capture(step, backend.new_memory(), [], None)
    assert graph.engine == "torchscript"
    for seed in range(2):
        x.copy_(torch.randn(3, 96, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = logits.clone()
        step()
        assert torch.equal(replayed, logits)
        wanted = (x.float() @ weight.T * 2)[:, 8:40].bfloat16().float() @ table_weight.T
        assert (replayed - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no-such-compiler.*not installed.*install g"),
        ("{folder}/broken", "broken can't compile.*error: no such instruction"),
        ("{folder}/lazy", "lazy succeeded without compiling"),
        ("{folder}/silent", "silent --version failed"),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_error(
    tmp_path: Path, monkeypatch, nothing_loaded, compiler: str, reason: str
) -> None:
    scripts = {
        "broken": "echo x; [ $1 = --version ] || { echo 'a.cpp:1: error: no such instruction' >&2; exit 1; }",
        "lazy": "echo x",
        "silent": "exit 3",
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", compiler.format(folder=tmp_path))
    with pytest.raises(KernelsUnavailable, match=reason):
        load_kernels("avx2", str(tmp_path / "kernels"))
    assert not (tmp_path / "kernels").exists() or not any((tmp_path / "kernels").iterdir())


def test_without_a_compiler_pytorch_computes_and_one_line_says_why(tmp_path: Path) -> None:
    done = run(FALLBACK, tmp_path, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "CPU kernels" in line]
    assert len(lines) == (cpu_level() is not None)
    assert all("WARNING" in line and "no-such-compiler" in line for line in lines)


def test_the_switch_chooses_pytorch_without_a_warning(tmp_path: Path) -> None:
    done = run(FALLBACK, tmp_path, ENCORE_CPU_KERNELS="off")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert not (tmp_path / "kernels").exists()
    done = run(FALLBACK, tmp_path, ENCORE_CPU_KERNELS="fast")
    assert "ConfigError: ENCORE_CPU_KERNELS='fast': must be auto or off" in done.stderr


def test_a_folder_that_cannot_be_written_is_named(nothing_loaded) -> None:
    with pytest.raises(KernelsUnavailable, match="can't store compiled ones in /proc/none/kernels"):
        load_kernels("avx2", "/proc/none/kernels")


def test_a_folder_that_others_may_write_is_not_trusted(tmp_path: Path, nothing_loaded) -> None:
    for mode in (0o755, 0o770, 0o777):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(KernelsUnavailable, match=f"has mode 0{mode:o}, not 0700"):
            load_kernels("avx2", str(folder))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(KernelsUnavailable, match="is not a folder"):
        load_kernels("avx2", str(tmp_path / "link"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, nothing_loaded) -> None:
    (tmp_path / "kernels").mkdir(mode=0o700)
    os.chown(tmp_path / "kernels", 12345, -1)
    with pytest.raises(KernelsUnavailable, match="belongs to user 12345"):
        load_kernels("avx2", str(tmp_path / "kernels"))


@needs_kernels
def test_processes_that_compile_at_once_both_get_the_kernels(tmp_path: Path) -> None:
    code = LOAD.format(level=levels()[-1], folder=str(tmp_path / "kernels"))
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda _: run(code, tmp_path, ENCORE_CPU_KERNELS="off"), range(2)):
            assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.suffix == ".so" and file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700
    written = file.stat().st_mtime_ns
    done = run(code, tmp_path, ENCORE_CPU_KERNELS="off")
    assert done.returncode == 0 and file.stat().st_mtime_ns == written  # not compiled again
    file.chmod(0o602)
    done = run(FALLBACK, tmp_path, ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == 0 and f"{file} can be written by others" in done.stderr, done.stderr
    file.chmod(0o600)
    file.write_bytes(b"damaged")
    done = run(FALLBACK, tmp_path, ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == 0 and f"can't load {file}" in done.stderr, done.stderr
