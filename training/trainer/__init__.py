"""The training run: loop, DeepSpeed engine, checkpoints, memory estimate, guards, parity check."""
