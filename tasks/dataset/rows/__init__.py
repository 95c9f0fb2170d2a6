"""One row of preference data: its shape, its conversation, its hash, and the reasons to reject it."""
