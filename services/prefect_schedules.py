"""Prefect's server checks the parameters of a run that somebody starts, but not those of a schedule, whose runs fail at
night instead. With this module the server checks both (services/prefect_internals.py puts the check in its place).
"""

from functools import wraps
from typing import Any

from fastapi import HTTPException
from prefect.utilities.schema_tools import ValidationError, validate

from services.prefect_internals import Store


def checking(store: Store, read_deployment: Store) -> Store:
    @wraps(store)
    async def checked(**given: Any) -> Any:
        for schedule in given["schedules"] if "schedules" in given else [given["schedule"]]:
            if schedule.parameters:
                deployment = await read_deployment(given["session"], given["deployment_id"])
                _check(deployment, schedule.parameters)
        return await store(**given)

    return checked


def _check(deployment: Any, parameters: dict[str, Any]) -> None:
    if deployment is None or not deployment.enforce_parameter_schema:
        return
    try:
        validate({**deployment.parameters, **parameters}, deployment.parameter_openapi_schema, raise_on_error=True)
    except ValidationError as error:
        raise HTTPException(409, f"The schedule's parameters do not fit the deployment: {error}") from None
