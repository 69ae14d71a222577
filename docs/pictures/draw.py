"""Draw the pictures of README and docs: `python docs/pictures/draw.py` writes the SVG files beside this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from svg import Canvas

FOLDER = Path(__file__).resolve().parent


def request_path() -> Canvas:
    """One request, from POST to text, through the processes."""
    c = Canvas(960, 470, "The path of one request")
    c.box(20, 42, 110, 40, "client")
    c.group(170, 10, 250, 190, "API worker (server/)")
    c.box(190, 42, 210, 40, "validate, check limits")
    c.box(190, 92, 210, 40, "tokenize")
    c.box(190, 142, 210, 40, "detokenize, stop strings")
    c.arrow((130, 62), (190, 62))
    c.text(133, 55, "POST", "small")
    c.arrow((190, 162), (75, 162), (75, 82), text="events")
    c.arrow((295, 82), (295, 92))
    c.group(470, 10, 470, 440, "engine process (engine/)")
    c.box(500, 42, 410, 56, "schedule", "orange", "requests, tokens and KV pages of this step")
    c.box(500, 380, 410, 50, "finish", "orange", "append tokens, check stop conditions")
    c.group(500, 128, 410, 222, "execute, on every GPU")
    c.box(520, 158, 118, 60, "decode\ngraph", "teal")
    c.box(646, 158, 118, 60, "prefill\ngraph", "teal")
    c.box(772, 158, 118, 60, "verify\ngraph", "teal")
    c.box(520, 262, 370, 40, "sampling graph", "teal")
    c.text(705, 332, "a graph per bucket, in one memory pool", "small", "middle")
    for x in (579, 705, 831):
        c.arrow((x, 218), (x, 262))
    c.text(713, 245, "logits", "small")
    c.arrow((705, 98), (705, 158))
    c.text(713, 118, "batch", "small")
    c.arrow((705, 350), (705, 380))
    c.text(713, 370, "tokens", "small")
    c.arrow((400, 112), (446, 112), (446, 70), (500, 70))
    c.text(445, 129, "submit", "small", "middle")
    c.arrow((500, 405), (440, 405), (440, 162), (400, 162))
    c.text(395, 300, "events", "small")
    c.text(20, 300, "Decode, prefill and verify rows never share", "small")
    c.text(20, 318, "a graph. A batch without a captured bucket", "small")
    c.text(20, 336, "runs eager and is counted with a reason.", "small")
    return c


def memory_pool() -> Canvas:
    """The pool of all graphs: shared intermediates, what training may not share, and what graphs read from outside."""
    c = Canvas(960, 365, "The memory pool of all graphs")
    c.group(20, 10, 920, 240, "one memory pool")
    for index, (bucket, width) in enumerate(((256, 500), (128, 350), (32, 200), (1, 60))):
        y = 44 + index * 42
        c.box(40, y, width, 34, f"bucket {bucket}" if width > 60 else "1", "teal")
    shared = "intermediates and results of inference graphs: the same memory, since they never run at once"
    c.text(40, 234, shared, "small")
    c.box(620, 44, 300, 60, "forward of microbatch 0", "blue", "held until its backward is done")
    c.box(620, 120, 300, 60, "forward of microbatch 1", "blue", "memory of its own while 0 is outstanding")
    c.box(40, 290, 240, 56, "static inputs", "orange", "sized for the largest bucket")
    c.box(310, 290, 200, 56, "weights, KV cache", "plain")
    c.arrow((160, 290), (160, 250))
    c.arrow((410, 290), (410, 250))
    c.text(550, 308, "Graphs read these at recorded addresses. If one moves,", "small")
    c.text(550, 326, "or changes shape, stride or dtype, the graph is stale", "small")
    c.text(550, 344, "and is never replayed.", "small")
    return c


def capture_and_replay() -> Canvas:
    """When a bucket is warmed up, captured and replayed, and what a step does without a graph."""
    c = Canvas(960, 300, "Capture and replay")
    c.text(20, 52, "start-up", "title")
    for index, text in enumerate(("warm-up run", "warm-up run", "capture")):
        c.box(130 + index * 130, 30, 120, 36, text, "orange" if index < 2 else "teal")
    c.text(530, 52, "per bucket, the largest first; later ones need one such run or none", "small")
    c.text(20, 132, "a step", "title")
    c.box(130, 110, 150, 40, "plan(rows)", "plain")
    c.box(360, 90, 170, 34, "graph of the bucket", "teal")
    c.box(360, 140, 170, 34, "eager, with a reason", "orange")
    c.arrow((280, 125), (360, 107))
    c.arrow((280, 135), (360, 157))
    c.box(600, 90, 330, 34, "copy inputs, pad, replay, cut", "teal")
    c.box(600, 140, 330, 34, "run the same callable, count the reason", "orange")
    c.arrow((530, 107), (600, 107))
    c.arrow((530, 157), (600, 157))
    c.text(20, 236, "later", "title")
    c.box(130, 214, 290, 36, "a weight moved, or its layout changed", "plain")
    c.box(480, 214, 110, 36, "invalidate", "orange")
    c.box(650, 214, 280, 36, "capture again, between steps", "teal")
    c.arrow((420, 232), (480, 232))
    c.arrow((590, 232), (650, 232))
    c.text(130, 280, "In-place weight updates keep every graph.", "small")
    return c


def training_order() -> Canvas:
    """The order in which a training step's graphs are captured and replayed."""
    c = Canvas(960, 270, "The graphs of a training step")
    for row, label in enumerate(("microbatch 0", "microbatch 1")):
        c.text(20, 62 + row * 70, label, "title")
    colours = {"F": "teal", "B": "blue"}

    def cell(x: float, row: int, text: str) -> None:
        c.box(x, 36 + row * 70, 58, 42, text, colours[text[0]])

    for index in range(3):
        cell(140 + index * 62, 0, f"F{index}")
        cell(340 + index * 62, 1, f"F{index}")
        cell(540 + index * 62, 0, f"B{2 - index}")
        cell(740 + index * 62, 1, f"B{2 - index}")
    c.arrow((140, 180), (940, 180))
    c.text(140, 202, "time", "small")
    c.text(
        20,
        232,
        "F and B: forward and backward graph of a layer. Each outstanding microbatch has a pair of its own.",
        "small",
    )
    c.text(
        20,
        252,
        "Graphs are captured in the order in which a recorded step ran them, so that they can share memory.",
        "small",
    )
    return c


