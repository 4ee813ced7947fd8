"""The main job's PPO as a live program: python live_ppo.py RUN_DIR PLAN DATA REWARD STEPS."""

import sys

import realhf
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.experiments.ppo import ppo

run_dir, plan, data, reward_function, steps = sys.argv[1:]
settings = PPOHyperparameters(max_new_tokens=16)
with realhf.start(run_dir=run_dir, plan=plan, tokenizer=f"{data}/tokenizer.json", mini_batches=4) as cluster:
    models = {
        "actor": cluster.policy(lr=1e-4, name="actor"),
        "critic": cluster.value_model(lr=1e-4, name="critic"),
        "reference": cluster.policy(trained=False, name="reference"),
    }
    reward = cluster.reward(reward_function)
    for prompts in cluster.data(f"{data}/prompts.jsonl", batch_size=128, steps=int(steps)):
        ppo.SCRIPT(prompts, **models, reward=reward, ppo=settings)
