"""Twelve live programs whose next call depends on what the last ones found, which no traced script can say.

    python -m realhf.data.sort_task sorting
    python experiments/live_programs.py tournament --steps 10

They teach a small model with random weights to put letters in order. Each yields a line a round.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import realhf
from realhf.algorithms.grpo.config import GRPO, group_advantages, grpo_loss
from realhf.algorithms.sft.config import sft_loss
from realhf.api import Examples
from realhf.live.cluster import Cluster

GROUP, BATCH = 4, 16
OPTIONS = GRPO(samples_per_prompt=GROUP, max_new_tokens=9, beta=0.0)  # without a reference
PROMPTS = "prompts.jsonl"


def in_order(text: str) -> float:
    """The share of neighbouring letters that are in order."""
    pairs = list(pairwise(text))
    return sum(a <= b for a, b in pairs) / max(1, len(pairs))


def scores_of(rollout: Any) -> list[float]:
    return [in_order(text) for text in rollout.texts()]


def learn(actor: Any, rollout: Any, scores: list[float]) -> Any:
    return actor.update(group_advantages(rollout, scores, None, OPTIONS), grpo_loss(OPTIONS))


def curriculum(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Longer answers, once the short ones are good."""
    actor, tokens = cluster.policy(lr=1e-3), 3
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        rollout = actor.generate(prompts, replace(OPTIONS, max_new_tokens=tokens))
        scores = scores_of(rollout)
        learn(actor, rollout, scores)
        yield f"{tokens} tokens: {mean(scores):.2f}"
        if mean(scores) > 0.4:
            tokens = min(tokens + 2, 9)


