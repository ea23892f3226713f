"""Rules and adjusted laws in the real decoding loop."""

import pytest
import torch

from draftsmith.drafters.draws import draw_slots
from draftsmith.drafters.projection import slot_logits
from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval import decode as loop
from draftsmith.eval.arms import Arm
from draftsmith.eval.bench import run_arm
from draftsmith.eval.decode import decode, decode_batch
from draftsmith.eval.history import History, history_for
from draftsmith.eval.rules import RULES
from draftsmith.recipes.errors import UserError
from tests.coins import distance, law_of
from tests.eval.test_decode import noisy_drafter
from tests.tiny import tiny_target

PROMPT = [20, 21, 22, 23, 24, 20, 21]
SIBLINGS = Tree(((0,), (1,)))
PENALTY = Sampling(repetition_penalty=1.4, logit_bias=((7, 1.0), (9, -3.0)))


class Sampled:
    """A drafter whose heads are sampled, not read off."""

    taps = ()

    def __init__(self, drafter, draw):
        self.inner, self.draw, self.depth = drafter, draw, drafter.depth
        self.start, self.commit = drafter.start, drafter.commit

    def propose(self, state, root, plan):
        heads = self.inner
        logits = slot_logits(heads.states(state.hidden, root), heads.head(), heads.adjust)
        laws = standardise(logits.float(), plan.sampling)
        return draw_slots(laws, plan.tree, self.draw, plan.coins)


def target_law(target, context, left, sampling):
    if left == 0:
        return {(): 1.0}
    final = target.base(input_ids=torch.tensor([context])).last_hidden_state[0, -1]
    seen = torch.zeros(target.vocab_size, dtype=torch.bool)
    seen[context] = True
    law = standardise(target.logits(final).double(), sampling, seen)
    return {
        (token, *rest): float(law[token]) * share
        for token in law.nonzero()[:, 0].tolist()
        for rest, share in target_law(target, [*context, token], left - 1, sampling).items()
    }


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, 2, repetition_penalty=1.5)])
@pytest.mark.parametrize(
    ("name", "draw", "tree"),
    [
        ("token", "chain", chain(2)),
        ("block", "chain", chain(2)),
        ("multi_step", "iid", SIBLINGS),
        ("without_replacement", "without_replacement", SIBLINGS),
        ("k_sequential", "iid", SIBLINGS),
    ],
)
def test_the_law_of_the_real_loop_with_drawn_drafts_is_the_targets(
    monkeypatch, name, draw, tree, sampling
):
    target = tiny_target(3, hidden=16, eos=(), spread=0.3)
    target.eos_ids = ()
    drafter = Sampled(noisy_drafter(target, heads=2), draw)

    def run(coins):
        monkeypatch.setattr(loop, "SeededCoins", lambda seeds: coins)
        options = dict(sampling=sampling, max_new_tokens=2, tree=tree, rule=RULES[name])
        return tuple(decode(target, drafter, [0, 1], **options).tokens)

    out, want = law_of(run), target_law(target, [0, 1], 2, sampling)
    assert sum(out.values()) == pytest.approx(1.0)
    assert distance(out, want) < 1e-5  # fp32 logits


@pytest.mark.parametrize("tree", [None, chain(3), Tree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))])
def test_penalty_and_bias_give_the_greedy_output_of_transformers(tree):
    accepted = 0
    for seed in range(4):
        target = tiny_target(40, seed=seed, spread=0.15, eos=())
        drafter = None if tree is None else noisy_drafter(target, seed=seed)
        options = dict(sampling=PENALTY, max_new_tokens=24, eos_ids=())
        out = decode(target, drafter, PROMPT, tree=tree, **options)
        want = target.model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            repetition_penalty=PENALTY.repetition_penalty,
            sequence_bias=[[[token], bias] for token, bias in PENALTY.logit_bias],
        )
        assert out.tokens == want[0, len(PROMPT) :].tolist()
        accepted += sum(turn.accepted for turn in out.rounds)
    assert tree is None or accepted > 0


@pytest.mark.parametrize("sampling", [PENALTY, Sampling(0.9, min_p=0.05, repetition_penalty=1.4)])
def test_rows_of_a_batch_keep_their_own_history(sampling):
    """Also when rows before them have left the batch."""
    target = tiny_target(40, spread=0.15, eos=(), dtype=torch.float64)
    drafter, prompts = noisy_drafter(target), [PROMPT, [30, 31], [12, 13, 14], [20] * 9]
    options = dict(sampling=sampling, max_new_tokens=20, tree=chain(3), eos_ids=(15, 4, 8))
    seeds = [5, 6, 7, 8]
    together = decode_batch(target, drafter, prompts, seeds=seeds, **options)
    for prompt, seed, one in zip(prompts, seeds, together, strict=True):
        assert decode(target, drafter, prompt, seed=seed, **options).tokens == one.tokens
    assert len({len(one.tokens) for one in together}) > 1


def test_history_follows_paths_and_rounds():
    history = History([[1, 2], [5]], 8, torch.device("cpu"))
    tokens, parent = torch.tensor([[3, 4, 6], [6, 7, 0]]), torch.tensor([[0, 1, 0], [0, 0, 2]])
    proposal = Proposal(tokens, parent, torch.ones_like(tokens).bool())
    seen = history.before(proposal, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 3, 3, 0]))
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [
        [1, 2, 3, 4],
        [1, 2, 6],
        [0, 5, 7],
        [5],
    ]
    verdict = Verdict(torch.tensor([[1, 2], [0, 0]]), torch.tensor([2, 0]), torch.tensor([0, 2]))
    history.commit(proposal, verdict)
    assert [row.nonzero()[:, 0].tolist() for row in history.seen] == [[0, 1, 2, 3, 4], [2, 5]]
    history.select(torch.tensor([1]))
    assert history.seen.nonzero()[:, 1].tolist() == [2, 5]
    assert history_for(Sampling(1.0), [[1]], 8, torch.device("cpu")) is None


def test_an_arm_carries_its_rule_into_decoding():
    target = tiny_target(40, eos=())
    options = dict(sampling=Sampling(1.0), drafter=noisy_drafter(target), tree=chain(3))
    arm = Arm("typical", "plain", rule=RULES["typical"], **options)
    assert arm.acceptance == "typical (epsilon 0.09, delta 0.3), lossy"
    (mine,) = run_arm(target, arm, [PROMPT], max_new_tokens=12, seeds=[0])
    assert len(mine.tokens) == 12
    with pytest.raises(UserError, match="rule token is for draw 'chain', not for 'point'"):
        token = Arm("token", "plain", rule=RULES["token"], **options)
        run_arm(target, token, [PROMPT], max_new_tokens=12, seeds=[0])
