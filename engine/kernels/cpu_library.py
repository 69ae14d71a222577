"""Compile cpu_kernels.cpp with this machine's compiler and load it as PyTorch operations.

The first process that needs the kernels compiles them, in about 5 seconds, into the folder `kernels` of the cache. The
file's name has a hash of all that determines its code: the source, the flags, the compiler and PyTorch. The flags name
instruction sets, so machines with other CPUs that share the folder use other files.

Without Linux, a compiler, a usable folder or AVX2, callers compute with PyTorch's own kernels: one log line says why.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from engine.config import cache_folder
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

SWITCH = "ENCORE_CPU_KERNELS"
"""Environment variable: "off" computes with PyTorch's kernels, "auto" (the default) with compiled ones if possible."""

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 300  # beyond this, the compiler hangs
STABLE_ABI = "0x020b000000000000"  # of PyTorch 2.11: the oldest that this package supports

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
LEVELS = {"avx512_bf16": (*_AVX512, "-mavx512bf16"), "avx512": _AVX512, "avx2": _AVX2}
"""Compiler flags by the instruction sets of a CPU."""

_lock = threading.Lock()


class KernelsUnavailable(Exception):
    """The kernels can't be compiled or loaded; the message says why."""


def cpu_level() -> str | None:
    """Return the name in LEVELS of this CPU's instruction sets; None: it has none, or the system isn't Linux."""
    if sys.platform != "linux":
        return None
    found = torch.backends.cpu.get_cpu_capability()
    if found == "AVX512":
        return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"
    return "avx2" if found == "AVX2" else None


def cpu_kernels_loaded() -> bool:
    """Return whether the compiled kernels can be called, after compiling and loading them if needed.

    The answer never changes within a process, so weights may be stored in the layout of the kernels. Raises ConfigError
    for an unknown value of the environment variable SWITCH.
    """
    with _lock:
        return _load_once()


@functools.cache
def _load_once() -> bool:
    switch = os.environ.get(SWITCH) or "auto"
    if switch not in ("auto", "off"):
        raise ConfigError(f"{SWITCH}={switch!r}: must be auto or off")
    level = cpu_level()
    if switch == "off" or level is None:
        logger.debug(
            "CPU kernels of PyTorch: %s", f"{SWITCH}=off" if switch == "off" else "no AVX2 or AVX-512, or not Linux"
        )
        return False
    try:
        load_kernels(level, os.path.join(cache_folder(), "kernels"))
    except KernelsUnavailable as reason:
        logger.warning("CPU kernels of PyTorch, which are slower: %s", reason)
        return False
    return True


def load_kernels(level: str, folder: str) -> None:
    """Load the kernels of a level from the folder, compiling them first if they aren't there.

    Raises KernelsUnavailable that says why they can't be used.
    """
    if hasattr(torch.ops.encore_cpu, "int4_linear"):
        raise KernelsUnavailable("others are loaded in this process")  # registering them twice would end it
    compiler = _find_compiler()
    key = hashlib.sha256("\0".join([*_version(compiler), *_command(compiler, level)]).encode() + SOURCE.read_bytes())
    path = os.path.join(folder, f"cpu-{level}-{key.hexdigest()[:24]}.so")
    try:
        _require_private(folder, is_folder=True)
        if not os.path.exists(path):
            _compile(compiler, level, path)
        _require_private(path, is_folder=False)
    except OSError as error:
        raise KernelsUnavailable(f"can't store compiled ones in {folder}: {error.strerror or error}") from error
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelsUnavailable(f"can't load {path}; delete it: {error}") from error
    if not _computes():
        raise KernelsUnavailable(f"{path} gives wrong results on this CPU; delete it")


def _find_compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX, which may have arguments, or the first that is installed."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    names = f"CXX={shlex.join(chosen)}, which is not installed" if chosen else f"none of {', '.join(COMPILERS)}"
    raise KernelsUnavailable(f"no C++ compiler to build the faster ones (found {names}); install g++")


def _version(compiler: list[str]) -> tuple[str, str]:
    """Return the versions of the compiler and of PyTorch."""
    try:
        found = subprocess.run([*compiler, "--version"], capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"{shlex.join(compiler)} --version failed: {error}") from error
    return found.stdout.decode(errors="replace"), torch.__version__


def _command(compiler: list[str], level: str) -> list[str]:
    """Return the compiler's command, without the output and what is linked."""
    root = Path(torch.__file__).parent
    return [
        *(*compiler, "-std=c++17", "-O3", "-w", "-fPIC", "-shared", "-fvisibility=hidden"),
        *(f"-DTORCH_TARGET_VERSION={STABLE_ABI}", *LEVELS[level], f"-I{root / 'include'}", str(SOURCE)),
    ]


