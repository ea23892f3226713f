"""A frozen target whose layers are spread over processes: every process holds a part of each layer,
and all of it only while the layer runs.

The embedding, the norm and the head stay whole everywhere: drafters read them in every step, and
they are a few per cent of a large model. Only the main process reads the weights from the disk.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


def device_mesh(device: torch.device) -> DeviceMesh:
    """All processes in a row."""
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def shard(
    load: Callable[[], Any],
    outline: Callable[[], Any],
    stack_of: Callable[[Any], nn.ModuleList],
    device: torch.device,
) -> Any:
    """A causal language model on these processes' devices, its decoder layers spread.

    load: the model with its weights, on the CPU; outline: the same on the meta device.
    """
    from torch.distributed.fsdp import fully_shard

    model = load() if torch.distributed.get_rank() == 0 else outline()
    model.requires_grad_(False)
    model.eval()
    stack, mesh = stack_of(model), device_mesh(device)
    for layer in stack:
        deal(layer, device)
        fully_shard(layer, mesh=mesh)
    deal_rest(model, stack, device)
    base = model.get_decoder()
    held = set(base.parameters()) - {value for layer in stack for value in layer.parameters()}
    fully_shard(base, mesh=mesh, ignored_params=held)
    return model


def deal(module: nn.Module, device: torch.device) -> None:
    """Give every process the main process's tensors of a module, on its device."""
    if torch.distributed.get_rank() == 0:
        module.to(device)
    else:
        module.to_empty(device=device)
    spread_out([*module.parameters(), *module.buffers()])


def deal_rest(model: Any, stack: nn.ModuleList, device: torch.device) -> None:
    """The same for all that is not in the layers; tied weights stay tied."""
    layers = {id(one) for layer in stack for one in layer.modules()}
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        if id(module) in layers:
            continue
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None:
                    continue
                if id(value) not in moved:
                    moved[id(value)] = like(value, device)
                table[name] = moved[id(value)]
    spread_out(moved.values())


def like(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; what has no numbers yet gets memory for them."""
    there = torch.empty_like(value, device=device) if value.is_meta else value.detach().to(device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(there, requires_grad=False)
    return there


@torch.no_grad()
def spread_out(tensors: Iterable[Tensor]) -> None:
    """The main process's numbers, everywhere."""
    for value in tensors:
        torch.distributed.broadcast(value.data, 0)


def own_part(value: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor) -> Tensor:
    """A tensor that may be spread, as one. Every process calls it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