def topologies() -> Canvas:
    """How an engine scales: one process, tensor parallelism on a host, several API workers."""
    c = Canvas(960, 360, "Topologies")
    c.group(20, 10, 270, 340, "embedded")
    c.box(50, 50, 210, 50, "your program", "plain")
    c.box(50, 140, 210, 50, "Engine", "orange", "scheduler and step loop")
    c.box(50, 230, 210, 50, "GPU 0", "teal")
    c.arrow((155, 100), (155, 140))
    c.arrow((155, 190), (155, 230))
    c.group(310, 10, 630, 340, "server: --http-workers 3 --tensor-parallel-size 2")
    for index in range(3):
        c.box(330 + index * 110, 50, 96, 50, "API\nworker", "plain")
        c.arrow((378 + index * 110, 100), (378 + index * 110, 128), both=True)
    c.box(330, 128, 316, 46, "main process", "plain", "forwards messages, restarts what dies")
    c.box(330, 202, 316, 46, "engine process", "orange", "one scheduler for all GPUs")
    c.arrow((488, 174), (488, 202), both=True)
    c.box(330, 280, 140, 50, "GPU 0", "teal", "rank 0")
    c.box(506, 280, 140, 50, "GPU 1", "teal", "rank 1")
    c.arrow((400, 248), (400, 280))
    c.arrow((576, 248), (576, 280), text="steps")
    c.arrow((470, 305), (506, 305), both=True)
    c.text(670, 80, "HTTP, limits, tokenizer", "small")
    c.text(670, 310, "a process each; one-shot", "small")
    c.text(670, 328, "all-reduce over NVLink", "small")
    return c


def rl_loop() -> Canvas:
    """A step of reinforcement learning with the engine in the trainer's process."""
    c = Canvas(960, 330, "The loop of reinforcement learning")
    c.group(20, 10, 920, 300, "one process")
    c.box(50, 44, 250, 76, "generate", "teal", "replays of graphs: token ids,\nlog-probabilities, weight version")
    c.box(380, 44, 190, 76, "score", "plain", "rewards, advantages")
    c.box(660, 44, 250, 76, "train", "blue", "forward, loss, backward,\noptimizer step")
    c.arrow((300, 82), (380, 82))
    c.arrow((570, 82), (660, 82))
    c.arrow((700, 120), (700, 168), (260, 168), (260, 120))
    c.text(480, 160, "weights_changed: drop the KV of the old weights", "small", "middle")
    c.box(50, 226, 860, 60, "weights", "orange", "one storage for engine and trainer (share_weights): same addresses")
    c.arrow((820, 120), (820, 226), text="write")
    c.arrow((130, 226), (130, 120), text="read")
    c.text(480, 206, "no copy, and no graph is captured again", "small", "middle")
    return c


