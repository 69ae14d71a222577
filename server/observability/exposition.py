"""The text of all metrics, in Prometheus' format or in OpenMetrics."""

from __future__ import annotations

from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

OPENMETRICS = "application/openmetrics-text"
# All names are valid as they are. Any other escaping of prometheus_client replaces the colon of vLLM's names.
_generate_openmetrics = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics if the header Accept prefers it to plain text."""
    if _prefers_openmetrics(accept):
        return _generate_openmetrics(registry), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _prefers_openmetrics(accept: str) -> bool:
    """Whether a media range of OpenMetrics 1 has a quality above 0 and at least that of text/plain."""
    qualities = {OPENMETRICS: 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *rest = (piece.strip().lower() for piece in part.split(";"))
        parameters = dict(piece.partition("=")[::2] for piece in rest)
        if kind not in qualities or (kind == OPENMETRICS and not parameters.get("version", "1").startswith("1")):
            continue
        try:
            quality = float(parameters.get("q", 1))
        except ValueError:
            continue
        qualities[kind] = max(qualities[kind], quality)
    return 0 < qualities[OPENMETRICS] >= qualities["text/plain"]
