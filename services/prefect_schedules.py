"""Prefect's server checks the parameters of a run that somebody starts, but not those of a schedule, whose runs fail at
night instead. With this module the server checks both.

Prefect has no public place for such a check, so the functions that store schedules are replaced by ones that check.
"""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from fastapi import HTTPException
from prefect.server.models import deployments
from prefect.utilities.schema_tools import ValidationError, validate

Store = Callable[..., Awaitable[Any]]


def _checking(store: Store) -> Store:
    @wraps(store)
    async def checked(**given: Any) -> Any:
        for schedule in given["schedules"] if "schedules" in given else [given["schedule"]]:
            if schedule.parameters:
                deployment = await deployments.read_deployment(given["session"], given["deployment_id"])
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


deployments.create_deployment_schedules = _checking(deployments.create_deployment_schedules)
deployments.update_deployment_schedule = _checking(deployments.update_deployment_schedule)