def replicas() -> Canvas:
    """Replicas of the server on Ray Serve."""
    c = Canvas(960, 330, "Replicas on Ray Serve")
    c.box(20, 130, 110, 60, "clients", "plain")
    c.box(180, 130, 120, 60, "Serve's proxy", "plain", "HTTP")
    c.box(350, 120, 200, 80, "gateway", "orange", "affinity, retries,\ncommands to all")
    c.arrow((130, 160), (180, 160))
    c.arrow((300, 160), (350, 160))
    for index in range(3):
        y = 20 + index * 100
        c.box(640, y, 140, 76, f"replica {index}", "plain", "HTTP application")
        c.box(810, y, 130, 76, "engine", "teal", "its GPUs")
        c.arrow((780, y + 38), (810, y + 38), both=True)
        c.arrow((550, 160), (640, y + 38), both=True)
    c.box(350, 250, 200, 60, "command log", "plain", "what new replicas repeat")
    c.arrow((450, 200), (450, 250))
    return c


def rollout_pool() -> Canvas:
    """A pool of engines for rollouts on Ray."""
    c = Canvas(960, 330, "A pool of engines for rollouts")
    c.group(20, 10, 300, 310, "the trainer's process")
    c.box(50, 50, 240, 60, "trainer", "blue", "forward, loss, backward")
    c.box(50, 150, 240, 70, "RolloutPool", "orange", "deals out samples, takes back\nthose of an engine that ended")
    c.arrow((170, 110), (170, 150), both=True)
    c.box(380, 230, 200, 70, "object store", "plain", "the weights, once a version\nand machine")
    c.arrow((290, 200), (380, 255), text="put")
    for index in range(3):
        y = 20 + index * 100
        c.box(720, y, 200, 76, f"engine {index}", "teal", "an actor with its GPUs")
        c.arrow((290, 185), (720, y + 38), both=True)
        c.arrow((580, 265), (720, y + 60))
    return c


def cluster() -> Canvas:
    """Replicas on the machines of a Ray cluster."""
    c = Canvas(960, 330, "Replicas on a cluster")
    c.box(20, 135, 110, 60, "clients", "plain")
    c.group(180, 10, 240, 310, "head node")
    c.box(210, 45, 180, 60, "Serve's controller", "plain", "adds, removes, replaces")
    c.box(210, 135, 180, 60, "proxy and gateway", "orange", "one address")
    c.box(210, 225, 180, 60, "replica 0", "teal", "engine, its GPUs")
    c.arrow((130, 165), (210, 165))
    c.arrow((300, 195), (300, 225), both=True)
    for index in range(2):
        y = 10 + index * 160
        c.group(500, y, 440, 150, f"node {index + 1}")
        for place in range(2):
            c.box(530 + place * 200, y + 55, 180, 60, f"replica {1 + 2 * index + place}", "teal", "engine, its GPUs")
        c.arrow((390, 165), (530, y + 85), both=True)
    return c


def batches() -> Canvas:
    """Three ways to run many requests: a file over HTTP, and Ray Data by a pool or by replicas."""
    c = Canvas(960, 300, "Batches")
    rows = (
        ("requests.jsonl", "encore batch", "HTTP, resumes", "replicas", "behind one address"),
        ("Parquet", "Ray Data --by pool", "streams the file", "engines", "one in each worker"),
        ("Parquet", "Ray Data --by serve", "streams the file", "replicas", "by Serve's handle"),
    )
    for index, (source, program, how, target, what) in enumerate(rows):
        y = 20 + index * 92
        c.box(20, y, 180, 70, source, "plain", "prompts" if source == "Parquet" else "a request in each line")
        c.box(290, y, 220, 70, program, "orange", how)
        c.box(600, y, 160, 70, target, "teal", what)
        c.box(850, y, 90, 70, "results", "plain")
        c.arrow((200, y + 35), (290, y + 35))
        c.arrow((510, y + 35), (600, y + 35), both=True)
        c.arrow((760, y + 35), (850, y + 35))
    return c


PICTURES: dict[str, Callable[[], Canvas]] = {
    "request-path": request_path,
    "memory-pool": memory_pool,
    "capture-and-replay": capture_and_replay,
    "training-order": training_order,
    "topologies": topologies,
    "rl-loop": rl_loop,
    "replicas": replicas,
    "rollout-pool": rollout_pool,
    "cluster": cluster,
    "batches": batches,
}


def main() -> None:
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(picture().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
