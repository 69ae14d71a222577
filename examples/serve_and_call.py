"""Start a server, call it with the OpenAI client, and choose buckets from its metrics.

`python examples/serve_and_call.py [MODEL [PORT]]` uses the default model (93 MB) unless one is named. Needs `openai`.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI

ENCORE = [sys.executable, "-m", "server.cli"]  # the command `encore`


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Return when the server accepts requests. Raises RuntimeError if it ends first."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready").close()
            return
        except urllib.error.URLError:  # not listening yet, or 503: not ready yet
            time.sleep(0.2)
    raise RuntimeError(f"the server ended with status {server.returncode}")


def main(model: str = "smollm2-135m-instruct", port: str = "8123") -> None:
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([*ENCORE, "serve", "--model", model, "--port", port, "--max-num-seqs", "8"])
    try:
        wait_until_ready(server, url)
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        name = client.models.list().data[0].id
        answer = client.completions.create(model=name, prompt="Once upon a time", max_tokens=16, temperature=0)
        print(answer.choices[0].text)
        stream = client.completions.create(model=name, prompt="The capital of France is", max_tokens=8, stream=True)
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
        print()
        subprocess.run([*ENCORE, "graphs", "--url", url], check=True)
        subprocess.run([*ENCORE, "tune", "--metrics", url, "--max-buckets", "3"], check=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
