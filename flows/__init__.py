"""The Prefect flows: dpo, sweep, and the tasks they consist of."""

import services  # noqa: F401  # Prefect's settings, which must be set before Prefect is imported
