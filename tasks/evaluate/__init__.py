"""The stage `evaluate`: scores of held-out pairs, sampled answers, judges, win rates and their intervals."""
