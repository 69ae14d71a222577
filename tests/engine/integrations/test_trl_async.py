"""RolloutWorker and WeightTransfer, driven in the order in which TRL 1.16's AsyncGRPOTrainer calls them."""

from __future__ import annotations

import copy
import queue
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import ConfigError, EngineError, WeightUpdateError
from engine.integrations.trl_async import RolloutSample, RolloutWorker, WeightTransfer

DATASET = [{"prompt": text, "bonus": number} for number, text in enumerate(("red bird", "old house", "moon"))]
GENERATIONS, WAIT = 4, 30.0


def settings(**changes: Any) -> SimpleNamespace:
    """Return what the worker reads of an AsyncGRPOConfig."""
    values: dict[str, Any] = {
        "max_completion_length": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "num_generations": GENERATIONS, "queue_maxsize": 16, "chat_template_kwargs": None,
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class FakeTrainer:
    """Calls worker and transfer as AsyncGRPOTrainer does, with a policy-gradient step of its own."""

    def __init__(self, folder: Path, worker: RolloutWorker, transfer: WeightTransfer):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.worker, self.transfer, self.version = worker, transfer, 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # by version

    def sync(self) -> None:
        self.transfer.pause()
        self.transfer.send_weights((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        self.transfer.resume()
        self.version += 1
        self.worker.update_model_version(self.version)
        self.weights[self.version] = copy.deepcopy(self.model.state_dict())

    def take(self) -> RolloutSample:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            try:
                return self.worker.rollout_buffer.get(timeout=0.05)
            except queue.Empty:
                self.worker.check_health(WAIT)
        raise AssertionError("no sample came")

    def train(self, steps: int) -> list[RolloutSample]:
        taken = []
        try:
            self.transfer.init_weight_transfer()
            self.sync()
            self.worker.start()
            for _ in range(steps):
                samples = [self.take() for _ in range(8)]
                taken += samples
                loss = torch.stack([-one.advantage * self.log_probs(one.input_ids)[-6:].sum() for one in samples])
                self.optimizer.zero_grad()
                loss.mean().backward()
                self.optimizer.step()
                self.sync()
        finally:
            self.worker.stop()
            self.transfer.destroy()
        return taken

    def log_probs(self, input_ids: np.ndarray) -> torch.Tensor:
        """Return the log-probability of each token but the first."""
        ids = torch.from_numpy(input_ids)[None]
        return self.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def make_worker(
    engine: Any, folder: Path, rewards: Any = even, dataset: Any = DATASET, **changes: Any
) -> RolloutWorker:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return RolloutWorker(engine, dataset, rewards, tokenizer, settings(**changes), prompts_per_batch=2)


def test_a_trainer_gets_scored_samples_of_the_weights_it_sent(make_engine: Any, lively_model: Path) -> None:
    engine = make_engine(warmup="full")
    before = engine.stats().graphs["captures"]
    worker = make_worker(engine, lively_model, queue_maxsize=4)
    trainer = FakeTrainer(lively_model, worker, WeightTransfer(worker))
    taken = trainer.train(steps=5)
    assert {one.model_version for one in taken} >= {1, 2, 3} and engine.weight_version == "sync-6"
    groups = defaultdict(list)
    for one in taken:
        groups[one.group_id].append(one)
        assert one.input_ids.dtype == np.int64 and one.old_log_probs.dtype == np.float32
        start = int((one.completion_mask == 0).sum())
        assert not one.old_log_probs[:start].any() and one.completion_mask[start:].all()
        trainer.model.load_state_dict(trainer.weights[one.model_version])
        with torch.no_grad():
            expected = trainer.log_probs(one.input_ids)[start - 1 :].numpy()
        assert np.abs(expected - one.old_log_probs[start:]).max() < 1e-4
        assert one.metrics["reward"] == one.metrics["rewards/even"] == even([one.input_ids[start:].tolist()])[0]
    for number, group in groups.items():
        assert {one.prompt for one in group} == {DATASET[number % 3]["prompt"]}
        assert {one.model_version for one in group} == {group[0].model_version}, "no group mixes two versions"
        if len(group) == GENERATIONS:
            rewards = np.array([one.metrics["reward"] for one in group])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            assert np.allclose([one.advantage for one in group], expected, atol=1e-5)
    graphs = engine.stats().graphs
    assert graphs["captures"] == before and graphs["invalidations"] == []
    assert all(set(one) == {"rollout/generated_tok_s"} for one in worker.metrics_queue.queue)


def test_reward_functions_get_what_trl_gives_them(make_engine: Any, lively_model: Path) -> None:
    calls: list[dict[str, Any]] = []

    async def bonus(**given: Any) -> list[float | None]:
        calls.append(given)
        return [None if given["bonus"][0] == 1 else float(number) for number in range(GENERATIONS)]

    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "bonus": row["bonus"]} for row in DATASET]
    worker = make_worker(make_engine(), lively_model, bonus, chats)
    worker.start()
    samples = [worker.rollout_buffer.get(timeout=WAIT) for _ in range(12)]
    worker.stop()
    assert set(calls[0]) == {"prompts", "completions", "completion_ids", "bonus"}
    assert calls[0]["prompts"] == [chats[0]["prompt"]] * GENERATIONS and calls[0]["bonus"] == [0] * GENERATIONS
    assert [message[0]["role"] for message in calls[0]["completions"]] == ["assistant"] * GENERATIONS
    unscored = [one for one in samples if one.group_id == 1]
    assert [one.advantage for one in unscored] == [0.0] * 4 and all(np.isnan(one.metrics["reward"]) for one in unscored)
    assert [one.metrics["reward"] for one in samples if one.group_id == 2] == [0.0, 1.0, 2.0, 3.0]


def fails(**_: Any) -> list[float]:
    raise ZeroDivisionError("no score")


@pytest.mark.parametrize(
    ("rewards", "dataset", "message"),
    [
        (fails, DATASET, "no score"),
        (lambda **_: [1.0], DATASET, "returned 1 values for 4 completions"),
        (even, [], "the dataset has no rows"),
    ],
)
def test_a_failure_reaches_the_trainer(
    make_engine: Any, lively_model: Path, rewards: Any, dataset: Any, message: str
) -> None:
    worker = make_worker(make_engine(), lively_model, rewards, dataset)
    trainer = FakeTrainer(lively_model, worker, WeightTransfer(worker))
    with pytest.raises(EngineError, match=f"the rollout thread failed: .*{message}"):
        trainer.train(steps=1)


def test_bad_weights_leave_the_old_ones_in_use(make_engine: Any, lively_model: Path) -> None:
    engine = make_engine()
    worker = make_worker(engine, lively_model)
    transfer = WeightTransfer(worker)
    with pytest.raises(EngineError, match="call pause"):
        transfer.send_weights([])
    worker.start()
    transfer.pause()
    with pytest.raises(WeightUpdateError, match="unknown"):
        transfer.send_weights([("unknown", torch.zeros(1))])
    while not worker.rollout_buffer.empty():
        worker.rollout_buffer.get()
    time.sleep(0.3)
    assert worker.rollout_buffer.qsize() <= 8, "at most the batch that was generated before the pause"
    transfer.destroy()
    assert worker.rollout_buffer.get(timeout=WAIT).model_version == 0 and engine.weight_version == "initial"
    worker.stop()


def test_a_full_queue_holds_the_worker_back(make_engine: Any, lively_model: Path) -> None:
    worker = make_worker(make_engine(), lively_model, queue_maxsize=3)
    worker.start()
    deadline = time.monotonic() + WAIT
    while not worker.rollout_buffer.full() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    worker.check_health(WAIT)
    assert worker.rollout_buffer.qsize() == 3 and worker.metrics_queue.qsize() == 1
    worker.stop()


def test_a_silent_worker_is_reported(make_engine: Any, lively_model: Path) -> None:
    worker = make_worker(make_engine(), lively_model)
    with pytest.raises(ConfigError, match="prompts_per_batch=0"):
        RolloutWorker(worker.engine, DATASET, even, worker.processing_class, settings(), prompts_per_batch=0)
    worker.start()
    with pytest.raises(EngineError, match="no sign of life"):
        worker.check_health(-1.0)
    worker.stop()
    worker.check_health(0.0)
