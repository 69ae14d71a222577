"""The benchmark of embeddings runs in Python and over HTTP."""

import json

from benchmarks.serving import embeddings


def test_it_reports_both_ways(tmp_path):
    found = tmp_path / "found.json"
    arguments = ["--shape", "tiny", "--batches", "1,3", "--tokens", "16", "--clients", "2", "--seconds", "1"]
    assert embeddings.main([*arguments, "--repeats", "1", "--json", str(found)]) == 0
    rows = json.loads(found.read_text())["rows"]
    assert [(row["way"], row["batch"]) for row in rows] == [("python", 1), ("python", 3), ("http", 2)]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert rows[-1]["request_ms"]["p50"] <= rows[-1]["request_ms"]["p99"]
