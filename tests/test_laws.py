"""Architecture rules, checked on the syntax trees of every file.

- server -> engine -> graph_cache, never back.
- Inside each package, folders and modules are stacked in floors: a file imports from its folder or from a lower floor.
- No import cycles. Imports inside functions and under TYPE_CHECKING count.
- torch, web frameworks, Transformer Engine and Megatron are imported only where the tables below allow it.
- CUDA graphs are captured in one file.
- No Python file holds the source of a page.
- Docstrings, comments and messages name things instead of pointing at them with a pronoun.
- No test asserts that something took less than a time on the clock, which a busy machine exceeds.

Each rule is a function from files to violations, so that tests also show that it finds one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("server", "engine", "graph_cache")
CAPTURE_FILE = "graph_cache/backends/cuda.py"
PURE_FILES = (
    *(
        f"graph_cache/{name}.py"
        for name in (
            "config",
            "core/buckets",
            "core/capture_state",
            "core/keys",
            "core/manifest",
            "errors",
            "tuning/tuner",
            "utils/validation",
        )
    ),
    "graph_cache/adapters/megatron/config.py",
    "graph_cache/adapters/megatron/refusals.py",
    "graph_cache/adapters/megatron/vision.py",
)

# Lowest first. Packages and modules on one floor do not import each other.
FLOORS = {
    "graph_cache": (
        ("errors",),
        ("utils",),
        ("config", "guards"),
        ("backends",),
        ("core",),
        ("tuning", "training"),
        ("adapters",),
    ),
    "engine": (
        ("errors", "utils"),
        ("kv_events_config", "training_config"),
        ("config",),
        ("protocol", "kernels"),
        ("distributed", "checkpoint", "speculation"),
        ("layers", "attention", "scheduling", "text", "sampling"),
        ("models",),
        ("loader",),
        ("megatron",),
        ("worker",),
        ("executor",),
        ("core",),
        ("client",),
        ("training", "generation", "arguments"),
        ("engine",),
        ("bench", "library", "integrations"),
    ),
    "server": (
        ("config", "version", "formatting"),
        ("keys",),
        ("schemas", "observability"),
        ("http",),
        ("serving",),
        ("pages",),
        ("routes",),
        ("app",),
        ("workers",),
        ("replicas",),
        ("launch",),
        ("cli",),
    ),
}

WEB = {"fastapi", "starlette", "uvicorn", "aiohttp", "httpx", "requests", "flask"}
# Package -> the place (a file, or a folder with a slash) that may import it.
ADAPTERS = {
    "transformer_engine": "graph_cache/adapters/transformer_engine",
    "transformer_engine_torch": "graph_cache/adapters/transformer_engine",
    "megatron": "graph_cache/adapters/megatron",
}
# Phrase -> what to write instead.
AVOIDED = {
    "those of": "the noun again: 'the indices of this rank'",
    "of its own": "'its own lock' or 'a separate process'",
    "of their own": "'their own locks' or 'separate processes'",
    "what of": "the noun",
    "is meant": "the noun",
    "at the begin": "'at the start'",
}
GAP = r"""(?:[\s#]|["']\s*f?["'])+"""  # between two words: white space, a comment's next line, or a string's next part
AVOIDED_PATTERN = re.compile(rf"\b(?:{'|'.join(AVOIDED).replace(' ', GAP)})\b", re.IGNORECASE)
# Names that only begin, end or hold a capture; is_current_stream_capturing is a question and free to all.
CAPTURE_NAMES = {"CUDAGraph", "graph_pool_handle", "capture_begin", "capture_end"}
CAPTURE_UNDER_CUDA = {"graph", "graphs", "make_graphed_callables"}
PAGE_SOURCE = re.compile(r"<(?:!doctype|html|style|script|div|span|svg)\b", re.IGNORECASE)


def imported_modules(tree: ast.AST, place: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) for every import in the file, at any depth, relative and dynamic ones resolved."""
    package = PurePosixPath(place).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = dotted(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; parts that are no plain name are left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def forbidden_imports(place: str) -> Callable[[str], str | None]:
    """A function from an imported module to why the file at `place` may not have it."""
    room = place.split("/")[0]

    def why(module: str) -> str | None:
        top = module.split(".")[0]
        if room in PACKAGES and top in PACKAGES[: PACKAGES.index(room)]:
            return f"{room} never imports {top}: the law is {' -> '.join(PACKAGES)}"
        if top == "torch" and room == "server":
            return "server files never import torch"
        if top == "torch" and place in PURE_FILES:
            return "this file is pure Python"
        if top in WEB and room != "server":
            return f"{room} knows no HTTP"
        if top == "transformers" and room == "graph_cache":
            return "graph_cache knows no model"
        if module.startswith("engine.worker.model_runner") and place.startswith("engine/core/"):
            return "the core sees an executor's capabilities, never a model runner"
        if top in ADAPTERS and place != f"{ADAPTERS[top]}.py" and not place.startswith(f"{ADAPTERS[top]}/"):
            return f"{top} is imported in {ADAPTERS[top]} only"
        return None

    return why


def capture_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that captures a CUDA graph, however it is spelled."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            under_cuda = dotted(node.value).rpartition(".")[2] == "cuda"
            if node.attr in CAPTURE_NAMES or (under_cuda and node.attr in CAPTURE_UNDER_CUDA):
                yield node.lineno, dotted(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            for alias in node.names:
                if alias.name in CAPTURE_NAMES | CAPTURE_UNDER_CUDA or node.module == "torch.cuda.graphs":
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.cuda.graphs"):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in CAPTURE_NAMES:
                yield node.lineno, str(name.value)


def breaches(place: str, source: str) -> list[str]:
    """Every breach of the laws in one file, as `place:line: what`."""
    tree = ast.parse(source, filename=place)
    why = forbidden_imports(place)
    reasons = {(line, why(module)) for line, module in imported_modules(tree, place)}
    found = [(line, reason) for line, reason in reasons if reason]
    if place.startswith("engine/core/"):
        found += [
            (node.lineno, "the core sees an executor's capabilities and graphs, never its worker")
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "worker"
        ]
    if place != CAPTURE_FILE:
        found += [(line, f"{name}: captures happen in {CAPTURE_FILE} only") for line, name in capture_calls(tree)]
    found += [
        (number, f"{match[0]}: the sources of pages are files in server/pages/static")
        for number, line in enumerate(source.splitlines(), 1)
        if (match := PAGE_SOURCE.search(line))
    ]
    return [f"{place}:{line}: {what}" for line, what in sorted(found)]


def module_name(place: str) -> str:
    """`engine/core/loop.py` as `engine.core.loop`; a package's __init__.py as the package."""
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules among `files` (place -> source) that it imports, at any depth.

    A package's __init__.py that only re-exports is no importer: `engine/__init__.py` offers names of every floor.
    """
    modules = {module_name(place) for place in files}
    graph = {}
    for place, source in files.items():
        found: set[str] = set()
        for _, name in imported_modules(ast.parse(source, filename=place), place):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            found.add(name)
        # `from a.b import c` also yields `a.b`; the submodule is what is imported.
        found = {one for one in found if one and not any(other.startswith(f"{one}.") for other in found)}
        graph[module_name(place)] = found - {module_name(place)}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (strongly connected components), each sorted."""
    remaining = {module: set(targets) for module, targets in graph.items()}
    while True:  # what imports nothing, or is imported by nothing, is in no cycle
        imported = set().union(*remaining.values()) if remaining else set()
        free = {module for module, targets in remaining.items() if not targets or module not in imported}
        if not free:
            break
        remaining = {module: targets - free for module, targets in remaining.items() if module not in free}
    reach = {module: _reachable(remaining, module) for module in remaining}
    groups = {tuple(sorted(other for other in reach[module] if module in reach[other])) for module in remaining}
    return [list(group) for group in sorted(groups) if group]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in graph[todo.pop()] - seen:
            seen.add(target)
            todo.append(target)
    return seen


def upward_imports(package: str, graph: dict[str, set[str]]) -> list[str]:
    """Imports between floors of `package` that do not go down, as `module -> module`."""
    floor_of = {name: floor for floor, names in enumerate(FLOORS[package]) for name in names}
    found = []
    for module, targets in graph.items():
        parts = module.split(".")
        if parts[0] != package or len(parts) == 1:
            continue
        for target in targets:
            other = target.split(".")
            if other[0] != package or len(other) == 1 or other[1] == parts[1]:
                continue
            if parts[1] not in floor_of or other[1] not in floor_of or floor_of[other[1]] >= floor_of[parts[1]]:
                found.append(f"{module} -> {target}")
    return sorted(found)


def avoided_phrases(source: str) -> list[tuple[int, str]]:
    """Return line and phrase of each phrase of AVOIDED, also where a line break splits it."""
    return [
        (source.count("\n", 0, match.start()) + 1, re.sub(GAP, " ", match[0].lower()))
        for match in AVOIDED_PATTERN.finditer(source)
    ]


CLOCKS = {"time.monotonic", "time.perf_counter", "time.time"}


def time_limits(source: str) -> list[int]:
    """Return the lines that assert an upper bound of the time that has passed on a clock."""
    lines: list[int] = []
    if not any(f"{clock}()" in source for clock in CLOCKS):
        return lines
    for check in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)):
        for compare in (node for node in ast.walk(check.test) if isinstance(node, ast.Compare)):
            values = [compare.left, *compare.comparators]
            for left, operator, right in zip(values, compare.ops, values[1:], strict=False):
                smaller = left if isinstance(operator, (ast.Lt, ast.LtE)) else right
                lines += [node.lineno for node in ast.walk(smaller) if _is_elapsed_time(node)]
    return lines


