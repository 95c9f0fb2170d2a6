"""What run parameters cannot reach unless the operator allows it: internal addresses, other protocols, push targets."""

import ipaddress
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tasks.config.access import check_push, may_connect
from tasks.config.cluster import OF_THIS_MACHINE, OVERRIDES, Cluster, load_cluster
from tasks.config.strict import validate
from tasks.errors import UserError
from tasks.source import fetch as reading
from tasks.source.fetch import check_address, fetch, remote_version
from tests.support.workspaces import PROJECT, make_workspace, refusal, write_cluster

ROWS = b'{"prompt": "p", "chosen": "c", "rejected": "r"}\n'


@pytest.mark.parametrize(
    ("address", "networks", "may"),
    [
        ("127.0.0.1", [], False),
        ("0.0.0.0", [], False),
        ("169.254.169.254", [], False),  # metadata services: AWS, GCP
        ("168.63.129.16", [], False),  # Azure
        ("100.100.100.200", [], False),  # Alibaba
        ("fd00:ec2::254", [], False),  # AWS over IPv6
        ("10.1.2.3", [], False),
        ("::1", [], False),
        ("fe80::1%eth0", [], False),
        ("::ffff:127.0.0.1", [], False),
        ("64:ff9b::7f00:1", [], False),
        ("2002:7f00:1::", [], False),
        ("::127.0.0.1", [], False),
        ("::8.8.8.8", [], False),  # deprecated
        ("::ffff:0:127.0.0.1", [], False),
        ("::ffff:0:0:7f00:1", [], False),
        ("64:ff9b:1::7f00:1", [], False),
        ("64:ff9b:1:7f00:0:100::", [], False),  # the same with a prefix of 48 bits
        ("64:ff9b:1::808:808", [], False),  # a site's own gateway may send it anywhere
        ("fec0::1", [], False),
        ("fec0::1%eth0", [], False),
        ("2001:0:808:808:0:0:80ff:fffe", [], False),  # Teredo, the client 127.0.0.1
        ("2606:4700::5efe:7f00:1", [], False),  # ISATAP
        ("2606:4700::200:5efe:a00:1", [], False),
        ("192.0.0.192", [], False),  # Oracle's metadata service
        ("ff0e::1", [], False),
        ("224.0.0.251", [], False),
        ("4000::1", [], False),
        ("1.1.1.1", [], True),
        ("2606:4700:4700::1111", [], True),
        ("64:ff9b::101:101", [], True),
        ("10.1.2.3", ["10.0.0.0/8"], True),
        ("10.1.2.3", ["10.1.2.4"], False),
        ("::ffff:127.0.0.1", ["127.0.0.1"], True),
        ("::ffff:1.1.1.1", [], True),
        ("2002:101:101::1", [], ipaddress.ip_address("2002:101:101::1").is_global),  # older Pythons: none of 6to4 is
        ("2606:4700::5efe:808:808", [], True),
        ("64:ff9b::a00:1", ["10.0.0.0/8"], True),
        ("64:ff9b:1::a00:1", ["64:ff9b:1::/48"], True),
        ("fec0::1", ["fec0::/10"], True),
    ],
)
def test_only_public_addresses_and_the_operators_are_connected_to(address, networks, may):
    assert may_connect(address, networks) == may


# IANA's registries of special-purpose addresses (RFC 6890), as of 2026: the rows that are not globally reachable, and
# fec0::/10 and 192.88.99.0/24, which are deprecated.
# fmt: off
UNREACHABLE = [
    "0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24",
    "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
    "255.255.255.255/32", "::1/128", "::/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23",
    "2001::/32", "2001:2::/48", "2001:10::/28", "2001:db8::/32", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10",
    "fec0::/10",
]
# fmt: on
REACHABLE = ["192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24", "2620:4f:8000::/48"]


