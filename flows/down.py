"""`make down`: end what `make up` started, the worker first so that its runs can still say how they ended."""

from flows import passwords, services
from flows.stack import TITLES


def down() -> None:
    with services.one_at_a_time():
        for name in ("worker", "mlflow", "prefect"):
            ended = services.end(name)
            print(f"{TITLES[name]} {'is ended' if ended else 'did not run'}", flush=True)
        passwords.remove_client()


if __name__ == "__main__":
    down()
