"""Usage counts on disk: a restart warms the most used graphs first, and the tuner reads batch sizes from them.

One JSON file holds the real rows per step, the replays per graph, and the captured sizes. A manifest is only an
optimisation: one that is missing, damaged or of another model counts as empty and never prevents a start. A Manifest is
not thread-safe.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graph_cache.core.keys import GraphKey, Variant
from graph_cache.errors import ManifestError
from graph_cache.utils.validation import is_whole_number

VERSION = 1
ROWS_METRIC = "encore_graph_batch_rows_total"  # labels: site, phase, rows; counts steps by real rows

_logger = logging.getLogger(__name__)

_SiteVariant = tuple[str, str, Variant]  # site, phase, variant
_PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # raised by parsing a damaged file


class Manifest:
    """Usage counts for one model. `fingerprint` is any string that changes when the graphs would."""

    def __init__(self, path: str | os.PathLike[str], fingerprint: str):
        self.path = Path(path)
        self.fingerprint = fingerprint
        self._rows: dict[_SiteVariant, Counter[int]] = {}
        self._replays: Counter[GraphKey] = Counter()
        self._captured: dict[tuple[str, str], set[int]] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str], fingerprint: str) -> Manifest:
        """Load the manifest at `path`, or return an empty one if there is none for this fingerprint. Never raises.

        A damaged file is moved to `path` + `.bad`, with a warning in the log. A file of another fingerprint or version
        stays until `save` replaces it.
        """
        manifest = cls(path, fingerprint)
        try:
            found = json.loads(manifest.path.read_text(encoding="utf-8"))
            version, other = found["version"], found["fingerprint"]
            if version == VERSION and other == fingerprint:
                manifest._add_counts(found)
            else:
                _logger.warning(
                    "manifest %s is of version %s for %s, expected version %s for %s: starting an empty one",
                    path, version, other, VERSION, fingerprint,
                )  # fmt: skip
        except FileNotFoundError:
            _logger.debug("no manifest at %s yet", path)
        except OSError as error:
            _logger.warning("manifest %s can't be read (%s): starting an empty one", path, error)
        except _PARSE_ERRORS as error:
            manifest = cls(path, fingerprint)
            manifest._move_aside(error)
        return manifest

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """Load the manifest at `path` whatever its fingerprint, for inspection (as the tuner does). Changes no file.

        Raises ManifestError for a file that is missing, damaged, or of another version.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found["version"] != VERSION:
                raise ManifestError(
                    f"manifest {path} is of version {found['version']}, not {VERSION}: create a new one"
                )
            manifest = cls(path, _string(found["fingerprint"]))
            manifest._add_counts(found)
        except OSError as error:
            raise ManifestError(f"manifest {path} can't be read ({error}): give a saved manifest") from error
        except _PARSE_ERRORS as error:
            raise ManifestError(f"manifest {path} is damaged ({error!r}): give a saved manifest") from error
        return manifest

    def observe(self, site: str, phase: str, rows: int, variant: Variant = (), count: int = 1) -> None:
        """Count `count` steps with `rows` real rows, run from a graph or eager."""
        counts = self._rows.get((site, phase, variant))
        if counts is None:
            counts = self._rows[site, phase, variant] = Counter()
        counts[rows] += count

    def replayed(self, key: GraphKey, count: int = 1) -> None:
        """Count `count` replays of the graph `key`."""
        self._replays[key] += count

    def captured(self, site: str, phase: str, bucket: int) -> None:
        """Record that a graph of `bucket` rows was captured."""
        self._captured.setdefault((site, phase), set()).add(bucket)

    def histogram(self, site: str | None = None, phase: str | None = None) -> dict[int, int]:
        """Return the number of steps by real rows, ascending, as input for `tune`. None sums over sites or phases."""
        total: Counter[int] = Counter()
        for (entry_site, entry_phase, _), counts in self._rows.items():
            if site in (None, entry_site) and phase in (None, entry_phase):
                total.update(counts)
        return dict(sorted(total.items()))

    def replays(self, key: GraphKey) -> int:
        """Return the number of replays of `key`, including those loaded from disk."""
        return self._replays[key]

    def captured_sizes(self, site: str | None = None, phase: str | None = None) -> tuple[int, ...]:
        """Return the captured bucket sizes, ascending. None includes every site or phase."""
        chosen = (
            sizes
            for (entry_site, entry_phase), sizes in self._captured.items()
            if site in (None, entry_site) and phase in (None, entry_phase)
        )
        return tuple(sorted(set().union(*chosen)))

    def order(self, keys: Iterable[GraphKey]) -> list[GraphKey]:
        """Sort `keys` by use: the most used first, the larger first among equals, unused ones last.

        Use is the number of steps whose rows round up to that key among the given keys, so it stays right if a restart
        changes the buckets.
        """
        given = list(dict.fromkeys(keys))
        # Group by scope too: keys of two scopes serve the same rows independently.
        ladders: dict[tuple[str, str, str, Variant], list[GraphKey]] = {}
        for key in given:
            ladders.setdefault((key.site, key.scope, key.phase, key.variant), []).append(key)
        use: dict[GraphKey, int] = {}
        for (site, _, phase, variant), ladder in ladders.items():
            counts = self._rows.get((site, phase, variant), Counter())
            below = 0
            for key in sorted(ladder, key=lambda key: key.bucket):
                use[key] = sum(count for rows, count in counts.items() if below < rows <= key.bucket)
                below = key.bucket
        return sorted(given, key=lambda key: (-use[key], -key.bucket))

    def merge(self, other: Manifest) -> None:
        """Add the counts of `other`, such as the manifest of another engine with the same model."""
        for variant, counts in other._rows.items():
            self._rows.setdefault(variant, Counter()).update(counts)
        self._replays.update(other._replays)
        for site_phase, sizes in other._captured.items():
            self._captured.setdefault(site_phase, set()).update(sizes)

    def save(self) -> None:
        """Write the file atomically: a crash leaves the previous file intact. Raises ManifestError on failure."""
        text = json.dumps(self._to_json(), indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=self.path.name + ".", suffix=".tmp", dir=self.path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise ManifestError(
                f"manifest {self.path} can't be written ({error}): make the folder writable, or give another path"
            ) from error

    def _to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "rows": [
                {"site": site, "phase": phase, "statics": variant, "steps": sorted(counts.items())}
                for (site, phase, variant), counts in self._rows.items()
            ],
            "replays": [
                {"site": key.site, "scope": key.scope, "phase": key.phase, "bucket": key.bucket,
                 "statics": key.variant, "count": count}
                for key, count in self._replays.items()
            ],
            "captured": [
                {"site": site, "phase": phase, "buckets": sorted(sizes)}
                for (site, phase), sizes in self._captured.items()
            ],
        }  # fmt: skip

    def _add_counts(self, found: dict[str, Any]) -> None:
        for entry in found["rows"]:
            for rows, count in entry["steps"]:
                self.observe(
                    _string(entry["site"]),
                    _string(entry["phase"]),
                    _count(rows),
                    _variant(entry["statics"]),
                    _count(count),
                )
        for entry in found["replays"]:
            key = GraphKey(
                _string(entry["site"]),
                _string(entry["scope"]),
                _string(entry["phase"]),
                _count(entry["bucket"]),
                _variant(entry["statics"]),
            )
            self.replayed(key, _count(entry["count"]))
        for entry in found["captured"]:
            for bucket in entry["buckets"]:
                self.captured(_string(entry["site"]), _string(entry["phase"]), _count(bucket))

    def _move_aside(self, error: Exception) -> None:
        backup = self.path.with_name(self.path.name + ".bad")
        try:
            os.replace(self.path, backup)
            outcome = f"kept as {backup}"
        except OSError as failure:
            outcome = f"left in place ({failure})"
        _logger.warning("manifest %s is damaged (%r): %s, starting an empty one", self.path, error, outcome)