@pytest.mark.parametrize("row", UNREACHABLE)
def test_no_special_purpose_address_is_public_in_whatever_form(row):
    """The first, the last and some other addresses of a row; IPv4 ones also mapped, translated and tunneled."""
    network = ipaddress.ip_network(row)
    first, last = int(network[0]), int(network[-1])
    for number in {first, last, *(first + (last - first) * part // 7 for part in range(7))}:
        address = type(network[0])(number)
        forms = [str(address)]
        if address.version == 4:
            forms += [f"::ffff:{address}", f"::{address}", f"64:ff9b::{address}", f"64:ff9b:1::{address}"]
            forms += [f"2606:4700::5efe:{address}", str(ipaddress.IPv6Address((0x2002 << 112) + (number << 80) + 1))]
            forms += [str(ipaddress.IPv6Address((0x20010000 << 96) + (0x08080808 << 64) + (number ^ 0xFFFFFFFF)))]
        assert [form for form in forms if may_connect(form, [])] == []


@pytest.mark.parametrize("row", REACHABLE)
def test_special_purpose_addresses_that_anybody_reaches_are_public(row):
    network = ipaddress.ip_network(row)
    assert may_connect(str(network[0]), [])
    assert may_connect(str(network[-1]), [])


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        asked.append((self.server.server_address[0], self.path))  # type: ignore[arg-type]
        target = redirects.get(self.path)
        self.send_response(302 if target else 200)
        if target:
            self.send_header("Location", target)
        self.send_header("Content-Length", "0" if target else str(len(ROWS)))
        self.end_headers()
        if not target and self.command == "GET":
            self.wfile.write(ROWS)

    def log_message(self, format: str, *args: object) -> None:
        pass


asked: list[tuple[str, str]] = []
redirects: dict[str, str] = {}


@contextmanager
def serving(host: str) -> Iterator[int]:
    with ThreadingHTTPServer((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = make_workspace(tmp_path / "workspace", tmp_path)
    monkeypatch.delenv("DPO_CLUSTER", raising=False)
    monkeypatch.delenv("DPO_HOME", raising=False)
    monkeypatch.chdir(made)
    asked.clear()
    redirects.clear()
    return made


def test_data_over_http_comes_from_allowed_addresses_alone_after_a_redirect_too(root):
    with serving("127.0.0.1") as port, serving("127.0.0.2") as other:
        for host in ("127.0.0.1", "localhost"):
            address = f"http://{host}:{port}/a.jsonl"
            with pytest.raises(UserError, match=r"source.data: .*127.0.0.1 is not a public address.*access.networks"):
                remote_version("source.data", address)
            with pytest.raises(UserError, match=r"source.data: .*127.0.0.1 is not a public address.*access.networks"):
                fetch("source.data", address, 0, root / host)
        assert asked == []  # not even a request arrived
        write_cluster(root, {"access.networks": ["127.0.0.1"]})
        fetch("source.data", f"http://127.0.0.1:{port}/a.jsonl", 0, root / "allowed")
        assert (root / "allowed/a.jsonl").read_bytes() == ROWS
        redirects["/b.jsonl"] = f"http://127.0.0.2:{other}/a.jsonl"
        with pytest.raises(UserError, match=r"127.0.0.2 is not a public address"):
            fetch("source.data", f"http://127.0.0.1:{port}/b.jsonl", 0, root / "redirected")
        assert {host for host, _ in asked} == {"127.0.0.1"}


def card(root: Path, files: str) -> str:
    """A data set whose card names these files. The hub's library reads the folder as it would a repository."""
    (root / "some/set").mkdir(parents=True, exist_ok=True)
    (root / "some/set/README.md").write_text(f"---\nconfigs: [{{config_name: default, data_files: '{files}'}}]\n---\n")
    return "hub:some/set"


def test_a_data_set_of_the_hub_cannot_name_an_internal_address(root, monkeypatch):
    monkeypatch.setattr(reading, "DATASETS", f"{root}/")
    with serving("127.0.0.1") as port:
        address = card(root, f"http://127.0.0.1:{port}/a.jsonl")
        with pytest.raises(UserError, match=r"source.data: the data set some/set .*could not be loaded"):
            fetch("source.data", address, 0, root / "data")
        assert asked == []
        write_cluster(root, {"access.networks": ["127.0.0.1"]})
        fetch("source.data", address, 0, root / "allowed")
        assert asked != []


def test_a_data_set_of_the_hub_cannot_name_a_file_of_this_machine(root, monkeypatch):
    (root / "private.jsonl").write_bytes(ROWS)
    for files in (f"{root}/private.jsonl", f"file://{root}/private.jsonl", "../../private.jsonl"):
        monkeypatch.setattr(reading, "DATASETS", f"{root}/")
        address = card(root, files)
        with pytest.raises(
            UserError, match=r"source.data: the (card of hub:some/set names|data set some/set .*could not)"
        ):
            fetch("source.data", address, 0, root / "data")
        assert not list((root / "data").glob("*"))
        shutil.rmtree(root / "data")
    (root / "some/set/a.jsonl").write_bytes(ROWS)
    card(root, "a.jsonl")
    fetch("source.data", "hub:some/set", 0, root / "fetched")
    assert (root / "fetched/rows.parquet").exists()
    monkeypatch.undo()
    monkeypatch.chdir(root)
    for library in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{library}.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"the data set some/set .*could not be loaded from the hub"):
        fetch("source.data", "hub:some/set", 0, root / "never")  # it is a folder here, which is not what `hub:` means


# Every other protocol of fsspec reads what is on other machines. Of a new one, this test asks which it is.
REMOTE = {
    *("abfs", "adl", "arrow_hdfs", "az", "box", "dbfs", "dropbox", "ftp", "gcs", "gdrive", "gist", "github", "gs"),
    *("hdfs", "hf", "http", "https", "lakefs", "oci", "ocilake", "oss", "root", "s3", "s3a", "sftp", "smb", "ssh"),
    *("tos", "tosfs", "wandb", "webdav", "webhdfs"),
}


def test_no_protocol_but_file_reads_files_of_this_machine(root):
    from fsspec.registry import known_implementations

    assert set(known_implementations) == REMOTE | OF_THIS_MACHINE | {"file"}
    for protocol in OF_THIS_MACHINE:
        with pytest.raises(UserError, match=f"must use one protocol|`{protocol}`"):
            fetch("source.data", f"{protocol}://{root}/pairs.jsonl", 0, root / protocol)
        with pytest.raises(UserError, match=f"access.*protocols: `{protocol}` reads files of this machine"):
            validate(Cluster, {"access": {"protocols": [protocol]}}, Path("infra/cluster.yaml"))


@pytest.mark.parametrize("name", ["/etc", "../set", "set", ".services/x", "a/b/c", "json", "a/.b"])
def test_a_path_is_no_name_of_the_hub(name):
    with pytest.raises(UserError, match="must name a data set of the hub as hub:OWNER/NAME"):
        check_address("source.data", f"hub:{name}")


@pytest.mark.parametrize(
    "address", ["ftp://h/a.jsonl", "zip://a::http://127.0.0.1/a.zip", "file:///a::http://h/a.jsonl"]
)
def test_a_protocol_that_is_not_allowed_and_a_chain_are_refused(root, address):
    with pytest.raises(UserError, match=r"source.data: .* must use one protocol of file, http,.*access.protocols"):
        fetch("source.data", address, 0, root / "data")


def test_a_model_is_pushed_below_an_allowed_target_alone():
    access = load_cluster(PROJECT, {"access": {"push": ["s3://ours/models/"]}}).access
    for good in ("s3://ours/models", "s3://ours/models/dpo"):
        assert check_push(good, access) == good
    for bad in ("s3://theirs/models", "s3://ours/models-2", "s3://ours/models/../x", "file:///etc"):
        with pytest.raises(UserError, match=r"promote.push: .*\(s3://ours/models/\).*access.push"):
            check_push(bad, access)


def test_a_forbidden_parameter_ends_the_first_stage(root):
    content = yaml.safe_load((root / "params.yaml").read_text())
    content["promote"]["push"] = "s3://theirs/models"
    (root / "params.yaml").write_text(yaml.safe_dump(content))
    assert "promote.push: s3://theirs/models is not below a target that the operator allowed" in refusal(root, "source")


def test_access_is_the_operators_and_no_recipe_sets_it(root):
    (root / OVERRIDES).write_text(yaml.safe_dump({"access": {"push": ["s3://theirs"]}}))
    with pytest.raises(UserError, match="a recipe cannot set `access`"):
        load_cluster()
    (root / OVERRIDES).unlink()
    write_cluster(root, {"access.networks": ["10.0.0.1/8"]})
    with pytest.raises(UserError, match=r"networks: 10.0.0.1/8 has host bits set. Write an address or a range"):
        load_cluster()
