"""Manifest: persistence over restarts, damaged files, and histograms for the tuner."""

from __future__ import annotations

import json
import logging
import os

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from graph_cache.core.keys import GraphKey
from graph_cache.core.manifest import VERSION, Manifest, histogram_from_metrics
from graph_cache.errors import ManifestError
from graph_cache.tuning.tuner import tune

VARIANT = (("causal", True), ("name", "x"), ("scale", 0.5), ("width", 128), ("window", None))


def key(bucket, phase="decode", variant=(), scope="block"):
    return GraphKey("model", scope, phase, bucket, variant)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "manifest.json"


def filled(path) -> Manifest:
    manifest = Manifest(path, "model-a")
    manifest.observe("model", "decode", 3, VARIANT, 10)
    manifest.observe("model", "decode", 3, (), 5)
    manifest.observe("model", "decode", 7)
    manifest.observe("model", "prefill", 64, count=2)
    manifest.replayed(key(8, variant=VARIANT), 11)
    manifest.captured("model", "decode", 8)
    manifest.captured("model", "decode", 4)
    return manifest


def test_a_restart_finds_what_was_saved(path):
    filled(path).save()
    again = Manifest.load(path, "model-a")
    assert again.histogram(phase="decode") == {3: 15, 7: 1}
    assert again.histogram() == {3: 15, 7: 1, 64: 2}
    assert again.histogram(site="other") == {}
    assert again.replays(key(8, variant=VARIANT)) == 11 and again.replays(key(8)) == 0
    assert again.captured_sizes("model", "decode") == (4, 8)
    assert again.captured_sizes("model", "prefill") == ()


def test_counts_add_up_over_restarts_and_merges(path):
    filled(path).save()
    again = Manifest.load(path, "model-a")
    again.observe("model", "decode", 3, VARIANT, 1)
    again.replayed(key(8, variant=VARIANT))
    again.merge(filled(path))
    assert again.histogram(phase="decode") == {3: 31, 7: 2}
    assert again.replays(key(8, variant=VARIANT)) == 23


def test_static_values_keep_their_types(path):
    filled(path).save()
    loaded = Manifest.load(path, "model-a")
    # 1 == True in Python, so compare the types in the rewritten file.
    loaded.save()
    statics = next(entry["statics"] for entry in json.loads(path.read_text())["rows"] if entry["statics"])
    assert statics == [list(pair) for pair in VARIANT] and statics[0][1] is True


def test_a_missing_file_is_an_empty_manifest_without_a_warning(path, caplog):
    with caplog.at_level(logging.WARNING):
        assert Manifest.load(path, "model-a").histogram() == {}
    assert caplog.records == []


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000, b"{}",
        b'{"version": 1, "fingerprint": "model-a"}',
        b'{"version": 1, "fingerprint": "model-a", "rows": 3, "replays": [], "captured": []}',
        b'{"version": 1, "fingerprint": "model-a", "rows": [], "replays": [{}], "captured": []}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_kept_aside_and_counts_as_empty(path, caplog, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        manifest = Manifest.load(path, "model-a")
    assert manifest.histogram() == {}
    assert path.with_name("manifest.json.bad").read_bytes() == content and not path.exists()
    assert len(caplog.records) == 1 and ".bad" in caplog.text


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        ("rows", "site", 3), ("rows", "steps", [[1, -2]]), ("rows", "steps", [["1", 2]]), ("rows", "steps", [[1]]),
        ("rows", "statics", [["a", [1]]]), ("rows", "statics", 5), ("replays", "bucket", None),
        ("replays", "count", True), ("captured", "buckets", ["8"]), ("captured", "phase", None),
    ],
)  # fmt: skip
def test_one_invalid_value_discards_the_whole_manifest(path, caplog, table, field, value):
    filled(path).save()
    content = json.loads(path.read_text())
    content[table][-1][field] = value
    path.write_text(json.dumps(content))
    manifest = Manifest.load(path, "model-a")
    assert manifest.histogram() == {} and manifest.captured_sizes("model", "decode") == ()
    assert path.with_name("manifest.json.bad").exists()


@pytest.mark.parametrize("change", [{"fingerprint": "model-b"}, {"version": VERSION + 1}])
def test_another_models_or_versions_manifest_is_not_used(path, caplog, change):
    filled(path).save()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with caplog.at_level(logging.WARNING):
        assert Manifest.load(path, "model-a").histogram() == {}
    assert len(caplog.records) == 1
    assert path.exists() and not path.with_name("manifest.json.bad").exists()


