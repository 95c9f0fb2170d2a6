-- Runs once, when Postgres creates its first database (prefect).
CREATE DATABASE mlflow;
