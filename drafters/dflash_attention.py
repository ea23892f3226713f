"""What blocks see in training: their document before their anchor, and themselves.

Consecutive blocks of a document attend together, a run at a time: their queries meet the document
up to the last of their anchors once, and every block its own keys; both parts share one softmax.
So the cost is that of N * B queries over a document and a block. Scores are computed again in the
backward pass: what is kept is one number per query and head. On CUDA the same pattern is one call
of FlexAttention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from draftsmith.drafters.slots import Batch, Roots

SCORES = 2**17  # of a head and a run with the context, about: they stay in a core's cache
Over = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """Blocks `first` to `last` (not included), whose context lies in [start, end) of a row."""

    first: int
    last: int
    row: int
    start: int
    end: int
    hidden: Tensor  # [G, 1, S] bool: of the last S of the context, what is not before an anchor


def runs_of(batch: Batch, roots: Roots, block: int) -> list[Run]:
    """Runs of the blocks of these roots, in order."""
    begins = roots.position - batch.positions[roots.row, roots.position]  # of their documents
    rows, starts, ends = (one.tolist() for one in (roots.row, begins, roots.position))
    found, first = [], 0
    for last in range(1, len(rows) + 1):
        goes_on = last < len(rows) and (rows[last], starts[last]) == (rows[first], starts[first])
        if goes_on and (last + 1 - first) * block * (ends[last] - starts[last]) <= SCORES:
            continue
        anchors, end = roots.position[first:last, None, None], max(ends[first:last])
        hidden = torch.arange(min(ends[first:last]), end, device=anchors.device) >= anchors
        found.append(Run(first, last, rows[first], starts[first], end, hidden))
        first = last
    return found


def over_runs(runs: list[Run]) -> Over:
    """Attention of blocks, run by run: queries [N, Q, H, d], keys and values [N, B, Hkv, d] of the
    blocks, keys and values of the context [rows, T, Hkv, d] -> [N, Q, H, d].
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        device = q.device.type
        given = [q, k, v, keys, values]
        if torch.is_autocast_enabled(device):
            given = [one.to(torch.get_autocast_dtype(device)) for one in given]
        with torch.autocast(device, enabled=False):
            mixed: Tensor = _OverRuns.apply(*given, runs)  # type: ignore[no-untyped-call]
        return mixed

    return attend


