-- Runs once, when Postgres creates its first database (prefect).
CREATE DATABASE mlflow ENCODING 'UTF8' TEMPLATE template0;
