"""MLflow: journals that stages write, the process that sends them, the registry and its names."""