def _is_elapsed_time(node: ast.AST) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Call)):
        return False
    return dotted(node.left.func) in CLOCKS


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_breaks_a_law(package):
    files = sources(package)
    assert files, f"{package} has no files: this test looks in the wrong place"
    found = [
        breach for path in files for breach in breaches(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert found == [], "\n".join(found)


def package_files() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for package in PACKAGES for path in sources(package)
    }


def test_imports_have_no_cycle():
    graph = import_graph(package_files())
    assert sum(map(len, graph.values())) > 500, "the graph is nearly empty: imports are not resolved"
    assert cycles(graph) == []


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_to_lower_floors(package):
    assert upward_imports(package, import_graph(package_files())) == []


@pytest.mark.parametrize("package", FLOORS)
def test_every_package_has_a_floor(package):
    entries = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or path.is_dir()}
    on_floors = {name for names in FLOORS[package] for name in names}
    assert entries - {"__init__", "__pycache__"} == on_floors


def test_a_cycle_is_found_also_inside_functions_and_type_checking():
    files = {
        "engine/a.py": "def late():\n    from engine.b import x",
        "engine/b.py": "if TYPE_CHECKING:\n    import engine.c",
        "engine/c.py": "from . import a",
        "engine/d.py": "import engine.a",
    }
    assert cycles(import_graph(files)) == [["engine.a", "engine.b", "engine.c"]]


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("engine/scheduling/scheduler.py", "engine/scheduling/batch.py", True),
        ("engine/scheduling/scheduler.py", "engine/protocol/request.py", True),
        ("engine/scheduling/scheduler.py", "engine/text/tokenizer.py", False),
        ("engine/scheduling/scheduler.py", "engine/core/loop.py", False),
        ("engine/utils/openmp.py", "engine/errors.py", False),
        ("server/http/keys.py", "server/routes/openai.py", False),
        ("server/routes/openai.py", "server/http/keys.py", True),
        ("server/nowhere/file.py", "server/http/keys.py", False),
    ],
)
def test_the_floor_of_an_import_decides(importer, imported, is_allowed):
    files = {importer: f"import {module_name(imported)}", imported: ""}
    assert (upward_imports(importer.split("/")[0], import_graph(files)) == []) is is_allowed