def best_of_n(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Draws four times while the policy is bad, once when it is good, and learns from the best draw."""
    actor, draws = cluster.policy(lr=1e-3), 4
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        rollouts = [actor.generate(prompts, OPTIONS) for _ in range(draws)]
        found = [(scores_of(rollout), rollout) for rollout in rollouts]
        scores, rollout = max(found, key=lambda pair: mean(pair[0]))
        learn(actor, rollout, scores)
        yield f"best of {draws}: {mean(scores):.2f}"
        draws = max(1, round(4 * (1 - mean(scores))))


def rejection_sampling(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Draws until a quarter of the responses is accepted, at most four times; learns from those that are."""
    actor = cluster.policy(lr=1e-3)
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        draws, accepted = 0, [0.0]
        while draws < 4 and mean(accepted) < 0.25:
            draws += 1
            rollout = actor.generate(prompts, OPTIONS)
            accepted = [float(score > 0.6) for score in scores_of(rollout)]
        if mean(accepted) >= 0.25:
            learn(actor, rollout, accepted)
        yield f"{draws} draws, {mean(accepted):.0%} accepted"


def stop_on_divergence(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Ends when the policy is too far from where it began."""
    actor, reference = cluster.policy(lr=1e-4), cluster.policy(trained=False)
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        rollout = actor.generate(prompts, OPTIONS)
        before = reference.logprobs(rollout)
        distance = rollout.logprob.mean() - before.ref_logprob.mean()
        yield f"{distance:.4f} nats from the reference"
        if distance > 0.05:
            break
        learn(actor, rollout, scores_of(rollout))


def self_play(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Two policies answer the same prompts; the one that lost the round learns from it."""
    players = [cluster.policy(lr=1e-3, name="first"), cluster.policy(lr=1e-3, name="second")]
    won = [0, 0]
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        rollouts = [player.generate(prompts, OPTIONS) for player in players]
        scores = [scores_of(rollout) for rollout in rollouts]
        winner = int(mean(scores[1]) > mean(scores[0]))
        won[winner] += 1
        learn(players[1 - winner], rollouts[1 - winner], scores[1 - winner])
        yield f"{won[0]} to {won[1]}"
        if max(won) > steps / 2:
            break


def tournament(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """The answers to a prompt play a knock-out; the judge is a model, and a draw is played again by another rule."""
    actor, judge = cluster.policy(lr=1e-3), cluster.policy(trained=False, name="judge")
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        rollout = actor.generate(prompts, OPTIONS)
        orders, likelihoods = scores_of(rollout), judge.logprobs(rollout).ref_logprob.values()
        rounds_won = [0.0] * BATCH
        for first in range(0, BATCH, GROUP):
            left = list(range(first, first + GROUP))
            while len(left) > 1:
                pairs = zip(left[::2], left[1::2], strict=True)
                left = [max(pair, key=lambda i: (orders[i], likelihoods[i].mean())) for pair in pairs]
                for i in left:
                    rounds_won[i] += 1
        learn(actor, rollout, rounds_won)
        yield f"winners {mean([orders[i] for i in range(BATCH) if rounds_won[i] == 2]):.2f}, all {mean(orders):.2f}"


def prompt_search(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Of three ways to ask the worst leaves after each round; the policy learns under the last one."""
    signs = {"plain": "", "starred": "*", "twice": ">"}
    rows = [json.loads(line) for line in (data / PROMPTS).read_text().splitlines()[:3000]]
    asked = data.with_name("asked.jsonl")  # the folder of the task is as it was made
    with asked.open("w") as file:
        for row, (kind, sign) in zip(rows, cycle(signs.items()), strict=False):
            file.write(json.dumps({"prompt": row["prompt"] + sign, "kind": kind}) + "\n")
    actor, left = cluster.policy(lr=1e-3), [*signs]
    for prompts in cluster.data(str(asked), batch_size=3 * BATCH, steps=steps):
        rollout = actor.generate(prompts, OPTIONS)
        scores, kinds = scores_of(rollout), rollout["kind"]
        found = {kind: mean([score for score, of in zip(scores, kinds, strict=True) if of == kind]) for kind in left}
        yield ", ".join(f"{kind} {score:.2f}" for kind, score in found.items())
        if len(left) > 1:
            left.remove(min(left, key=lambda kind: found[kind]))
        else:  # a group with one reward teaches nothing
            learn(actor, rollout, [score * (kind in left) for score, kind in zip(scores, kinds, strict=True)])


def adaptive_kl(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """The coefficient of the divergence follows the divergence that was measured."""
    actor, reference, options = cluster.policy(lr=1e-4), cluster.policy(trained=False), replace(OPTIONS, beta=0.01)
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        rollout = actor.generate(prompts, options)
        batch = group_advantages(rollout, scores_of(rollout), reference.logprobs(rollout), options)
        divergence = actor.update(batch, grpo_loss(options))["ref_kl"]
        yield f"beta {options.beta:.3g}: {divergence:.5f} nats"
        options = replace(options, beta=options.beta * (2 if divergence > 0.01 else 0.5))


def as_far_as_allowed(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Learns from one rollout again, until the policy has moved by a given distance."""
    actor = cluster.policy(lr=1e-4)
    for prompts in cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps):
        rollout = actor.generate(prompts, OPTIONS)
        scores = scores_of(rollout)
        updates, moved = 0, 0.0
        while updates < 4 and moved < 0.3:
            updates += 1
            learn(actor, rollout, scores)
            now = actor.logprobs(rollout, key="now").now.values()
            moved = max(abs(a - b).max() for a, b in zip(now, rollout.logprob.values(), strict=True))
        yield f"{updates} updates moved a token by {moved:.3f} nats"


def examples_when_stuck(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Learns from answers of others in rounds in which its own are no better than before."""
    actor, best = cluster.policy(lr=1e-3), 0.0
    own = cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps)
    others = cluster.data(str(data / "sft.jsonl"), batch_size=BATCH, steps=steps, kind=Examples)
    for prompts, examples in zip(own, others, strict=True):
        rollout = actor.generate(prompts, OPTIONS)
        scores = scores_of(rollout)
        is_stuck = mean(scores) <= best
        if is_stuck:
            actor.update(examples, sft_loss())
        else:
            learn(actor, rollout, scores)
        best = max(best, mean(scores))
        yield f"{mean(scores):.2f}, {'examples' if is_stuck else 'own answers'}"


def keep_the_best(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Looks at every second batch alone, and ends when two looks were no better than the best one."""
    actor, best, since = cluster.policy(lr=1e-3), 0.0, 0
    for round_, prompts in enumerate(cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps)):
        rollout = actor.generate(prompts, OPTIONS)
        scores = scores_of(rollout)
        if round_ % 2:
            learn(actor, rollout, scores)
            continue
        best, since = (mean(scores), 0) if mean(scores) > best else (best, since + 1)
        yield f"held out {mean(scores):.2f}, best {best:.2f}"
        if since == 2:
            break


def race(cluster: Cluster, data: Path, steps: int) -> Iterator[str]:
    """Three learning rates; after every second round the worst policy is trained no more."""
    actors = {rate: cluster.policy(lr=rate, name=f"rate_{i}") for i, rate in enumerate((1e-4, 1e-3, 1e-2))}
    for round_, prompts in enumerate(cluster.data(str(data / PROMPTS), batch_size=BATCH, steps=steps), 1):
        found = {}
        for rate, actor in actors.items():
            rollout = actor.generate(prompts, OPTIONS)
            scores = scores_of(rollout)
            learn(actor, rollout, scores)
            found[rate] = mean(scores)
        yield ", ".join(f"{rate:g}: {score:.2f}" for rate, score in found.items())
        if round_ % 2 == 0 and len(actors) > 1:
            del actors[min(found, key=lambda rate: found[rate])]


Program = Callable[[Cluster, Path, int], Iterator[str]]
PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        curriculum, best_of_n, rejection_sampling, stop_on_divergence, self_play, tournament, prompt_search,
        adaptive_kl, as_far_as_allowed, examples_when_stuck, keep_the_best, race,
    )
}  # fmt: skip


def main(words: list[str] | None = None) -> list[str]:
    """Runs the program that the command line names; returns its lines, which it prints too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--data", type=Path, default=Path("sorting"), help="folder of the sort task")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--run-dir", type=Path, help="by default runs/NAME-TIME")
    given = parser.parse_args(words)
    lines = []
    tokenizer = str(given.data / "tokenizer.json")
    with realhf.start(num_workers=given.num_workers, run_dir=given.run_dir, tokenizer=tokenizer) as cluster:
        for line in PROGRAMS[given.program](cluster, given.data, given.steps):
            print(line, flush=True)
            lines.append(line)
    return lines


if __name__ == "__main__":
    main()
