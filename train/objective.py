"""What slots are trained for: a loss per position, weights per slot, one denominator."""

import torch
from torch import Tensor

from draftsmith.drafters.chunked import Law, Need, Rows, projected_sum
from draftsmith.drafters.projection import (
    Sums,
    Table,
    TargetHead,
    draft_index,
    slot_logits,
    slot_sums,
    wide,
)
from draftsmith.drafters.slots import Head, SlotLabels, SlotStates, TargetStates
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import ObjectiveConfig
from draftsmith.train import losses


class Objective:
    """The training objective of `depth` slots.

    Calling it gives a sum: divide by the denominators of all micro-batches and processes of the
    optimizer step, added up.
    """

    def __init__(self, config: ObjectiveConfig, depth: int) -> None:
        self.config = config
        self.taught = config.loss != "ce"  # by the target's whole law
        self.coupled = config.loss == "e2e_tv" or config.weights == "dpace"
        self.static_weights = None if self.coupled else slot_weights(config, depth)

    def denominator(self, labels: SlotLabels, head: Head) -> Tensor:
        """This batch's share of the denominator, a scalar known before any forward: the static
        weights of the slots that have a loss, or the groups where weights depend on the model.
        """
        counted = labels.valid
        if self.static_weights is None:
            return counted[:, 0].sum().to(torch.float32)
        if self.config.loss == "ce":
            counted = counted & draft_index(labels.label, head.ids)[1]
        return (counted * self.static_weights.to(counted.device)).sum()

    def __call__(
        self,
        slots: SlotStates,
        states: TargetStates,
        target: TargetHead,
        *,
        chunk: int,
        metrics: bool = False,
    ) -> tuple[Tensor, Sums]:
        """The loss as a sum, on the graph, and `slot_sums`.

        `metrics` adds the overlap with the teacher to a loss that does without the teacher's whole
        law (for cross-entropy one more projection).
        """
        loss = _Chunked(self, slots.labels.valid.device, metrics=metrics)
        return projected_sum(slots, states, target, loss, chunk=chunk)

    def reference(
        self,
        slots: SlotStates,
        states: TargetStates,
        target: TargetHead,
        *,
        metrics: bool = False,
    ) -> tuple[Tensor, Sums]:
        """The same, readable: every logit at once, differentiated by autograd."""
        labels, ids = slots.labels, slots.head.ids
        label, inside = draft_index(labels.label, ids)
        logits = slot_logits(slots.hidden, slots.head, target.adjust)  # [N, K, Vq]
        flat = logits.flatten(0, 1)
        counted, teacher = labels.valid, None
        if metrics or self.config.loss != "ce":
            final = states.final[labels.teacher_row, labels.teacher_position]
            raw = final.to(target.head_weight.dtype) @ target.head_weight.T
            teacher = target.adjust(wide(raw)).flatten(0, 1)  # [N * K, V]
        if self.config.loss == "ce":
            value, counted = losses.ce(flat, label.flatten()), counted & inside
        else:
            assert teacher is not None
            value = self.divergence(flat, teacher, ids)
        value = value.view_as(label)
        if self.config.loss == "e2e_tv":
            loss = losses.e2e_tv(1 - value, counted).sum()
        else:
            loss = (self.weights(value.detach(), counted, labels.valid) * value).sum()
        hit = (logits.argmax(-1) == label) & inside
        shared = None
        if teacher is not None and (metrics or self.config.loss != "kl"):
            shared = losses.overlap(flat, teacher, ids=ids).detach().view_as(value)
        return loss, slot_sums(Table(value, hit, shared), labels.valid, loss)

    def divergence(self, logits: Tensor, teacher: Tensor, ids: Tensor | None) -> Tensor:
        """The loss of positions [n, Vq] against the teacher [n, V]."""
        match self.config.loss:
            case "kl":
                return losses.kl(logits, teacher, temperature=self.config.temperature, ids=ids)
            case "lk":
                return losses.lk_hybrid(logits, teacher, eta=self.config.lk_eta, ids=ids)
            case _:
                return losses.tv(logits, teacher, ids=ids)

    def weights(self, value: Tensor, counted: Tensor, valid: Tensor) -> Tensor:
        """Every slot's weight [n, K], given whole groups' values, detached; 0 where not counted."""
        if self.static_weights is not None:
            return self.static_weights.to(value) * counted
        if self.config.loss == "e2e_tv":
            return losses.e2e_tv_weights(1 - value, valid) * counted
        # A label that the draft's vocabulary lacks has q = 0: later slots are reached less often.
        q_label = torch.where(counted, torch.exp(-value), 0.0)
        return losses.dpace_weights(q_label, valid, self.config.dpace_alpha) * counted


class _Chunked:
    """The objective as `projected_sum` takes it."""

    def __init__(self, objective: Objective, device: torch.device, *, metrics: bool) -> None:
        self.objective, self.config = objective, objective.config
        static = objective.static_weights
        self.static_weights = None if static is None else static.to(device)
        self.reads_label = self.config.loss == "ce"
        temperatures = {"kl": self.config.temperature, "lk": 1.0}
        full = metrics or self.config.loss in ("tv", "lk", "e2e_tv")
        self.need = Need(full=full, temperature=temperatures.get(self.config.loss))

    def rows(self, logits: Tensor, label: Tensor, law: Law | None, spare: Tensor) -> Rows:
        """Value and gradient of positions [n, Vq]."""
        if self.config.loss == "ce":
            return losses.ce_rows(logits, label, law, spare)
        assert law is not None
        match self.config.loss:
            case "kl":
                return losses.kl_rows(logits, law, self.config.temperature, spare)
            case "lk":
                return losses.lk_rows(logits, law, self.config.lk_eta, spare)
            case _:
                return losses.tv_rows(logits, law, spare)

    def weigh(self, value: Tensor, counted: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Values of whole groups [n, K] -> (loss summed, weights [n, K])."""
        weights = self.objective.weights(value, counted, valid)
        if self.config.loss == "e2e_tv":
            return losses.e2e_tv(1 - value, counted).sum(), weights
        return (weights * value).sum(), weights


def slot_weights(config: ObjectiveConfig, depth: int) -> Tensor:
    """Static weights of slots 1..depth, [K]: decay^k (Medusa, 2401.10774), exp(-(k-1)/gamma)
    (DFlash, 2602.06036), or as listed.
    """
    slot = torch.arange(1, depth + 1, dtype=torch.float32)
    if config.weights == "list":
        if len(config.slot_weights) != depth:
            raise UserError(
                f"objective.slot_weights: {len(config.slot_weights)} given for {depth} slots; "
                "give one per slot"
            )
        return torch.tensor(config.slot_weights)
    if config.weights == "exponential":
        gamma = published_gamma(depth) if config.gamma is None else config.gamma
        return torch.exp(-(slot - 1) / gamma)
    return torch.tensor(config.decay) ** slot


def published_gamma(depth: int) -> float:
    """DFlash's gamma (2602.06036, section 4): 4 for blocks of 8, 5 for 10, 7 for 16."""
    block = depth + 1
    return 4.0 if block <= 8 else 5.0 if block <= 10 else 7.0
