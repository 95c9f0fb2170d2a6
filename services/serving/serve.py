"""Start the gateway with its engines and the sender of feedback; all of them end with it."""

import os
import signal
import sys
from contextlib import suppress

from services.http_app import run
from services.serving.engine import uses_vllm
from services.serving.fleet import Fleet
from services.serving.gateway import create_app
from services.serving.tokens import RateLimit, Tokens
from tasks.config.access import LOOPBACK_NAMES
from tasks.config.paths import ROOT, main_checkout
from tasks.feedback.journal import FeedbackJournal
from tasks.system import processes
from tasks.system.ports import http_address, require_free

DRAIN = 30  # seconds that running answers get when the gateway ends


def serve(model: str, host: str, port: int, challenger: str | None, share: float, limits: tuple[int, int, int]) -> None:
    """`limits`: requests a minute of each token, tokens of an answer, seconds of silence of an engine."""
    per_minute, most_tokens, patience = limits
    require_free(host, port)
    tokens, journal, fleet = Tokens(), FeedbackJournal(), Fleet(model, challenger, share)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the blocks below end
    try:
        with suppress(KeyboardInterrupt):
            fleet.start()
            app = create_app(fleet, tokens, journal, RateLimit(per_minute), most_tokens, patience)
            _print_address(fleet, tokens, host, port)
            sender = [sys.executable, "-m", "services.serving.sender"]
            log = main_checkout() / ".scratch" / "serving" / "sender.log"
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
            with log.open("w") as output, processes.spawn(sender, main_checkout(), env, output):
                run(app, host, port, timeout_graceful_shutdown=DRAIN)
    finally:
        fleet.close()


def _print_address(fleet: Fleet, tokens: Tokens, host: str, port: int) -> None:
    names = ", ".join(f"{engine.target.name} ({role})" for role, engine in fleet.engines.items())
    address = f"{http_address(host, port)}/v1"
    example = '{"messages": [{"role": "user", "content": "Hello"}]}'
    print(
        f"Serving {names} by {'vLLM' if uses_vllm() else 'transformers'} at {address} (OpenAI's API)\n"
        f"Tokens: {tokens.origin}. Example, with one of them:\n"
        f"  curl {address}/chat/completions -H 'Authorization: Bearer TOKEN' -d '{example}'",
        flush=True,
    )
    if host not in LOOPBACK_NAMES:
        print(f"{host} is reachable from other machines, without encryption: put a TLS proxy in front.", flush=True)
