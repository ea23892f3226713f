"""A target whose passes have fixed shapes and are recorded once, as CUDA graphs.

A small model's pass is hundreds of kernels that take less time than it takes to launch them. A
graph launches all of them at once; it wants every tensor at one address in one shape, so the cache
has a fixed room, every pass reads all of it, and masks hide what is not live.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.layout import Nodes
from draftsmith.drafters.reach import mask_refusal
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import RECURRENT, Target
from draftsmith.recipes.errors import UserError

WARM_UP = 2  # passes before a recording: libraries allocate their workspaces in them


@dataclass(frozen=True)
class Recording:
    """A pass at fixed addresses."""

    inputs: dict[str, Any]  # tensors that are overwritten, and what never changes
    rows: Tensor  # [1, 1] and
    columns: Tensor  # [1, M] where the pass writes
    play: Callable[[], TargetStates]  # fills the same states every time


class RecordedTarget(Target):
    """A target that decodes one prompt at a time, by passes that were recorded.

    Prefill runs as ever. On other devices than CUDA the same passes of fixed shapes run without a
    graph, which is only good for tests.
    """

    cache: TargetCache | None
    room: int
    recordings: dict[tuple[Any, ...], Recording]

    def __init__(self, target: Target, room: int) -> None:
        """The same target (its weights are shared). room: positions of the longest prompt, its
        answer and the nodes of a pass. Raises UserError for targets that take no masks.
        """
        self.__dict__.update(target.__dict__)
        refusal = mask_refusal(self.config)
        if self.layer_types & RECURRENT:
            refusal = "states that are replayed have no fixed shapes"
        if refusal is not None:
            raise UserError(f"{self.name}: {refusal}, so its passes cannot be recorded")
        self.room, self.cache, self.recordings = room, None, {}

    def new_cache(self) -> TargetCache:
        """The one cache, empty: recordings hold its addresses. One decoding at a time uses it."""
        if self.cache is None:
            super().new_cache()  # refuses what cannot be rolled back
            self.cache = TargetCache(self.model.config, self.room)
        self.cache.extent.set([0])
        return self.cache

    def feed(
        self,
        ids: Tensor,
        cache: TargetCache,
        nodes: Nodes | None = None,
        taps: tuple[int, ...] = (),
    ) -> TargetStates:
        """Replay the pass of this shape; the first one records it."""
        if cache is not self.cache or not any(cache.lengths):
            return super().feed(ids, cache, nodes, taps)
        if len(ids) != 1:
            raise UserError(
                f"{self.name}: recorded passes decode one prompt at a time, not {len(ids)}"
            )
        inputs = self.pass_inputs(ids, cache, nodes)
        key = (ids.shape[1], taps)
        if key not in self.recordings:
            self.recordings[key] = self.record(inputs, cache, taps)
        states = replay(self.recordings[key], inputs, cache)
        cache.close(ids.shape[1])
        return states

    def record(
        self, inputs: dict[str, Any], cache: TargetCache, taps: tuple[int, ...]
    ) -> Recording:
        """A pass that reads its inputs where they lie now."""
        own = {name: copied(value) for name, value in inputs.items()}
        rows, columns = cache.extent.rows, cache.extent.columns
        assert rows is not None and columns is not None, "a fixed room writes by columns"
        columns = cache.extent.columns = columns.clone()

        def run() -> TargetStates:
            return self.run(own, taps)

        play = captured(run, self.name) if self.device.type == "cuda" else run
        return Recording(own, rows, columns, play)


def replay(recording: Recording, inputs: dict[str, Any], cache: TargetCache) -> TargetStates:
    """The states of a pass with these inputs."""
    for name, value in inputs.items():
        overwrite(recording.inputs[name], value)
    assert cache.extent.columns is not None
    overwrite(recording.columns, cache.extent.columns)
    cache.extent.columns = recording.columns
    states = recording.play()
    layers = None if states.layers is None else states.layers.clone()
    return replace(states, final=states.final.clone(), layers=layers)


def captured(run: Callable[[], TargetStates], name: str) -> Callable[[], TargetStates]:
    """Record what `run` launches. It is run before, which writes where the first pass will."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            states = run()
    except RuntimeError as error:
        raise UserError(
            f"{name}: its pass cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}); "
            "measure with eval.graphs=false"
        ) from error

    def play() -> TargetStates:
        graph.replay()
        return states

    return play


def copied(value: Any) -> Any:
    """A copy of the tensors in it."""
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def overwrite(old: Any, new: Any) -> None:
    """Write tensors over a copy's."""
    if isinstance(new, dict):
        for key, value in new.items():
            overwrite(old[key], value)
    elif isinstance(new, Tensor):
        old.copy_(new)
