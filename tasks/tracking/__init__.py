"""MLflow: journals that stages write, the process that sends them, and the registry."""
