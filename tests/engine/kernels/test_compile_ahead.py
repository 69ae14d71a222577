"""Compilation ahead of launches, by Triton's own compiler for a GPU that need not exist."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from engine.kernels import compile_worker
from engine.kernels.compile_ahead import _Tasks, compile_ahead
from engine.kernels.launch import has_hopper_kernels
from engine.kernels.small_batch_gemm import rms_norm
from engine.kernels.step_kernels import gate_kernel
from engine.utils.processes.child import ChildProcess, running_children

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # from Triton: Python's ast
CPU = torch.device("cpu")


class Driver:
    """A Triton driver that can compile but not launch. `device` numbers Triton's caches in memory."""

    def __init__(self, device: int):
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compilations(tmp_path, monkeypatch) -> Any:
    """A list of (kernel, whether Triton's cache on disk had it) that grows with every compilation in this process."""
    found = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.fn.__name__, cache_hit))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    triton.runtime.driver.set_active(Driver(next(DEVICES)))
    yield found
    if torch.cuda.is_available():  # else there is no other driver
        triton.runtime.driver.reset_active()


@pytest.fixture
def starts(monkeypatch) -> list[ChildProcess]:
    """The compiling processes, in the order of their starts."""
    started = []

    def start(*args: Any) -> ChildProcess:
        started.append(ChildProcess(*args))
        return started[-1]

    monkeypatch.setattr(compile_worker, "ChildProcess", start)
    return started


DEVICES = iter(range(1000, 2000))


def norm(width: int, rows: int = 3) -> torch.Tensor:
    out = torch.full((rows, width), 7.0, dtype=torch.bfloat16)
    return rms_norm(torch.ones_like(out), torch.ones(width, dtype=torch.bfloat16), 1e-6, out)


def gate(block: int) -> None:
    product, out = torch.zeros(2, 128), torch.zeros(2, 64)
    gate_kernel[(2, 1)](product, out, W=64, BLOCK=block, PDL=False)


def test_each_specialisation_compiles_once_and_nothing_is_launched(compilations, starts):
    outputs = []

    def run() -> None:
        outputs.extend(norm(width, rows) for width in (64, 128) for rows in (1, 16, 17))

    found = compile_ahead(run, CPU, workers=2)
    assert found is not None and (found.kernels, found.failed) == (2, 0)
    assert compilations == [("norm_kernel", True)] * 2  # compiled in other processes under the same keys
    assert 1 <= len(starts) <= 2 and running_children() == []
    assert all((out == 7).all() for out in outputs)


def test_kernels_for_hopper_gpus_have_the_same_keys_in_both_processes(compilations, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if not has_hopper_kernels(torch.device("cuda", 99), torch.bfloat16, 64, 16):
        pytest.skip("needs Triton 3.6 or 3.7")
    from engine.kernels import hopper_prefill  # other versions of Triton may not have what it imports

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
    cache, table = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.int64)
    q, out = torch.zeros(3, 8, 64, dtype=torch.bfloat16), torch.zeros(3, 512, dtype=torch.bfloat16)
    tiles = torch.zeros(9, dtype=torch.int32)
    compile_ahead(lambda: hopper_prefill.hopper_prefill(q, cache, cache, table, tiles, 0.1, out), CPU)
    assert compilations == [("hopper_prefill_kernel", True)]


class Hopper:
    multi_processor_count = 132


def test_later_launches_find_the_kernels_in_memory_and_on_disk(compilations, starts):
    compile_ahead(lambda: [norm(64), gate(64)], CPU)
    compilations.clear()
    starts.clear()
    again = compile_ahead(lambda: [norm(64), gate(64)], CPU)
    assert again is not None and again.kernels == 0 and compilations == []
    triton.runtime.driver.set_active(Driver(next(DEVICES)))  # as in another process, with nothing in memory
    compile_ahead(lambda: [norm(64), gate(64)], CPU)
    assert sorted(compilations) == [("gate_kernel", True), ("norm_kernel", True)] and starts == []


def test_the_recorded_kernel_is_the_one_that_a_launch_compiles(compilations):
    compile_ahead(lambda: norm(64), CPU)
    triton.runtime.driver.set_active(Driver(next(DEVICES)))
    compilations.clear()
    with pytest.raises(AttributeError, match="launcher_cls"):  # compiled, and then the driver can't launch it
        norm(64)
    assert compilations == [("norm_kernel", True)]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_all_kernels(compilations, rank):
    found = compile_ahead(lambda: [norm(64), norm(128), gate(64)], CPU, rank=rank, num_ranks=2)
    assert found is not None and found.kernels == len(compilations) == 3


def test_a_kernel_that_does_not_compile_is_logged_and_raises_at_its_launch(compilations, caplog):
    with caplog.at_level(logging.INFO):
        found = compile_ahead(lambda: [gate(48), norm(64)], CPU)
    assert found is not None and (found.kernels, found.failed) == (2, 1)
    assert [name for name, _ in compilations] == ["norm_kernel"]
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "1 of them failed" in error and "power of 2" in error
    with pytest.raises(triton.CompilationError, match="power of 2"):
        gate(48)


