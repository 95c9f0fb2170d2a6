-- Run once, when Postgres makes its first database (prefect): MLflow's beside it.
CREATE DATABASE mlflow;
