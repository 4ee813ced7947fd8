"""The network between the hosts, and how it fails."""

from hosts.host import Host, in_network

INTERFACE, DECOY = "fab0", "dec0"


def address(number: int) -> str:
    """Of host `number`, on the network between the hosts."""
    return f"10.77.0.{10 + number}"


def decoy_address(number: int) -> str:
    """Of host `number`, on an interface that leads nowhere."""
    return f"192.168.{100 + number}.1"


class Network:
    """A bridge in the network of the process `switch`, with a port for each host."""

    def __init__(self, switch: Host) -> None:
        self._switch = switch

    def make(self) -> None:
        self._at_switch("ip", "link", "add", "br0", "type", "bridge")
        self._at_switch("ip", "link", "set", "br0", "up")

    def connect(self, host: Host, number: int) -> None:
        """Gives a host that has been started its interfaces. When it ends they go with it."""
        port = _port(host)
        self._at_switch("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(host.pid))
        self._at_switch("ip", "link", "set", port, "master", "br0", "up")
        _at(host, "ip", "link", "add", DECOY, "type", "veth", "peer", "name", "dec1")
        for interface, own in ((INTERFACE, address(number)), (DECOY, decoy_address(number))):
            _at(host, "ip", "addr", "add", f"{own}/24", "dev", interface)
            _at(host, "ip", "link", "set", interface, "up")
        _at(host, "ip", "link", "set", "dec1", "up")

    def cut(self, host: Host) -> None:
        """Pulls the host's cable."""
        self._at_switch("ip", "link", "set", _port(host), "down")

    def mend(self, host: Host) -> None:
        self._at_switch("ip", "link", "set", _port(host), "up")

    def silence(self, host: Host) -> None:
        """All frames to and from the host vanish, while its link stays up."""
        port = _port(host)
        self._at_switch(
            "nft", "-f", "-",
            text=f"table netdev from_{port} {{\n"
            f' chain frames {{ type filter hook ingress device "{port}" priority 0; policy drop; }}\n}}\n'
            f"table bridge to_{port} {{\n"
            f" chain frames {{ type filter hook forward priority 0; policy accept; oifname \"{port}\" drop; }}\n}}\n",
        )  # fmt: skip

    def unsilence(self, host: Host) -> None:
        self._at_switch("nft", "delete", "table", "netdev", f"from_{_port(host)}")
        self._at_switch("nft", "delete", "table", "bridge", f"to_{_port(host)}")

    def drop(self, host: Host, rule: str) -> None:
        """What comes in to the host and matches an nft rule (`tcp dport 6818`) vanishes."""
        chain = f"chain frames {{ type filter hook input priority 0; policy accept; {rule} drop; }}"
        _at(host, "nft", "-f", "-", text=f"table inet dropped {{\n {chain}\n}}\n")

    def undrop(self, host: Host) -> None:
        _at(host, "nft", "delete", "table", "inet", "dropped")

    def rate(self, host: Host, rate: str) -> None:
        """Limits what goes out of the host, to "50mbit" for example; "" ends it."""
        if rate:
            bucket = ("tbf", "rate", rate, "burst", "256k", "latency", "200ms")
            _at(host, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *bucket)
        else:
            _at(host, "tc", "qdisc", "del", "dev", INTERFACE, "root")

    def _at_switch(self, *words: str, text: str | None = None) -> None:
        _at(self._switch, *words, text=text)


def _at(host: Host, *words: str, text: str | None = None) -> None:
    assert host.pid is not None, f"{host.name} is down"
    in_network(host.pid, *words, text=text)


def _port(host: Host) -> str:
    return f"to_{host.name}"
