"""What the lossy rules promise: lenience's bound, and typical acceptance by its definition."""

import math

import pytest
import torch

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.rules import RULES
from draftsmith.eval.verify import Laws
from tests.coins import distance
from tests.one_node import drawn, one_node
from tests.toy import SAMPLINGS, ToyModel, output_law, target_law, whole_law

PLAIN = Sampling(1.0)
P, Q = whole_law(7, 5), whole_law(8, 5)


def lenient(lenience):
    return RULES["lenient"].given(lenience=lenience)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
def test_lenience_emits_no_token_with_more_than_p_over_l(lenience):
    """And reaches it: at the tokens where q is larger than p / l."""
    out, accepted = one_node(P, lambda coins: drawn(Q, 1, "chain", coins), lenient(lenience))
    alpha = torch.minimum(P / lenience, Q).sum()
    assert accepted == pytest.approx(float(alpha))
    assert (out <= P / lenience + 1e-12).all()
    capped = P / lenience < Q
    torch.testing.assert_close(out[capped], P[capped] / lenience)
    left = (P - lenience * Q).clamp(min=0)
    torch.testing.assert_close(
        out, torch.minimum(P / lenience, Q) + (1 - alpha) * left / left.sum()
    )
    if lenience in (0.5, 0.3):
        assert float((out / P).max()) == pytest.approx(1 / lenience)


def test_without_lenience_the_rule_is_token_rejection_and_with_little_left_it_is_the_drafter():
    exact, _ = one_node(P, lambda coins: drawn(Q, 1, "chain", coins), lenient(1.0))
    torch.testing.assert_close(exact, P)
    loose, _ = one_node(P, lambda coins: drawn(Q, 1, "chain", coins), lenient(1e-6))
    torch.testing.assert_close(loose, Q, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampling", [PLAIN, SAMPLINGS["penalty"]], ids=["plain", "penalty"])
def test_the_bound_of_lenience_holds_along_whole_rounds(sampling):
    model = ToyModel(0, sampling)
    out, want = output_law(model, chain(2), lenient(0.5), "chain", length=2), target_law(model, 2)
    assert all(share <= want[tokens] / 0.5**2 + 1e-12 for tokens, share in out.items())
    assert distance(out, want) > 0.02  # lossy indeed


def test_greedy_lenience_accepts_what_is_likely_enough():
    """2211.17192, appendix A.5: p(x) >= l max p (printed the other way round), else the argmax."""
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, 6, generator=noise, dtype=torch.float64)
    tokens = torch.randint(6, (300, 2), generator=noise)
    parent = torch.tensor([[0, 1]]).expand(300, -1)
    proposal = Proposal(tokens, parent, torch.ones_like(tokens).bool())
    for lenience in (1.0, 0.6, 0.2):
        verdict = lenient(lenience)(Laws(logits, Sampling()), proposal, SeededCoins([0] * 300))
        p = logits.softmax(-1)
        likely = [p[:, i].gather(1, tokens[:, i : i + 1])[:, 0] for i in range(2)]
        good = [mine >= lenience * p[:, i].amax(1) for i, mine in enumerate(likely)]
        length = good[0].long() + (good[0] & good[1]).long()
        assert torch.equal(verdict.length, length)
        assert torch.equal(verdict.next, p[torch.arange(300), length].argmax(1))
    assert 0 < int(length.sum()) < 600


def typical_path(p, proposal, row, *, epsilon, delta):
    """The accepted path by definition: over all nodes whose whole path passes."""
    best, best_key = (), (0, 0.0)
    for node in range(1, proposal.tokens.shape[1] + 1):
        path, at = [], node
        while at:
            path.insert(0, at)
            at = int(proposal.parent[row, at - 1])
        fits, log = True, 0.0
        for place in path:
            law = p[row, int(proposal.parent[row, place - 1])]
            mine = float(law[proposal.tokens[row, place - 1]])
            entropy = -sum(x * math.log(x) for x in law.tolist() if x > 0)
            fits &= mine > min(epsilon, delta * math.exp(-entropy))
            fits &= bool(proposal.valid[row, place - 1])
            log += math.log(mine) if mine > 0 else -math.inf
        if fits and (len(path), log) > best_key:
            best, best_key = tuple(path), (len(path), log)
    return best


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(0.7, top_k=4)], ids=["plain", "filtered"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.2, 0.45), (0.25, 2.0)])
def test_typical_acceptance_is_its_definition(epsilon, delta, sampling):
    tree = Tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 1, 0), (1, 0, 0)))
    noise = torch.Generator().manual_seed(1)
    rows = 60
    logits = 1.5 * torch.randn(rows, tree.nodes + 1, 7, generator=noise, dtype=torch.float64)
    tokens = torch.randint(7, (rows, tree.nodes), generator=noise)
    valid = torch.rand(rows, tree.nodes, generator=noise) < 0.9
    proposal = Proposal(tokens, tree.parent.expand(rows, -1), valid)
    laws = Laws(logits, sampling)
    rule = RULES["typical"].given(epsilon=epsilon, delta=delta)
    verdict = rule(laws, proposal, SeededCoins([0] * rows))
    grid = torch.arange(rows)[:, None].expand(-1, tree.nodes + 1)
    p = laws.at(grid.flatten(), torch.arange(tree.nodes + 1).repeat(rows)).view(logits.shape)
    lengths = []
    for row in range(rows):
        want = typical_path(p, proposal, row, epsilon=epsilon, delta=delta)
        length = int(verdict.length[row])
        assert tuple(verdict.path[row, :length].tolist()) == want
        last = want[-1] if want else 0
        assert int(verdict.next[row]) == int(logits[row, last].argmax())
        lengths.append(length)
    assert {0, 1, 2} <= set(lengths)


def test_typical_acceptance_at_temperature_zero_is_greedy():
    logits = torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(4, (50, 2), generator=torch.Generator().manual_seed(1))
    parent = torch.tensor([[0, 1]]).expand(50, -1)
    proposal = Proposal(tokens, parent, torch.ones_like(tokens).bool())
    mine, greedy = (
        RULES[name](Laws(logits, Sampling()), proposal, SeededCoins([0] * 50))
        for name in ("typical", "greedy")
    )
    assert torch.equal(mine.length, greedy.length) and torch.equal(mine.next, greedy.next)
    cold = RULES["typical"](Laws(logits, Sampling(1e-3)), proposal, SeededCoins([0] * 50))
    assert torch.equal(cold.length, greedy.length) and torch.equal(cold.next, greedy.next)
