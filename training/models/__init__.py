"""Load, adapt and run causal language models: attention over packed rows, the fused head, log-probabilities."""
