"""What people say about a model's answers: events, their journal on disk, raters, and rows for training."""
