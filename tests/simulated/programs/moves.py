"""moves: an actor's parameters go to a copy in another layout and back, and a reference follows, as in a worker.

A thread of moves carries them out on a stream of its own. What the master does, in its order, is done here: it asks for
the preparation, sends the move, and lets the copy go behind the call.
"""

import os
import queue
import traceback
from types import SimpleNamespace
from typing import Any

import torch

from realhf.api import Follow, ModelSetup
from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings, OptimizerConfig
from realhf.api.resolved import ResolvedExperiment
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.rundir.run import Run, RunSpec
from realhf.transport.messages import BatchKey, FollowParameters, Move, PrepareMove, Reallocate, Release
from realhf.worker.channels import Channels
from realhf.worker.move_thread import MoveThread
from realhf.worker.parameter_moves import ParameterMoves
from tests.simulated.programs.common import (
    DEVICE,
    RANK,
    SMALL,
    TIMEOUT_S,
    end,
    generate,
    join_world,
    model_in,
    say,
    table_of,
    train,
)
from tests.unit.api.calls import call

STEPS = 4
PLAN = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), dp=2),
        "reference_inference": CallPlan(devices=(1, 1)),
        "actor_train_step": CallPlan(devices=(0, 2), tp=2),
    },
)
RPCS = [
    call("actor", GENERATE, ["prompt"], ["seq"], model_type=SMALL),
    call("reference", INFERENCE, ["seq"], ["logprob"], model_type=SMALL),
    call("actor", TRAIN_STEP, ["seq", "logprob"], model_type=SMALL),
]
MODELS = {
    "actor": ModelSetup(optimizer=OptimizerConfig(), dtype="bfloat16"),
    "reference": ModelSetup(follows=Follow("actor", eta=1.0), dtype="bfloat16"),
}
experiment: Any = SimpleNamespace(rpcs=RPCS, dataset=SimpleNamespace(keys=("prompt",)), models=MODELS)
vars(experiment)[SETTINGS_ATTRIBUTE] = AutoSettings(batch_size=8)
spec = RunSpec(
    experiment_file="", experiment_class="", values={}, working_directory="", num_workers=2, devices_per_node=2,
    call_timeout_s=TIMEOUT_S, verify_reallocations_every=0,
)  # fmt: skip
run = Run(spec, ResolvedExperiment(experiment), PLAN)
join_world()
table = table_of(*map(PLAN.layout, PLAN.calls))
models: Any = {
    (name, home): model_in(table.groups(home), trains=name == "actor")
    for name, home in run.homes.items()
    if RANK in home.mesh.devices
}
moves = ParameterMoves(run, RANK, DEVICE, table, models)


def fail(error: BaseException, *_: object) -> None:
    traceback.print_exception(error)
    os._exit(1)


sent: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
done: queue.SimpleQueue[object] = queue.SimpleQueue()
activity: Any = SimpleNamespace(set_beside=lambda text: None)
thread = MoveThread(Channels(activity, sent, done.put, fail), moves.carry_out, DEVICE, TIMEOUT_S)
actor = models["actor", run.homes["actor"]]
layout, name = PLAN.layout("actor_generate"), "actor_generate"
here = []
for step in range(STEPS):
    batch = BatchKey("train", step)
    request = PrepareMove(request_id=0, batch=batch, name=name, model="actor", layout=layout)
    moves.prepare(request)
    thread.prepared(request)
    sent.put(Reallocate(request_id=0, batch=batch, call=name, model="actor", layout=layout, version=step))
    thread.wait()
    done.get(timeout=TIMEOUT_S)
    generate(models["actor", layout], "off")
    thread.computed()
    moves.release(Release(model="actor", layout=layout))
    train(actor)
    actor.residency.begin_at_version(step + 1)
    thread.computed()
    sent.put(FollowParameters(request_id=0, batch=batch, name="reference_follows_actor"))
    done.get(timeout=TIMEOUT_S)
    torch.cuda.synchronize()
    here.append(torch.cuda.memory_allocated())
    say(f"home, copy: {actor.residency.where.name}, {models['actor', layout].residency.where.name}")
say(f"bytes more than after step 2: {here[-1] - here[1]}")
end()