def test_the_files_that_the_laws_name_exist():
    missing = [place for place in (CAPTURE_FILE, *PURE_FILES) if not (ROOT / place).is_file()]
    assert missing == []


def test_the_capture_file_is_seen_to_capture():
    source = (ROOT / CAPTURE_FILE).read_text("utf-8")
    assert list(capture_calls(ast.parse(source))), "the search for capture calls finds none where they are"


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("graph_cache/core/cache.py", "import engine"),
        ("graph_cache/core/cache.py", "from engine.core.loop import step"),
        ("graph_cache/backends/cpu.py", "from ...server import app"),
        ("graph_cache/core/cache.py", "def late():\n    import server.app"),
        ("graph_cache/core/cache.py", "import importlib\nimportlib.import_module('engine.core.loop')"),
        ("graph_cache/core/cache.py", "__import__('transformers')"),
        ("graph_cache/core/cache.py", "from transformers import AutoModel"),
        ("graph_cache/core/cache.py", "import fastapi"),
        ("graph_cache/config.py", "import torch"),
        ("graph_cache/tuning/tuner.py", "from torch import Tensor"),
        ("engine/core/loop.py", "from server.config import ServerConfig"),
        ("engine/core/steps.py", "from engine.worker.model_runner import ModelRunner"),
        ("engine/core/captures.py", "pending = executor.worker.runner.cache.pending()"),
        ("engine/client/async_client.py", "import fastapi.responses"),
        ("engine/models/dense.py", "if TYPE_CHECKING:\n    from ...server import app"),
        ("server/app.py", "import torch"),
        ("server/app.py", "import torch.cuda as cuda"),
        ("server/cli/main.py", "def bench():\n    from torch import nn"),
        ("engine/models/megatron.py", "import megatron.core"),
        ("graph_cache/core/cache.py", "import transformer_engine.pytorch as te"),
        ("graph_cache/adapters/megatron.py", "import transformer_engine"),
        ("graph_cache/core/runner.py", "graph = torch.cuda.CUDAGraph()"),
        ("graph_cache/core/runner.py", "with torch.cuda.graph(graph):\n    pass"),
        ("graph_cache/core/runner.py", "with cuda.graph(g):\n    pass"),
        ("graph_cache/core/pool.py", "pool = torch.cuda.graph_pool_handle()"),
        ("graph_cache/core/pool.py", "self.graph.capture_begin()"),
        ("graph_cache/core/pool.py", "from torch.cuda import graph as record"),
        ("graph_cache/core/pool.py", "from torch.cuda.graphs import anything"),
        ("graph_cache/core/pool.py", "import torch.cuda.graphs as g"),
        ("graph_cache/core/pool.py", "getattr(torch.cuda, 'CUDAGraph')"),
        ("graph_cache/training/autograd.py", "torch.cuda.make_graphed_callables(f, args)"),
        ("engine/worker/model_runner.py", "torch.cuda.graphs.graph(g)"),
        ("server/app.py", "PAGE = '<!doctype html>'"),
        ("server/pages/status.py", 'BODY = f"""\n<STYLE>{css}</STYLE>"""'),
        ("server/pages/graphs.py", "row = '<script>' + code"),
    ],
)
def test_a_breach_is_found(place, source):
    assert breaches(place, source) != []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        (
            "server/app.py",
            "import fastapi\nfrom engine.client.async_client import Client\nfrom graph_cache import tuner",
        ),
        ("server/app.py", "from .config import ServerConfig"),
        ("engine/core/loop.py", "import torch\nimport transformers\nfrom graph_cache import GraphCache"),
        ("graph_cache/core/cache.py", "import torch\nfrom graph_cache.config import GraphConfig\nself.engine = engine"),
        ("graph_cache/core/cache.py", "torch.cuda.is_current_stream_capturing()\nself.graph(rows)\nplan.graph"),
        ("graph_cache/adapters/megatron.py", "from megatron.core import parallel_state"),
        ("graph_cache/adapters/transformer_engine.py", "import transformer_engine.pytorch as te"),
        ("graph_cache/adapters/megatron/layers.py", "import megatron"),
        ("server/app.py", "if rows <scripts: shown = '<none>'"),
        (CAPTURE_FILE, "import torch\ngraph = torch.cuda.CUDAGraph()\ngraph.capture_begin()"),
    ],
)
def test_what_is_lawful_is_left_alone(place, source):
    assert breaches(place, source) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_comments_and_messages_use_plain_words(package):
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {phrase!r}; write {AVOIDED[phrase]}"
        for path in sources(package)
        for line, phrase in avoided_phrases(path.read_text("utf-8"))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Return the indices, without those of other ranks."""', [(1, "those of")]),
        ("x = 1  # Those of other ranks", [(1, "those of")]),
        ('"""Scales are those\n    of the matrix."""', [(1, "those of")]),
        ("# a graph has memory of\n# its own", [(1, "of its own")]),
        ('raise ValueError(\n    "give them names of their "\n    f"own, not {x}")', [(2, "of their own")]),
        (
            '"""Say what is meant.\n\nThen what of the rest, at the begin."""',
            [(1, "is meant"), (3, "what of"), (3, "at the begin")],
        ),
        ('"""Return those that fit, at the beginning; each has its own lock and does it on its own."""', []),
        ("those = [of for of in range(3)]", []),
        ('names = ("those", "of")', []),
    ],
)
def test_an_avoided_phrase_is_found(source, found):
    assert avoided_phrases(source) == found


def test_no_test_asserts_a_time_limit():
    """Wait for the event (tests.support.waiting), or compare processor time, counts or orders."""
    files = [path for path in sources("tests") if "soak" not in path.parts]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in time_limits(path.read_text("utf-8"))]
    assert found == [], found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("assert time.monotonic() - began < 5", [1]),
        ("assert done and 0.5 <= time.perf_counter() - began <= 2, shown", [1]),
        ("assert 5 > time.time() - began", [1]),
        ("assert time.monotonic() - began > 0.5", []),
        ("assert 0.5 <= time.monotonic() - began", []),
        ("assert time.process_time() - began < 5", []),
        ("while time.monotonic() - began < 5: pass", []),
        ("assert time.monotonic() < end", []),
    ],
)
def test_a_time_limit_is_found(source, lines):
    assert time_limits(source) == lines


def test_no_file_has_the_markers_of_an_unresolved_merge():
    marker = re.compile(rb"^(<<<<<<<|>>>>>>>)", re.MULTILINE)
    folders = ("server", "engine", "graph_cache", "tests", "docs", "benchmarks", "deploy", "examples", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml")]
    assert len(files) > 300
    assert [str(path) for path in files if path.suffix != ".pyc" and marker.search(path.read_bytes())] == []


@pytest.mark.parametrize(
    "module", ["server.launch", "server.workers.single_worker", "server.workers.api_worker", "server.workers.manager"]
)
def test_processes_that_serve_http_never_load_torch(module):
    """torch would cost each of them seconds and hundreds of megabytes that only the engine's process needs."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
