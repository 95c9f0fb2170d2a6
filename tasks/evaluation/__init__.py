"""Measuring a policy: sampled answers, judges, win rates, confidence intervals, comparison with other models."""
