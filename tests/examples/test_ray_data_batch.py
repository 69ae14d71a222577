"""`examples/ray_data_batch.py` over a Parquet file on a local Ray: by a pool of engines, and by Serve's handle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from tests.soak.serving import ENVIRONMENT

parquet = pytest.importorskip("pyarrow.parquet", reason="Ray Data needs the extra ray-data")
pytest.importorskip("pandas", reason="Ray Data needs the extra ray-data")
pytest.importorskip("ray", reason="Ray Data needs the extra ray-data")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["pool", "serve"])
def test_every_prompt_of_a_parquet_file_gets_its_text(tiny_model: Path, tmp_path: Path, by: str) -> None:
    import pyarrow

    prompts = [f"red fox {number}" for number in range(40)]
    parquet.write_table(pyarrow.table({"prompt": prompts}), tmp_path / "in.parquet")
    command = [
        sys.executable, str(ROOT / "examples/ray_data_batch.py"), "in.parquet", "out", "--model", str(tiny_model),
        "--by", by, "--engines", "2", "--num-threads", "1", "--max-tokens", "8",
    ]  # fmt: skip
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ENVIRONMENT.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = parquet.read_table(tmp_path / "out").to_pylist()
    with Engine(EngineConfig(model=str(tiny_model), warmup="lazy", graph_manifest="none")) as engine:
        params = {"max_tokens": 8, "temperature": 0.0}
        wanted = [output.text for output in engine.generate(prompts, params, use_tqdm=False)]
    assert sorted((row["prompt"], row["text"]) for row in rows) == sorted(zip(prompts, wanted, strict=True))
