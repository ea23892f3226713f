"""The drafter sharded by PyTorch (`fully_shard`): weights, gradients and moments.

Its weights are gathered for a step's forward and backward pass, all at once: of a drafter, its
moments and gradients weigh more. The frozen target's layers are spread by `drafters/sharding.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.drafters.sharding import device_mesh, whole
from draftsmith.recipes.schema import OptimConfig
from draftsmith.train.parallel import MOMENTS, Tensors, adamw, load_moments
from draftsmith.train.processes import Processes


class Fsdp:
    """As `Parallel` says."""

    def __init__(self, processes: Processes, loss: nn.Module, config: OptimConfig) -> None:
        self.main = processes.accelerator.is_main_process
        frozen = {value for value in loss.parameters() if not value.requires_grad}
        mesh = device_mesh(processes.accelerator.device)
        self.model: Any = fully_shard(loss, mesh=mesh, ignored_params=frozen)
        assert isinstance(self.model, FSDPModule)
        prefix = "drafter."
        self.parameters: dict[str, nn.Parameter] = {
            name.removeprefix(prefix): value
            for name, value in loss.named_parameters()
            if value.requires_grad
        }
        whole = [name for name, value in self.parameters.items() if not isinstance(value, DTensor)]
        assert not whole, f"not sharded: {whole}"
        self.optimizer = adamw(self.parameters, config)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """AdamW's."""
        return self.optimizer.param_groups

    def micro(self, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced once in a step."""
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient."""
        loss.backward()

    def step(self, clip: float) -> float:
        """Nothing moves where the norm is not finite."""
        found = torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        if torch.isfinite(torch.tensor(norm)):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def weights(self) -> Tensors:
        """Gathered one by one."""
        return self.keep({name: value.detach() for name, value in self.parameters.items()})

    def moments(self) -> Tensors:
        """Gathered one by one."""
        return self.keep(
            {
                f"{kind}.{name}": self.optimizer.state[value][kind]
                for name, value in self.parameters.items()
                if value in self.optimizer.state
                for kind in MOMENTS
            }
        )

    def keep(self, tensors: Tensors) -> Tensors:
        """All of them whole, on the main process."""
        kept = {}
        for name, value in tensors.items():
            found = whole(value)
            if self.main:
                kept[name] = found.cpu()
        return kept

    def load(self, weights: Tensors, moments: Tensors) -> None:
        """Every process reads everything and keeps its part."""

        def place(whole: Tensor, like: nn.Parameter) -> Tensor:
            assert isinstance(like, DTensor)
            return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)

        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(place(weights[name], value))
        load_moments(self.optimizer, self.parameters, moments, place)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """In place of the sharded ones: PyTorch shards again whatever `state_dict` is asked for."""
        places = [
            (module, name, value)
            for module in self.model.modules()
            for name, value in module.named_parameters(recurse=False)
            if isinstance(value, DTensor)
        ]
        for module, name, value in places:
            module.register_parameter(name, nn.Parameter(whole(value.detach())))
        try:
            yield
        finally:
            for module, name, value in places:
                module.register_parameter(name, value)
