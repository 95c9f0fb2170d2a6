"""Preference losses and their options, packed rows, and metrics: pure functions of tensors."""