def test_kernels_that_can_not_be_loaded_count_as_failed(compilations, monkeypatch, caplog):
    """The driver of these tests loads none. Both have one signature: a worker loads the first, `finish` the other."""
    monkeypatch.setattr(_Tasks, "_set_device", lambda tasks: None)
    found = compile_ahead(lambda: [norm(64), norm(128)], torch.device("cuda"))
    assert found is not None and (found.kernels, found.failed) == (2, 2)
    assert "2 of them failed to compile or load" in caplog.text and "launcher_cls" in caplog.text


def test_an_error_of_the_run_is_raised_and_launches_work_as_before(compilations):
    launch = triton.JITFunction.run

    def run() -> None:
        norm(64)
        raise ValueError("no such weight")

    with pytest.raises(ValueError, match="no such weight"):
        compile_ahead(run, CPU)
    assert triton.JITFunction.run is launch and running_children() == []
    with pytest.raises(AttributeError, match="launcher_cls"):  # compiled, and then the driver can't launch it
        norm(64)


def kill(child: ChildProcess) -> None:
    child.kill()
    child.wait()


def refuse(child: ChildProcess) -> None:
    kill(child)
    raise OSError("no more processes")


@pytest.mark.parametrize("end", [kill, refuse])
def test_kernels_of_a_process_that_fails_compile_in_this_one(compilations, monkeypatch, caplog, end):
    def start(*args: Any) -> ChildProcess:
        child = ChildProcess(*args)
        end(child)
        return child

    monkeypatch.setattr(compile_worker, "ChildProcess", start)
    found = compile_ahead(lambda: [norm(64), gate(64)], CPU, workers=1)
    assert found is not None and (found.kernels, found.failed) == (2, 0)
    assert sorted(compilations) == [("gate_kernel", False), ("norm_kernel", False)]
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("2 kernels were compiled in this process")


def test_what_can_not_be_pickled_compiles_in_this_process(compilations, monkeypatch, caplog):
    def dump(pickler: Any, value: Any) -> None:
        raise pickle.PicklingError("a constant without a name")

    monkeypatch.setattr("engine.kernels.compile_worker._Pickler.dump", dump)
    compile_ahead(lambda: norm(64), CPU)
    assert compilations == [("norm_kernel", False)] and "a constant without a name" in caplog.text


MODULES = [path.stem for path in Path(compile_worker.__file__).parent.glob("*_kernels.py")]


def run_python(code: str, *arguments: str) -> bytes:
    """Run the code in a process of its own; return what it printed."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, check=True, cwd=Path(__file__).parents[3], timeout=600, stdout=subprocess.PIPE
    ).stdout


def test_compiling_processes_import_neither_torch_nor_cuda():
    code = "import importlib, sys, engine.kernels.compile_worker\n"
    code += f"for name in {MODULES}:\n    importlib.import_module('engine.kernels.' + name)\n"
    code += "assert 'torch' not in sys.modules"
    run_python(code)


KEYS = """
import importlib, json, sys, triton
modules = [importlib.import_module("engine.kernels." + name) for name in sys.argv[2:]]
kernels = {f"{module.__name__}.{name}": value for module in modules for name, value in vars(module).items()
           if isinstance(value, triton.JITFunction)}
if sys.argv[1] == "at launch":
    import torch
    from engine.kernels.compile_ahead import compile_ahead
    del triton.AsyncCompileMode
    compile_ahead(lambda: None, torch.device("cpu"))
else:
    from engine.kernels.compile_worker import compute_key
    for name in sorted(kernels, reverse=sys.argv[1] == "reverse"):
        compute_key(kernels[name])
print(json.dumps({name: kernels[name].cache_key for name in sorted(kernels, reverse=True)}))
"""


def test_keys_do_not_depend_on_the_order_in_which_a_process_uses_kernels():
    """Else a compiling process would cache a kernel under a key that no launch looks up."""
    keys = {order: json.loads(run_python(KEYS, order, *MODULES)) for order in ("forward", "reverse", "at launch")}
    assert len(keys["forward"]) > 50 and keys["forward"] == keys["reverse"] == keys["at launch"]


def test_launches_of_other_packages_and_other_threads_are_left_alone(monkeypatch):
    launches = []

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((kernel.__name__, warmup))

    monkeypatch.setattr(triton.JITFunction, "run", launch)

    def run() -> None:
        gate(64)
        foreign_kernel[(1,)](torch.zeros(1))
        thread = threading.Thread(target=gate, args=(128,))
        thread.start()
        thread.join()

    compile_ahead(run, CPU)
    assert launches == [("gate_kernel", True), ("foreign_kernel", False), ("gate_kernel", False)]


def test_a_triton_without_the_interface_compiles_at_the_first_launch(monkeypatch, caplog):
    monkeypatch.delattr(triton, "AsyncCompileMode")
    with caplog.at_level(logging.INFO):
        assert compile_ahead(lambda: pytest.fail("nothing must run"), CPU) is None
    assert "can't compile ahead" in caplog.text


@triton.jit
def foreign_kernel(x_ptr):
    pass