def _compile(compiler: list[str], level: str, path: str) -> None:
    """Compile to `path`, which appears whole. Processes that compile at the same time replace each other's file."""
    started = time.monotonic()
    logger.info("compiling CPU kernels for %s with %s, once", level, compiler[0])
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(prefix="compile-", dir=os.path.dirname(path)) as scratch:
        partial = os.path.join(scratch, "kernels.so")
        command = [*_command(compiler, level), "-o", partial, f"-L{libraries}", "-ltorch_cpu"]
        try:
            subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS, check=True)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            line = next((line for line in lines if "error" in line), lines[-1])
            raise KernelsUnavailable(f"{compiler[0]} can't compile the faster ones: {line}") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise KernelsUnavailable(f"{compiler[0]} can't compile the faster ones: {error}") from error
        if not os.path.exists(partial):
            raise KernelsUnavailable(f"{compiler[0]} succeeded without compiling the faster ones")
        os.chmod(partial, 0o600)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    logger.info("compiled CPU kernels for %s in %.1f s: %s", level, time.monotonic() - started, path)


def _require_private(path: str, *, is_folder: bool) -> None:
    """Require that only this user could have written the code at `path`; create a folder with mode 0700.

    Raises KernelsUnavailable for a link, another owner, or a mode that lets others write: loading a file runs its code.
    """
    if is_folder:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
    found = os.lstat(path)
    kind = stat.S_ISDIR(found.st_mode) if is_folder else stat.S_ISREG(found.st_mode)
    problem = (
        f"is not a {'folder' if is_folder else 'regular file'}"
        if not kind
        else f"belongs to user {found.st_uid}"
        if found.st_uid != os.getuid()
        else f"has mode {stat.S_IMODE(found.st_mode):04o}, not 0700"
        if is_folder and stat.S_IMODE(found.st_mode) & 0o077
        else "can be written by others"
        if found.st_mode & 0o022
        else None
    )
    if problem:
        raise KernelsUnavailable(f"{path} {problem}, so its code is not trusted; delete it")


def _computes() -> bool:
    """Return whether the loaded kernels compute a product of ones right."""
    x, ones = torch.ones(1, 32, dtype=torch.bfloat16), torch.ones(512, dtype=torch.int8)
    out = int8_linear(x, ones, torch.ones(16, dtype=torch.float16), 16)
    return torch.equal(out, torch.full((1, 16), 32.0))


def int4_linear(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias in bfloat16 [M, N] of x [M, K] and a 4-bit W, in the layout of layers/int4_layout.py."""
    out = torch.empty(x.shape[0], 2 * packed.numel() // x.shape[1], dtype=torch.bfloat16)
    torch.ops.encore_cpu.int4_linear(out, _with_contiguous_rows(x), packed, scales, bias)
    return out


def int8_linear(x: Tensor, codes: Tensor, scales: Tensor, outputs: int, lows: Tensor | None = None) -> Tensor:
    """Return x Wᵀ in float32 [M, outputs] of bfloat16 x [M, K] and an 8-bit W, in the layout of int8_table.py."""
    out = torch.empty(x.shape[0], outputs, dtype=torch.float32)
    torch.ops.encore_cpu.int8_linear(out, _with_contiguous_rows(x), codes, scales, lows)
    return out


def int8_rows(ids: Tensor, codes: Tensor, scales: Tensor, inputs: int, lows: Tensor | None = None) -> Tensor:
    """Return rows ids int64 [T] of an 8-bit W [N, inputs] in bfloat16 [T, inputs]. Raises RuntimeError for bad ids."""
    out = torch.empty(ids.shape[0], inputs, dtype=torch.bfloat16)
    torch.ops.encore_cpu.int8_rows(out, ids.contiguous(), codes, scales, lows)
    return out


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Append k and v [b, KV, D] to bfloat16 pages and attend with q [b, H, D], D a multiple of 16: return [b, H * D].

    Row i is at positions[i] of the sequence whose pages are tables[rows[i]]; a position that several rows have keeps
    the last row's. Reads as many keys as a row has. Raises RuntimeError for pages and positions that don't exist.
    """
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.bfloat16)
    q, k, v = map(_with_contiguous_heads, (q, k, v))
    torch.ops.encore_cpu.paged_decode(out, k_pages, v_pages, q, k, v, tables, rows, positions, scale, window or 0)
    return out


def computes_bfloat16(x: Tensor) -> bool:
    """Return whether the kernels of single operations, below, take x: bfloat16 on a CPU, and they are loaded."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and cpu_kernels_loaded()


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x Wᵀ + bias in bfloat16 or float32 [M, N] of bfloat16 x [M, K] and W [N, K]. For few rows of x."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype)
    torch.ops.encore_cpu.dense_linear(out, _with_contiguous_rows(x), _with_contiguous_rows(weight), bias)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: bool) -> Tensor:
    """Return x [T, P, N] over the root mean square of its last dimension, times weight [P, N], in bfloat16.

    The quotient is rounded before the product. With `offset` the factor is 1 + weight and only the product is rounded.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    torch.ops.encore_cpu.rms_norm(out, _with_contiguous_heads(x), weight.contiguous(), eps, offset)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Apply RoPE to heads x [T, heads, D] with cos and sin [T, 1, dims], as layers/rotary.py, in bfloat16."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    cos, sin = (_with_contiguous_rows(one.squeeze(1)) for one in (cos, sin))
    torch.ops.encore_cpu.rotate(out, _with_contiguous_heads(x), cos, sin, interleaved)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, N] in bfloat16; silu is rounded before the product."""
    out = torch.empty(gate.shape, dtype=torch.bfloat16)
    torch.ops.encore_cpu.silu_mul(out, _with_contiguous_rows(gate), _with_contiguous_rows(up))
    return out


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
