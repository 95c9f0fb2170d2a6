"""Tests of paired differences that are valid for any number of prompts, however small the level.

They take one value per prompt, since the pairs of a prompt are not independent. docs/error-budget.md has hypotheses.
"""

from math import exp
from statistics import NormalDist

import numpy

BETS = 0.5 ** numpy.arange(1, 8)  # shares of the largest stake that a single prompt could wipe out
POWER = 0.9


def sign_test(wins: int, losses: int, chance: float = 0.5) -> float:
    """The probability of this many wins or more if every decided prompt is won with `chance`; exact."""
    from scipy.stats import binom  # imports for a second, which most commands would spend in vain

    return float(binom.sf(wins - 1, wins + losses, chance))


def betting_test(differences: numpy.ndarray, loss: float, reach: float) -> float:
    """A p-value against "the mean difference is -loss or worse", for differences between -reach and reach.

    A gambler stakes a fixed share of their wealth on each prompt. If the mean is -loss or worse, no stake has a
    positive expectation, so the wealth reaches 1/p with a probability of at most p (Markov). The start is split over
    BETS, because the best share depends on the unknown mean and variance.
    """
    stakes = BETS / (reach - loss)
    growth = numpy.log1p(numpy.outer(stakes, differences + loss)).sum(axis=1)  # (bets,)
    largest = growth.max()  # subtracted, so that no wealth overflows
    log_wealth = float(largest + numpy.log(numpy.exp(growth - largest).mean()))
    return exp(min(0.0, -log_wealth))


def prompts_for_lead(lead: float, decided: float, level: float, chance: float = 0.5) -> float:
    """About how many prompts show a lead (share won - share lost) to the sign test with a probability of POWER.

    `decided` is the share of prompts on which the models differ. Infinite if the lead is not above that of `chance`.
    """
    above = lead - decided * (2 * chance - 1)
    if above <= 0:
        return float("inf")
    normal = NormalDist()
    return decided * ((normal.inv_cdf(1 - level) + normal.inv_cdf(POWER)) / above) ** 2
