"""From the start of the `encore serve` process to its first served token, with the default model in the cache.

    python benchmarks/second_start.py --out benchmarks/results/second-start.json

Each run starts `encore serve --warmup background` on a free port and asks POST /generate, as a stream, again and again
until a token comes. One untimed start first, so that the model and its converted form are in the cache.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from engine.bench.measure import circumstances  # noqa: E402

ASKED_SECONDS = 8.0
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args, more = parser.parse_known_args()
    if args.runs < 1:
        parser.error("--runs: at least 1 is needed")
    report = circumstances(sys.argv)
    serve = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--warmup", "background", *more]
    one_start(serve)
    runs = [one_start(serve) for _ in range(args.runs)]
    report |= {
        "serve": "encore serve --port 0 --warmup background " + " ".join(more),
        "runs": runs,
        "median_seconds": round(statistics.median(run["seconds"] for run in runs), 3),
        "asked_seconds": ASKED_SECONDS,
    }
    print(
        "\n".join(
            f"{run['seconds']:.2f} s to the first token ({run['listening_seconds']:.2f} s to listening), "
            f"which is {run['first_text']!r}"
            for run in runs
        )
    )
    print(f"median {report['median_seconds']:.2f} s, asked: under {ASKED_SECONDS:.0f} s")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
