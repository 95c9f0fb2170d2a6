"""The secrets, hosts, networks and push targets that run parameters may use, as the operator allows them.

The lists are `access` in infra/cluster.yaml and in the site overlay; recipes and runs cannot change them.
"""

import errno
import ipaddress
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tasks.config.addresses import local_path
from tasks.config.cluster import Access, load_cluster
from tasks.config.paths import main_checkout
from tasks.errors import UserError

if TYPE_CHECKING:
    from tasks.config.evaluate import Endpoint
    from tasks.config.params import Params

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"http": 80, "https": 443}
LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that IANA has assigned to anybody
ISATAP = (0x00005EFE, 0x02005EFE)  # an interface's identifier with an IPv4 address behind it
# Not reachable for everybody, and still global in the tables of some versions of Python; Azure's metadata service.
REFUSED = ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20", "168.63.129.16/32")


def configured() -> Access:
    """From the main checkout: a run's worktree cannot change it."""
    return load_cluster(main_checkout()).access


def check(params: "Params") -> None:
    """Refuse forbidden parameters before a stage starts, not after hours of training."""
    access = configured()
    for endpoint in (params.evaluate.endpoint, params.sample and params.sample.endpoint):
        if endpoint:
            check_endpoint(endpoint, access)
    if params.promote.push:
        check_push(params.promote.push, access)
    for address in _late_paths(params):
        local_path(address)


def _late_paths(params: "Params") -> Iterator[str]:
    """What is read only after hours; the stage `source` checks its own addresses."""
    yield from (section.resume_from_checkpoint for section in (params.sft, params.train) if section)
    if params.evaluate.harness and params.evaluate.harness.folder:
        yield params.evaluate.harness.folder
    for judge in (params.evaluate.reward_model, params.sample and params.sample.reward_model):
        if judge and not judge.model.startswith("hub:"):
            yield judge.model


def check_endpoint(endpoint: "Endpoint", access: Access) -> None:
    """A judge receives prompts, answers and an API key: the key and the judge's origin must be allowed."""
    variable, origin = endpoint.key_variable, origin_of(endpoint.url)
    if variable is not None and variable not in access.judge_keys:
        raise UserError(
            f"evaluate.endpoint.key_variable: {variable} is not among the variables that may be sent to a judge "
            f"({', '.join(access.judge_keys) or 'none'}). Put the key into one of them, or ask the operator to add "
            f"{variable} to access.judge_keys in infra/cluster.yaml."
        )
    if urlsplit(endpoint.url).hostname not in LOOPBACK_NAMES and origin not in map(origin_of, access.judge_origins):
        raise UserError(
            f"evaluate.endpoint.url: {origin} is not allowed as a judge. The operator allows it with "
            f"`judge_origins: [{origin}]` under `access` in infra/cluster.yaml."
        )


def check_push(address: str, access: Access) -> str:
    """A model is pushed only below a target that the operator allows; returns the address."""
    below = (address.rstrip("/") + "/").startswith(tuple(target.rstrip("/") + "/" for target in access.push))
    if not below or ".." in address.split("/"):
        raise UserError(
            f"promote.push: {address} is not below a target that the operator allowed "
            f"({', '.join(access.push) or 'none'}). Add it to access.push in infra/cluster.yaml, or copy the model by "
            f"hand: `dpo push {address}`."
        )
    return address


def check_protocol(key: str, address: str, access: Access) -> None:
    """A remote address must use one allowed protocol. A chain (zip::http://...) would hide a second one."""
    protocol = address if "::" in address else address.partition("://")[0]
    if protocol not in access.protocols:
        raise UserError(
            f"{key}: {address} must use one protocol of {', '.join(access.protocols)}, without a chain (`::`). "
            "Download the files yourself, or ask the operator to add it to access.protocols in infra/cluster.yaml."
        )


def origin_of(url: str) -> str:
    """Scheme, host and port, as https://api.example.com:443."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or PORTS[parts.scheme]}"


async def guarded_client(networks: list[str], **options: Any) -> Any:
    """An aiohttp session that connects only to public addresses and to the operator's networks.

    The check sees the resolved address of each connection: neither a redirect nor DNS rebinding gets around it.
    """
    import aiohttp

    def open_socket(info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if not may_connect(address[0], networks):
            advice = "The operator allows it with access.networks in infra/cluster.yaml"
            raise PermissionError(errno.EACCES, f"{address[0]} is not a public address. {advice}")
        return socket.socket(family, kind, protocol)

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=open_socket), **options)


def may_connect(host: str, networks: list[str]) -> bool:
    """Whether packets to this address stay within the public Internet and the operator's networks."""
    address = _translated(ipaddress.ip_address(host.partition("%")[0]))
    if any(address in ipaddress.ip_network(network) for network in networks):
        return True
    return all(_is_public(one) for one in (address, *_tunneled(address)))


def _is_public(address: Address) -> bool:
    is_assigned = isinstance(address, ipaddress.IPv4Address) or address in GLOBAL_UNICAST
    is_refused = address.is_multicast or any(address in ipaddress.ip_network(network) for network in REFUSED)
    return is_assigned and address.is_global and not is_refused


def _translated(address: Address) -> Address:
    """The IPv4 address to which this machine or a NAT64 gateway sends the packets instead.

    Of the other prefixes with an IPv4 address inside (compatible, NAT64 of one site) none is public.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in NAT64 else address.ipv4_mapped or address


def _tunneled(address: Address) -> list[Address]:
    """The IPv4 addresses to which a tunnel (6to4, Teredo, ISATAP) takes the packets of an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    behind = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    is_isatap = int(address) >> 32 & 0xFFFFFFFF in ISATAP
    return [*filter(None, (address.sixtofour,)), *(address.teredo or ()), *([behind] if is_isatap else [])]
