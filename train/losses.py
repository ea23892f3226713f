"""Losses as pure functions of a position: logits in, [n] out. No mask, no mean, no state.

p is the target's law, q the draft's. The draft's vocabulary may be a subset of the target's rows
(`ids`): q is zero outside it. The upper half is the readable form, differentiated by autograd; the
lower half computes the same value with its gradient in closed form, for the chunked projection.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafters.chunked import Law, Rows


def ce(logits: Tensor, label: Tensor) -> Tensor:
    """-log q(label), label a row of the draft's head: [n, Vq], [n] -> [n] (Medusa, 2401.10774)."""
    return F.cross_entropy(logits, label, reduction="none")


def kl(
    logits: Tensor, teacher: Tensor, *, temperature: float = 1.0, ids: Tensor | None = None
) -> Tensor:
    """T^2 KL(p || q), both at temperature T: [n, Vq], [n, V] -> [n] (Hinton et al., 1503.02531).

    With a reduced vocabulary p is renormalised over it.
    """
    kept = teacher if ids is None else teacher[:, ids]
    log_p = torch.log_softmax(kept / temperature, dim=-1)
    log_q = torch.log_softmax(logits / temperature, dim=-1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def overlap(logits: Tensor, teacher: Tensor, *, ids: Tensor | None = None) -> Tensor:
    """alpha = sum_v min(p, q), the chance that a token of q is accepted (Leviathan et al.,
    2211.17192): [n, Vq], [n, V] -> [n].

    p is the law over the whole vocabulary: its mass outside a reduced one is lost.
    """
    p = torch.softmax(teacher, dim=-1)
    p = p if ids is None else p[:, ids]
    return torch.minimum(p, torch.softmax(logits, dim=-1)).sum(-1)


def tv(logits: Tensor, teacher: Tensor, *, ids: Tensor | None = None) -> Tensor:
    """Total variation 1 - alpha, the chance of a rejection (Bebop, 2606.12370): [n]."""
    return 1 - overlap(logits, teacher, ids=ids)


def lk_hybrid(logits: Tensor, teacher: Tensor, *, eta: float, ids: Tensor | None = None) -> Tensor:
    """lambda KL + (1 - lambda) TV with lambda = exp(-eta sg[alpha]) (LK losses, 2602.23881): [n].

    KL while the draft is far away, where TV's gradient is weak; TV once they overlap.
    """
    distance = tv(logits, teacher, ids=ids)
    mix = torch.exp(-eta * (1 - distance.detach()))
    return mix * kl(logits, teacher, ids=ids) + (1 - mix) * distance


def e2e_tv(alpha: Tensor, valid: Tensor) -> Tensor:
    """End-to-end TV, (1/K) sum_j (1 - prod_{i<=j} alpha_i) over valid slots j (Bebop, 2606.12370):
    [n, K] -> [n].

    A whole group gives the paper's 1 - (1/K) sum_j prod alpha; one that the document's end cuts
    short weighs as many slots as it has, so that a perfect drafter always reaches 0.
    """
    reached = torch.where(valid, alpha, 1.0).cumprod(dim=1)
    return ((1 - reached) * valid).sum(1) / alpha.shape[1]


def e2e_tv_weights(alpha: Tensor, valid: Tensor) -> Tensor:
    """Weights [n, K] under which the slots' TV has the gradient of `e2e_tv` (Bebop, 2606.12370).

    W_m = (1/K) prod_{i<m} alpha_i S_m with S_m = 1 + alpha_{m+1} S_{m+1}; detach them.
    """
    before = torch.ones_like(alpha)
    before[:, 1:] = alpha[:, :-1].cumprod(dim=1)
    gain, gains = torch.zeros_like(alpha[:, 0]), torch.zeros_like(alpha)
    for slot in reversed(range(alpha.shape[1])):
        gain = torch.where(valid[:, slot], 1 + gain, 0.0)
        gains[:, slot] = gain
        gain = alpha[:, slot] * gain
    return before * gains / alpha.shape[1]


def dpace_weights(q_label: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """w_j = sum_{m>=j} prod_{i<=m} s_i, s = (1-alpha) q(y) + alpha (D-PACE, 2605.18810): [n, K].

    w_j is the derivative of the smoothed expected length sum_m prod_{i<=m} s_i by log s_j; detach
    them.
    """
    reached = ((1 - alpha) * q_label + alpha).cumprod(dim=1) * valid
    return reached.flip(1).cumsum(dim=1).flip(1) * valid


# Value and gradient at once: `logits` and `spare` [n, Vq] are overwritten, one with the gradient.


def ce_rows(logits: Tensor, label: Tensor, law: Law | None, spare: Tensor) -> Rows:
    """`ce`; its gradient is q - onehot(label)."""
    at, top = logits.gather(-1, label[:, None])[:, 0], logits.amax(-1)
    q = torch.softmax(logits, -1, out=spare)
    # The largest probability is 1 / sum exp(z - top): the log-sum-exp without another pass of exp.
    value, shared = (top - at) - q.amax(-1).log(), common_mass(q, law, logits)
    q.scatter_add_(-1, label[:, None], q.new_full((len(label), 1), -1.0))
    return Rows(value, q, shared)


def kl_rows(logits: Tensor, law: Law, temperature: float, spare: Tensor) -> Rows:
    """`kl`; its gradient is T (q - p) at temperature T. The overlap is taken at temperature 1."""
    shared = None
    if temperature != 1.0:
        shared = None if law.full is None else common_mass(torch.softmax(logits, -1), law, spare)
        logits.div_(temperature)
    q, value = kl_value(logits, law, spare)
    if temperature == 1.0:
        shared = common_mass(q, law, logits)
    assert law.kept is not None
    return Rows(temperature**2 * value, q.sub_(law.kept).mul_(temperature), shared)


def tv_rows(logits: Tensor, law: Law, spare: Tensor) -> Rows:
    """`tv`; its gradient is q_v (S - [q_v <= p_v]) with S = sum_v [q_v <= p_v] q_v."""
    q = torch.softmax(logits, -1, out=spare)
    below, shared = overlap_parts(q, law, logits)
    return Rows(1 - shared, q.mul_(below.sum(-1, keepdim=True)).sub_(below), shared)


def lk_rows(logits: Tensor, law: Law, eta: float, spare: Tensor) -> Rows:
    """`lk_hybrid`; its mixture is held constant, so the gradients mix as the values do."""
    q, divergence = kl_value(logits, law, spare)
    below, shared = overlap_parts(q, law, logits)
    mix = torch.exp(-eta * shared)
    value = mix * divergence + (1 - mix) * (1 - shared)
    some, rest = mix[:, None], (1 - mix)[:, None]
    assert law.kept is not None
    grad = q.mul_(some + rest * below.sum(-1, keepdim=True))
    return Rows(value, grad.addcmul_(law.kept, -some).sub_(below.mul_(rest)), shared)


def kl_value(logits: Tensor, law: Law, spare: Tensor) -> tuple[Tensor, Tensor]:
    """q [n, Vq], in `spare`, and KL(p || q) [n] = sum p log p - sum p z + log sum exp z."""
    assert law.kept is not None and law.negentropy is not None
    # Shifted first, so that large logits do not cancel.
    logits.sub_(logits.amax(-1, keepdim=True))
    q = torch.softmax(logits, -1, out=spare)
    return q, law.negentropy - logits.mul_(law.kept).sum(-1) - q.amax(-1).log()


def overlap_parts(q: Tensor, law: Law, spare: Tensor) -> tuple[Tensor, Tensor]:
    """[q <= p] q [n, Vq], in `spare`, and sum min(p, q) [n]."""
    assert law.full is not None
    shared = torch.minimum(law.full, q, out=spare).sum(-1)
    # Compared into floats: multiplying by a bool tensor takes twice as long on CPU.
    return torch.ge(law.full, q, out=spare).mul_(q), shared


def common_mass(q: Tensor, law: Law | None, spare: Tensor) -> Tensor | None:
    """sum min(p, q) [n], where the whole law is there."""
    if law is None or law.full is None:
        return None
    return torch.minimum(law.full, q, out=spare).sum(-1)
