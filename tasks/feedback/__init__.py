"""What people say about a model's answers: events, their journal on disk, traces in MLflow, raters, training rows."""
