"""Run vLLM's API tests file by file against Encore and compare the outcome with `expected.txt`.

`scripts/vllm_api_tests` prepares what this needs and calls it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
# Below vLLM's `tests`: the OpenAI and Anthropic APIs, tokenization, tool use, metrics, health and schema.
DEFAULT = (
    "entrypoints/openai/chat_completion", "entrypoints/openai/completion", "entrypoints/openai/models",
    "entrypoints/openai/responses", "entrypoints/openai", "entrypoints/anthropic", "entrypoints/serve/tokenize",
    "entrypoints/serve/instrumentator", "entrypoints/serve/middleware", "entrypoints/tool_parsers", "tool_use",
)  # fmt: skip
KINDS = ("missing", "different", "model", "harness")


class Expected(NamedTuple):
    """A line of `expected.txt`: tests whose id begins with `prefix` may fail."""

    prefix: str
    kind: str
    reason: str


class Outcome(NamedTuple):
    """The outcome of one test: passed, failed or skipped, and the last line of its error."""

    test: str
    result: str
    message: str


def expectations(path: Path = HERE / "expected.txt") -> list[Expected]:
    """Read `KIND | PREFIX | REASON` lines. Raises ValueError for a malformed one."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            parts = [part.strip() for part in line.split("|", 2)]
            if len(parts) != 3 or parts[0] not in KINDS:
                raise ValueError(f"{path.name}, line {number}: KIND | PREFIX | REASON is needed, KIND of {KINDS}")
            found.append(Expected(parts[1], parts[0], parts[2]))
    return found


def files_of(tests: Path, selected: list[str]) -> list[str]:
    """Return the test files below vLLM's `tests` that a selection names, in order, with a test's name if given."""
    files: list[str] = []
    for one in selected:
        path, _, rest = one.removeprefix("tests/").partition("::")
        if not (tests / path).exists():
            raise SystemExit(f"vllm_api_tests: error: --select {one}: vLLM's tests have no {path}")
        if (tests / path).is_dir():
            below = (tests / path).glob("test_*.py" if one == "entrypoints/openai" else "**/test_*.py")
            files += sorted(str(file.relative_to(tests)) for file in below)
        else:
            files.append(path + (f"::{rest}" if rest else ""))
    return list(dict.fromkeys(files))


def asks_a_server(tests: Path, file: str) -> bool:
    """Return whether a file, or the conftest.py beside it, starts a server."""
    path = tests / file.partition("::")[0]
    sources = [path, path.parent / "conftest.py"]
    return any("RemoteOpenAIServer" in source.read_text() for source in sources if source.exists())


def run_file(file: str, options: argparse.Namespace, environment: dict[str, str]) -> list[Outcome]:
    """Run one file in its own process."""
    report = options.cache / "report.xml"
    report.unlink(missing_ok=True)
    cut = file.partition("/")[0]
    command = [
        options.python, "-m", "pytest", "-c", os.devnull, "--rootdir", options.vllm,
        "--confcutdir", options.vllm / "tests" / cut, "-p", "encore_plugin", "-p", "no:cacheprovider", "-q",
        "--tb=short", "--junit-xml", report, options.vllm / "tests" / file,
    ]  # fmt: skip
    with (options.cache / "log.txt").open("ab") as log:
        log.write(f"\n==== {file}\n".encode())
        log.flush()
        process = subprocess.Popen(
            list(map(str, command)), cwd=options.vllm, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            return [Outcome(file, "failed", f"not done after {options.seconds:g} s")]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its servers too, also where this script is interrupted
            process.wait()
    if not report.exists():
        return [Outcome(file, "failed", f"pytest ended with {status}")]
    return [outcome_of(file.partition("::")[0], case) for case in xml.parse(report).getroot().iter("testcase")]


def outcome_of(file: str, case: xml.Element) -> Outcome:
    """Read one test case of a JUnit report."""
    test = f"{file}::{case.get('name')}"
    for tag, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return Outcome(test, result, " ".join((found.get("message") or found.text or "").split())[:400])
    return Outcome(test, "passed", "")


def prepare(options: argparse.Namespace) -> dict[str, str]:
    """Write the served model's tokenizer for the tests; return the tests' environment."""
    import server.cli  # noqa: F401  # fails early where the repository is not importable
    from engine.checkpoint.default_model import default_gguf

    model = Path(options.model or default_gguf())
    folder = model
    if model.suffix == ".gguf":
        folder = options.cache / "tokenizers" / model.stem
        if not folder.exists():
            code = "import sys, transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2])"
            code += ".save_pretrained(sys.argv[3])"
            subprocess.run([options.python, "-c", code, model.parent, model.name, folder], check=True)
    return os.environ | {
        "PYTHONPATH": f"{HERE}{os.pathsep}{options.vllm}", "API_TEST_VLLM": str(options.vllm), "HF_HUB_OFFLINE": "1",
        "API_TEST_PYTHON": sys.executable, "API_TEST_SOURCE": str(REPOSITORY), "API_TEST_MODEL": str(model),
        "API_TEST_TOKENIZER": str(folder), "API_TEST_MAX_LEN": str(options.max_model_len),
        "API_TEST_SECONDS": str(options.test_seconds), "TOKENIZERS_PARALLELISM": "false", "VLLM_TARGET_DEVICE": "cpu",
    }  # fmt: skip


def explained(outcome: Outcome, expected: list[Expected]) -> Expected | None:
    """Return the longest expectation that covers a failure."""
    covering = [one for one in expected if outcome.test.startswith(one.prefix)]
    return max(covering, key=lambda one: len(one.prefix), default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("vllm", "python", "cache"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--select", action="append", nargs="+", default=[])
    parser.add_argument("--model")
    parser.add_argument("--max-model-len", type=int, default=8192, help="the model's longest context")
    parser.add_argument("--seconds", type=float, default=3600, help="the limit for one file")
    parser.add_argument("--test-seconds", type=float, default=300, help="the limit for one test")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running file's servers are ended too
    sys.path.insert(0, str(REPOSITORY))
    tests, expected = options.vllm / "tests", expectations()
    selected = [one for group in options.select for one in group] or list(DEFAULT)
    environment = prepare(options)
    total: Counter[str] = Counter()
    unexplained: list[Outcome] = []
    everything: dict[str, Any] = {}
    print("| file | passed | failed | of these expected | skipped | seconds |\n|---|---|---|---|---|---|", flush=True)
    for file in files_of(tests, selected):
        if not asks_a_server(tests, file):
            continue
        began = time.monotonic()
        outcomes = run_file(file, options, environment)
        counts = Counter(outcome.result for outcome in outcomes)
        for outcome in outcomes:
            reason = explained(outcome, expected) if outcome.result == "failed" else None
            total[reason.kind if reason else outcome.result] += 1
            counts["expected"] += reason is not None
            unexplained += [outcome] if outcome.result == "failed" and reason is None else []
            everything[outcome.test] = [outcome.result, outcome.message, reason.kind if reason else ""]
        print(f"| {file} | {counts['passed']} | {counts['failed']} | {counts['expected']} | {counts['skipped']} "
              f"| {time.monotonic() - began:.0f} |", flush=True)  # fmt: skip
        if options.json is not None:
            options.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    passed, judged = total["passed"], total["passed"] + total["failed"] + total["different"]
    print(f"\n{dict(total)}; of what needs no missing capability and no other model {passed} of {judged} pass "
          f"({100 * passed / max(1, judged):.0f}%)\n")  # fmt: skip
    for outcome in unexplained:
        print(f"- {outcome.test}: {outcome.message}")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
