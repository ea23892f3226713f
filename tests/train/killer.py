"""Trains in child processes that are killed with -9: `python killer.py JOBS.json`.

A job is a recipe, a run's folder, and when to die: at a call (`module.name` and its number), after
some seconds, or never. Children are forked from a parent that has only imported, so that they start
in no time. Prints one line per job: whether it was killed.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import transformers.models.llama.modeling_llama  # noqa: F401, the target's: transformers is lazy

from draftsmith.recipes.schema import Recipe
from draftsmith.train import trainer


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


def run(job):
    """One job; whether it was killed."""
    child = os.fork()
    if child == 0:
        if "call" in job:
            die_at(*job["call"])
        trainer.train(Recipe.model_validate(job["recipe"]), Path(job["run"]))
        os._exit(0)
    if "seconds" in job:
        time.sleep(job["seconds"])
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"{job} ended with {status}"
    return status != 0


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        print(run(job), flush=True)