def test_an_unreadable_path_never_stops_a_start(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert Manifest.load(tmp_path, "model-a").histogram() == {}
    assert "can't be read" in caplog.text


def test_read_accepts_any_fingerprint(path):
    filled(path).save()
    found = Manifest.read(path)
    assert found.fingerprint == "model-a" and found.histogram(phase="decode") == {3: 15, 7: 1}


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"version": 1}', b'{"version": 2, "fingerprint": "model-a"}'])
def test_read_raises_on_damage_and_leaves_the_file_in_place(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ManifestError, match="manifest.json is"):
        Manifest.read(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["manifest.json"]
    with pytest.raises(ManifestError, match="can't be read"):
        Manifest.read(path.with_name("other.json"))


def test_a_failed_save_leaves_the_last_file_and_no_temporary_files(path, monkeypatch):
    filled(path).save()
    before = path.read_bytes()

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    manifest = filled(path)
    manifest.observe("model", "decode", 1)
    with pytest.raises(ManifestError, match="No space left"):
        manifest.save()
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["manifest.json"]


def test_an_unwritable_path_raises_manifest_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ManifestError, match="make the folder writable"):
        Manifest(tmp_path / "file" / "manifest.json", "model-a").save()


def test_order_is_by_use_then_largest_first(path):
    manifest = Manifest(path, "model-a")
    manifest.observe("model", "decode", 3, count=100)
    manifest.observe("model", "decode", 4, count=1)
    manifest.observe("model", "decode", 20, count=7)
    keys = [key(bucket) for bucket in (1, 2, 4, 8, 32, 64)]
    assert [each.bucket for each in manifest.order(keys)] == [4, 32, 64, 8, 2, 1]


def test_order_rounds_by_current_buckets_and_by_variant(path):
    manifest = Manifest(path, "model-a")
    manifest.observe("model", "decode", 3, count=100)
    manifest.observe("model", "decode", 20, VARIANT, count=500)
    manifest.observe("model", "decode", 99, count=10_000)
    keys = [key(16), key(64), key(64, variant=VARIANT), key(64, phase="prefill"), key(16, scope="layer"), key(16)]
    ordered = manifest.order(iter(keys))
    assert ordered[0] == key(64, variant=VARIANT)
    assert set(ordered[1:3]) == {key(16), key(16, scope="layer")}
    assert len(ordered) == 5


def metrics(*samples) -> str:
    registry = CollectorRegistry()
    rows = Counter("encore_graph_batch_rows", "Steps by real rows", ["site", "phase", "rows"], registry=registry)
    other = Counter("encore_graph_replays", "Replays", ["bucket"], registry=registry)
    other.labels(bucket="512").inc(9)
    for site, phase, size, count in samples:
        rows.labels(site=site, phase=phase, rows=str(size)).inc(count)
    return generate_latest(registry).decode()


def test_a_metrics_snapshot_gives_the_histogram_that_tune_takes():
    text = metrics(("model", "decode", 3, 40), ("draft", "decode", 3, 2), ("model", "prefill", 96, 5))
    assert histogram_from_metrics(text) == {3: 42, 96: 5}
    assert histogram_from_metrics(text, phase="decode") == {3: 42}
    assert histogram_from_metrics(text, site="model", phase="decode") == {3: 40}
    assert tune(histogram_from_metrics(text, phase="decode"), max_size=8).sizes == (3, 8)


@pytest.mark.parametrize(
    "text",
    [
        "", "<html></html>", metrics(), 'encore_graph_batch_rows_total{rows="x"} 1',
        'encore_graph_batch_rows_total{rows="3"} NaN', 'encore_graph_batch_rows_total{rows="3"} +Inf',
        'encore_graph_batch_rows_total{rows="-3"} 1', "encore_graph_batch_rows_total 4", '{"rows": 3}',
    ],
)  # fmt: skip
def test_text_without_the_samples_is_refused(text):
    with pytest.raises(ManifestError, match="metrics snapshot"):
        histogram_from_metrics(text)


def test_a_filter_without_samples_is_named_in_the_error():
    with pytest.raises(ManifestError, match="phase='verify'"):
        histogram_from_metrics(metrics(("model", "decode", 3, 1)), phase="verify")