class _OverRuns(torch.autograd.Function):
    """One softmax over context and block, in two parts (2205.14135, section 3.1)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, runs: list[Run]
    ) -> Tensor:
        mixed, total = torch.empty_like(q), torch.empty_like(q[..., 0], dtype=wide(q[:0]).dtype)
        for run in runs:
            part = _Part(run, q, k, v, keys, values)
            far, near = part.scores()
            top = torch.maximum(far.amax(-1), part.to_far(near.amax(-1)))  # [Hkv, R, G, B]
            far.sub_(top[..., None]).exp_()
            near.sub_(part.to_near(top)[..., None]).exp_()
            size = far.sum(-1) + part.to_far(near.sum(-1))
            found = part.mix(far, near).div_(size[..., None])
            own = slice(run.first, run.last)
            mixed[own], total[own] = part.to_rows(found), part.to_rows(top + size.log())
        ctx.runs = runs
        ctx.save_for_backward(q, k, v, keys, values, mixed, total)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, values, mixed, total = ctx.saved_tensors
        q_grad, k_grad, v_grad = (torch.empty_like(one) for one in (q, k, v))
        # Of the context, which many runs see, in fp32.
        keys_grad, values_grad = (
            torch.zeros_like(one, dtype=total.dtype) for one in (keys, values)
        )
        shift = (grad * mixed).sum(-1, dtype=total.dtype)
        for run in ctx.runs:
            part = _Part(run, q, k, v, keys, values)
            own, seen = slice(run.first, run.last), (run.row, slice(run.start, run.end))
            part.backward(grad[own], shift[own], total[own])
            q_grad[own], k_grad[own], v_grad[own] = part.q_grad, part.k_grad, part.v_grad
            keys_grad[seen] += part.keys_grad
            values_grad[seen] += part.values_grad
        return q_grad, k_grad, v_grad, keys_grad.to(keys), values_grad.to(values), None


class _Part:
    """A run laid out for matrix products. G blocks of B queries, R query heads per key head, a
    context of C. `far` is [Hkv, R, G, B, C], against the context; `near` [G, Hkv, R, B, S], against
    the block's S places. Scores are fp32, products in the operands' dtype.
    """

    def __init__(self, run: Run, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor):
        own, seen = slice(run.first, run.last), (run.row, slice(run.start, run.end))
        shared = k.shape[-2]
        self.hidden, self.scale = run.hidden, q.shape[-1] ** -0.5
        q = q[own].unflatten(2, (shared, -1)) * self.scale  # [G, B, Hkv, R, d]
        self.lead = q.shape[:4]
        self.q_far, self.q_near = self.far_rows(q), self.near_rows(q)
        self.k_far, self.v_far = (one[seen].transpose(0, 1) for one in (keys, values))
        self.k_near, self.v_near = (
            one[own].transpose(1, 2).flatten(0, 1) for one in (k, v)
        )  # [G * Hkv, B, d]

    def far_rows(self, one: Tensor) -> Tensor:
        """[G, B, Hkv, R, d] -> [Hkv, R * G * B, d]."""
        return one.permute(2, 3, 0, 1, 4).flatten(1, 3)

    def near_rows(self, one: Tensor) -> Tensor:
        """[G, B, Hkv, R, d] -> [G * Hkv, R * B, d]."""
        return one.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1, 2)

    def from_far(self, one: Tensor) -> Tensor:
        """[Hkv, R * G * B, x] -> [Hkv, R, G, B, x]."""
        blocks, size, _, ratio = self.lead
        return one.view(len(one), ratio, blocks, size, -1)

    def from_near(self, one: Tensor) -> Tensor:
        """[G * Hkv, R * B, x] -> [G, Hkv, R, B, x]."""
        blocks, size, shared, ratio = self.lead
        return one.view(blocks, shared, ratio, size, -1)

    def to_far(self, one: Tensor) -> Tensor:
        """[G, Hkv, R, B, ..] -> [Hkv, R, G, B, ..]."""
        return one.movedim(0, 2)

    def to_near(self, one: Tensor) -> Tensor:
        """[Hkv, R, G, B, ..] -> [G, Hkv, R, B, ..]."""
        return one.movedim(2, 0)

    def to_rows(self, one: Tensor) -> Tensor:
        """[Hkv, R, G, B, ..] -> [G, B, H, ..]."""
        return one.movedim((2, 3), (0, 1)).flatten(2, 3)

    def scores(self) -> tuple[Tensor, Tensor]:
        """Against the context and the block, scaled, -inf where a block may not look."""
        far = self.from_far(torch.bmm(wide(self.q_far), wide(self.k_far).transpose(1, 2)))
        near = self.from_near(torch.bmm(wide(self.q_near), wide(self.k_near).transpose(1, 2)))
        last = self.hidden.shape[-1]
        far[..., far.shape[-1] - last :].masked_fill_(self.hidden, -torch.inf)
        return far, near

    def mix(self, far: Tensor, near: Tensor) -> Tensor:
        """Values weighted: [Hkv, R, G, B, d], fp32."""
        dtype = self.v_far.dtype
        context = torch.bmm(far.flatten(1, 3).to(dtype), self.v_far)
        block = torch.bmm(near.flatten(0, 1).flatten(1, 2).to(dtype), self.v_near)
        return wide(self.from_far(context)) + self.to_far(self.from_near(block))

    def backward(self, grad: Tensor, shift: Tensor, total: Tensor) -> None:
        """From the gradient of the result [G, B, H, d]; `shift` is its product with the result and
        `total` the log of the softmax's sum, [G, B, H].
        """
        blocks, _, shared, ratio = self.lead
        pulled = grad.unflatten(2, (shared, ratio))
        shift, total = (one.unflatten(2, (shared, ratio))[..., None] for one in (shift, total))
        far, near = self.scores()
        far.sub_(self.from_far(self.far_rows(total))).exp_()
        near.sub_(self.from_near(self.near_rows(total))).exp_()
        q_far, self.keys_grad, self.values_grad = self.pull(
            far.flatten(1, 3),
            self.far_rows(pulled),
            self.far_rows(shift),
            self.q_far,
            self.k_far,
            self.v_far,
        )
        q_near, k_near, v_near = self.pull(
            near.flatten(0, 1).flatten(1, 2),
            self.near_rows(pulled),
            self.near_rows(shift),
            self.q_near,
            self.k_near,
            self.v_near,
        )
        self.keys_grad, self.values_grad = (
            one.transpose(0, 1) for one in (self.keys_grad, self.values_grad)
        )
        self.q_grad = self.to_rows(wide(self.from_far(q_far)) + self.to_far(self.from_near(q_near)))
        self.k_grad, self.v_grad = (
            one.unflatten(0, (blocks, shared)).transpose(1, 2) for one in (k_near, v_near)
        )

    def pull(
        self, law: Tensor, grad: Tensor, shift: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values of one part, which has this law."""
        dtype = q.dtype
        values = torch.bmm(law.to(dtype).transpose(1, 2), grad)
        inner = wide(torch.bmm(grad, v.transpose(1, 2))).sub_(shift).mul_(law)
        inner = inner.to(dtype)
        return torch.bmm(inner, k).mul_(self.scale), torch.bmm(inner.transpose(1, 2), q), values


