"""A function with Triton kernels is captured also where its first call compiles them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = textwrap.dedent(
    """
    import torch
    import triton
    import triton.language as tl

    from graph_cache.core.buffers import BufferSpec
    from graph_cache.core.cache import GraphCache

    @triton.jit
    def scale(x, y, factor, size, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        tl.store(y + offsets, tl.load(x + offsets, mask) * factor, mask)

    cache = GraphCache(device="cuda", capture_on_miss=True)

    def double(x):
        y = torch.empty_like(x)
        scale[(triton.cdiv(x.numel(), 128),)](x, y, 2.0, x.numel(), BLOCK=128)
        return y

    graphed = cache.graphed("double", double, {"x": BufferSpec(("batch", 16), torch.float32)}, buckets=(4, 8))
    with torch.no_grad():
        for rows in (3, 3, 8, 3, 8, 8):
            x = torch.randn(rows, 16, device="cuda")
            assert torch.equal(graphed(x), 2 * x)
    print("replays", sum(cache.stats.replays.values()))
    """
)


@pytest.mark.gpu
def test_a_kernel_that_the_first_call_compiles_is_captured(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), environment.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 3