def histogram_from_metrics(text: str, site: str | None = None, phase: str | None = None) -> dict[int, int]:
    """Parse steps by real rows, ascending, from a Prometheus text snapshot such as the body of `/metrics`.

    Reads `encore_graph_batch_rows_total{site,phase,rows}`. None sums over every site or phase; engines are always
    summed. Raises ManifestError for text that is not a snapshot or has no such samples.
    """
    # Imported here because only the tuner command needs the parser.
    from prometheus_client.parser import text_string_to_metric_families

    total: Counter[int] = Counter()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                chosen = site in (None, labels.get("site")) and phase in (None, labels.get("phase"))
                if sample.name == ROWS_METRIC and chosen:
                    total[_count(int(labels["rows"]))] += _count(int(sample.value))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ManifestError(f"the metrics snapshot can't be read ({error!r}): give the body of /metrics") from error
    if not total:
        where = "".join(f", {name}={value!r}" for name, value in (("site", site), ("phase", phase)) if value)
        raise ManifestError(
            f"the metrics snapshot has no samples of {ROWS_METRIC}{where}: take it from a server that has answered "
            "requests"
        )
    return dict(sorted(total.items()))


def _count(value: Any) -> int:
    if not is_whole_number(value, 0):
        raise ValueError(f"{value!r} is not a count")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a name")
    return value


def _variant(value: Any) -> Variant:
    pairs = tuple((_string(name), item) for name, item in value)
    if not all(item is None or isinstance(item, (bool, int, float, str)) for _, item in pairs):
        raise ValueError(f"{value!r} are not static values")
    return pairs
