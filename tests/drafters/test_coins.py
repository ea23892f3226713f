"""Random numbers of rows: the right law, and each row's its own."""

import torch

from draftsmith.drafters.coins import SeededCoins

LAW = torch.tensor([0.5, 0.25, 0.25, 0.0])
ROWS = torch.arange(400)


def test_draws_follow_the_law_and_the_seed():
    first, again = SeededCoins(range(400)), SeededCoins(range(400))
    draws = torch.cat([first.draw(LAW.expand(400, 4), ROWS) for _ in range(50)])
    assert torch.equal(draws[:400], again.draw(LAW.expand(400, 4), ROWS))
    share = torch.bincount(draws, minlength=4) / len(draws)
    assert (share - LAW).abs().max() < 0.02


def test_flips_come_up_with_probability_p_over_q_and_never_where_p_is_zero():
    coins, q = SeededCoins(range(400)), torch.full((400,), 0.5)
    flips = torch.cat([coins.flip(0.3 * q, q, ROWS) for _ in range(50)])
    assert abs(float(flips.double().mean()) - 0.3) < 0.02
    assert bool(coins.flip(2 * q, q, ROWS).all())
    assert not bool(coins.flip(0 * q, q, ROWS).any())


def test_a_rows_numbers_do_not_depend_on_the_others():
    together, alone = SeededCoins([7, 8]), SeededCoins([8])
    both, last = torch.tensor([0, 1]), torch.tensor([1])
    together.draw(LAW.expand(2, 4), both)
    alone.draw(LAW[None], torch.tensor([0]))
    for _ in range(5):
        mine = together.draw(LAW[None], last)
        assert torch.equal(mine, alone.draw(LAW[None], torch.tensor([0])))
