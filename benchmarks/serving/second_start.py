"""Start-up of `encore serve` with the model in the cache: seconds to listening and to the first token.

    python -m benchmarks serving.second_start --json FILE [OPTIONS OF encore serve]

Each run starts `encore serve --warmup background` on a free port and sends POST /generate, as a stream, again and again
until a token comes. One untimed start first, so that the model and its converted form are in the cache.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

NEEDS = "CPU or 1 GPU"
ROOT = Path(__file__).resolve().parents[2]
ASKED_SECONDS = 2.0
RETRY_SECONDS = 0.05
GIVE_UP_SECONDS = 300.0
BODY = json.dumps(
    {"text": "The capital of France is", "stream": True, "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
)


def first_token(host: str, port: int) -> tuple[int, str]:
    """One try: (status, first event), where 0 means that nothing listens yet."""
    connection = http.client.HTTPConnection(host, port, timeout=GIVE_UP_SECONDS)
    try:
        connection.request("POST", "/generate", BODY, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.readline().decode().strip()
    except (ConnectionError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def one_start(command: list[str]) -> dict[str, Any]:
    """Start a server, wait for its first token, stop it. Raises SystemExit with its log if it gives none."""
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    try:
        while not (found := re.search(r"http://([\d.]+):(\d+)", log[-1] if log else "")):
            log.append(process.stderr.readline())
            if not log[-1]:
                raise SystemExit("the server ended before it listened:\n" + "".join(log))
        listening = time.perf_counter() - started
        # the pipe must be read on, or the server blocks on its own log
        threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()
        status, line = 0, ""
        while status != 200:
            if process.poll() is not None or time.perf_counter() - started > GIVE_UP_SECONDS:
                raise SystemExit(f"no token came (last status {status}):\n" + "".join(log))
            status, line = first_token(found[1], int(found[2]))
            if status != 200:
                time.sleep(RETRY_SECONDS)
        seconds = time.perf_counter() - started
        text = json.loads(line.removeprefix("data: "))["text"]
        return {"seconds": round(seconds, 3), "listening_seconds": round(listening, 3), "first_text": text}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--runs", type=harness.count, default=3)
    args, serve_options = parser.parse_known_args(argv)
    report = harness.Report(__spec__.name, args, argv)
    serve = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--warmup", "background", *serve_options]
    one_start(serve)
    for _ in range(args.runs):
        report.add(one_start(serve))
    median = round(statistics.median(row["seconds"] for row in report.rows), 3)
    print(f"median {median:.2f} s, asked: under {ASKED_SECONDS:.0f} s")
    report.finish(
        serve=" ".join(["encore serve --port 0 --warmup background", *serve_options]),
        median_seconds=median,
        asked_seconds=ASKED_SECONDS,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
