"""Preference losses and their options, the objective over the global batch, and metrics: pure functions of tensors."""
