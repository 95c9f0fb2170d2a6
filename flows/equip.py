"""What runs need on a Prefect server: the work pool, the deployments of infra/prefect.yaml and the automations.

    python -m flows.equip

does so on the server of PREFECT_API_URL, for workers that `make up` does not start (infra/worker.sh). Done again it
changes nothing, and a schedule that a person switched stays as it is.
"""

import os
from collections.abc import Mapping

from prefect.client.orchestration import SyncPrefectClient, get_client

from flows import automations, deploy, stack
from tasks.errors import UserError
from tasks.output import as_command


def equip(client: SyncPrefectClient, access: Mapping[str, str], asked: stack.Settings) -> None:
    """All but the pool, without which no worker starts."""
    changed = deploy.deploy(client, access, asked.timezone)
    print(f"Deployments {'deployed' if changed else 'unchanged'}: {', '.join(deploy.names())}", flush=True)
    changes = automations.watch(asked.silence) + automations.notify(asked.webhook)
    print(f"Automations {'changed: ' + ', '.join(changes) if changes else 'unchanged'}", flush=True)
    if not automations.notifies():
        print("No notifications: DPO_WEBHOOK_URL is not set (docs/operations.md)", flush=True)


@as_command
def main() -> None:
    if not os.environ.get("PREFECT_API_URL"):
        raise UserError("PREFECT_API_URL is not set. Set it to the server's, as http://prefect:4200/api.")
    with get_client(sync_client=True) as client:
        deploy.make_pool(client, stack.POOL)
        equip(client, {}, stack.settings(os.environ))


if __name__ == "__main__":
    main()