def wide(one: Tensor) -> Tensor:
    """At least fp32."""
    return one.to(torch.promote_types(one.dtype, torch.float32))


def gather(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of [N, M, H, d] over [N, S, Hkv, d]; mask [.., M, S] or none."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2)


def over_all(batch: Batch, roots: Roots, block: int) -> Over:
    """The same as `over_runs`, as one call of FlexAttention over all rows and blocks."""
    total, count = batch.ids.numel(), len(roots.row)
    anchors = roots.row * batch.ids.shape[1] + roots.position  # [N] into the flattened rows
    begins = anchors - batch.positions[roots.row, roots.position]
    kernel, masked = kernels(batch.ids.device.type)

    @cache
    def mask_of(size: int) -> Any:
        """For blocks of so many queries."""

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            group = query // size
            context = (key >= begins[group]) & (key < anchors[group])
            own = (key - total) // block == group
            return torch.where(key < total, context, own)

        shape = count * size, total + count * block
        return masked(visible, None, None, *shape, device=batch.ids.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen, read = (
            torch.cat([context.flatten(0, 1), own.flatten(0, 1)])
            for context, own in ((keys, k), (values, v))
        )
        heads = [one.transpose(0, 1)[None] for one in (q.flatten(0, 1), seen, read)]
        mixed: Tensor = kernel(*heads, block_mask=mask_of(q.shape[1]), enable_gqa=True)
        blocks: Tensor = mixed[0].transpose(0, 1).unflatten(0, (-1, q.shape[1]))
        return blocks.to(q.dtype)

    return attend


@cache
def kernels(device: str) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """FlexAttention and its mask builder: compiled, but on CPUs, where that has no gradient."""
    if device == "cpu":
        return flex_attention, create_block_mask
    return torch.compile(flex_attention), torch.compile(create_block_mask)


def attention(batch: Batch, roots: Roots, block: int) -> Over:
    """How the blocks of these roots attend, on whatever device they are."""
    if batch.ids.device.type == "cuda" and len(roots.row):
        return over_all(batch, roots, block)
    return over_runs(runs_of(batch, roots, block))
