"""Two steps of verl's PPO trainer (GRPO) with rollouts by Encore, on a machine without GPUs, in some minutes.

    python scripts/verl_cpu/main.py

Needs verl 0.9 and Ray, with `pip install --no-deps --target FOLDER` and PYTHONPATH; see docs/rl.md. The model is a tiny
random Llama, the reward the share of vowels. verl prints its metrics of each step: `training/rollout_probs_diff_max` is
the largest difference between probabilities of the engine and of the trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
os.environ |= {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform,engine.integrations.verl",
    "WANDB_MODE": "disabled",
}
sys.path[:0] = [str(ROOT), str(HERE)]

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
SETTINGS = f"""
trainer.use_v1=False trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console]
trainer.total_training_steps=2 trainer.total_epochs=2 trainer.val_before_train=False trainer.test_freq=-1
trainer.save_freq=-1 algorithm.adv_estimator=grpo
data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=12 data.dataloader_num_workers=0
{MODEL}.use_remove_padding=False {MODEL}.enable_gradient_checkpointing=False
+{MODEL}.override_config.attn_implementation=eager
{ACTOR}.ppo_mini_batch_size=4 {ACTOR}.ppo_micro_batch_size_per_gpu=4 {ACTOR}.use_torch_compile=False
{ACTOR}.strategy=fsdp2 {ACTOR}.fsdp_config.model_dtype=float32 {ACTOR}.fsdp_config.dtype=float32
{ROLLOUT}.name=encore {ROLLOUT}.n=4 {ROLLOUT}.dtype=float32 {ROLLOUT}.tensor_model_parallel_size=1
{ROLLOUT}.max_model_len=256 {ROLLOUT}.max_num_seqs=8 {ROLLOUT}.max_num_batched_tokens=256
{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4 {ROLLOUT}.agent.num_workers=1 {ROLLOUT}.free_cache_engine=False
{ROLLOUT}.calculate_log_probs=True +{ROLLOUT}.engine_kwargs.encore.num_threads=1
+{ROLLOUT}.engine_kwargs.encore.graph_manifest=none +{ROLLOUT}.engine_kwargs.encore.warmup=lazy
reward.num_workers=1
""".split()
WRITE_MODEL = """
import pathlib, sys
from tests.conftest import write_tiny_model
from tests.engine.lively import write_lively_model
tiny, model = (pathlib.Path(sys.argv[1], name) for name in ("tiny", "model"))
tiny.mkdir()
write_tiny_model(tiny)
write_lively_model(tiny, model, seed=0)
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    return sum(letter in "aeiou" for letter in solution_str) / max(1, len(solution_str))
"""


def write_inputs(folder: Path) -> list[str]:
    """Write model, prompts and reward, and return the settings that name them."""
    # verl's folder has a package `tests` too, so this process can't import ours
    subprocess.run([sys.executable, "-c", WRITE_MODEL, folder], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    rows = [
        {
            "data_source": "vowels", "prompt": [{"role": "user", "content": f"one red bird {index}"}],
            "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": index},
        }
        for index in range(8)
    ]  # fmt: skip
    data, reward = folder / "data.jsonl", folder / "reward.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(REWARD)
    return [
        f"data.train_files={data}", f"data.val_files={data}", f"{MODEL}.path={folder / 'model'}",
        f"trainer.default_local_dir={folder / 'out'}", f"hydra.run.dir={folder}/hydra",
        f"reward.custom_reward_function.path={reward}",
    ]  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.argv += [*SETTINGS, *write_inputs(Path(folder))]
        import ray
        import verl_cpu_platform  # noqa: F401 (registers itself)
        from verl.trainer import main_ppo

        ray.init(num_cpus=8, num_gpus=1, include_dashboard=False)
        main_ppo.main()


if __name__ == "__main__":
    main()
