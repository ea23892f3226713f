"""Trains in child processes, one or several together, that may be killed: `children.py JOBS.json`.

A job is a recipe, a run's folder, the number of processes, how they share the work, and when one of
them dies: at a call (`module.name` and its number), after some seconds, or never. Children are
forked from a parent that has only imported, so that they start in no time.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import transformers.models.llama.modeling_llama  # noqa: F401, the target's: transformers is lazy

from draftsmith.recipes.entry import BAD_INPUT, guard
from draftsmith.recipes.schema import Recipe
from draftsmith.train import trainer


def in_children(folder, jobs):
    """Do the jobs one after the other; which were killed."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, __file__, str(folder / "jobs.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line == "True" for line in done.stdout.splitlines() if line in ("True", "False")]


def job_of(recipe, run, **more):
    """A job as JSON."""
    return {"recipe": recipe.model_dump(mode="json"), "run": str(run), **more}


def die_at(module, name, number):
    """Replace module.name by one that dies instead of its `number`-th call."""
    home = importlib.import_module(module)
    real, count = getattr(home, name), 0

    def call(*arguments, **options):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(home, name, call)


# What `accelerate launch` says by its environment.
SHARINGS = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}


def places(count, sharing):
    """What a launcher tells each of so many processes."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= SHARINGS[sharing]
    ranks = ({"RANK": rank, "LOCAL_RANK": rank} for rank in range(count))
    return [{name: str(value) for name, value in {**shared, **rank}.items()} for rank in ranks]


def start(job, place):
    """Fork a process that does the job."""
    child = os.fork()
    if child == 0:
        os.environ.update(place)
        if "call" in job and place.get("RANK", "0") == str(job.get("rank", 0)):
            die_at(*job["call"])
        recipe = Recipe.model_validate(job["recipe"])
        code = guard(lambda: trainer.train(recipe, Path(job["run"])))
        os._exit(code)
    return child


def run(job):
    """One job; whether it was killed."""
    ranks = places(job.get("processes", 1), job.get("sharing", "ddp"))
    children = [start(job, place) for place in ranks]
    if "seconds" in job:
        time.sleep(job["seconds"])
        os.kill(children[-1], signal.SIGKILL)
    states = {os.waitpid(child, 0)[1] for child in children}
    # Where one is killed, the others end by themselves.
    allowed = {0, signal.SIGKILL, BAD_INPUT << 8}
    assert states <= allowed and (signal.SIGKILL in states or states == {0}), (job, states)
    return states != {0}


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        print(run(job), flush=True)
