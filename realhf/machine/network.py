"""The addresses of this host, and those at which it reaches another one."""

import contextlib
import ipaddress
import socket

import psutil

from realhf.base.errors import UserError

BY_INTERFACE = "name the one between the hosts by --network-interface"
BY_ADDRESS = f"{BY_INTERFACE}, or the master's address by --master-address"


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface: IPv4 before IPv6, without those that are valid on a link alone."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        texts = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        usable = [text for text in texts if "%" not in text and not ipaddress.ip_address(text).is_link_local]
        if usable:
            found[name] = sorted(usable, key=lambda text: ":" in text)
    return found


def interface_of(address: str) -> str:
    """The interface that has an address; "" if none does."""
    return next((name for name, own in addresses().items() if address in own), "")


def source_of(host: str) -> str:
    """The address from which this host would speak to `host`; "" where there is no route, and nothing is sent."""
    with contextlib.suppress(OSError):
        (family, kind, protocol, _, target), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def in_words(address: str) -> str:
    """`10.0.0.4 (ib0)`."""
    if not address:
        return "no address, for want of a route"
    return f"{address} ({interface_of(address) or 'no interface of this host'})"


def own_address(interface: str | None, remedy: str = BY_ADDRESS) -> str:
    """The address of this host that others are to use: that of an interface, or else of the host's name. Raises
    UserError where that is not known, with the `remedy`."""
    name = socket.gethostname()
    try:
        resolved = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        resolved = []
    return choose_address(name, interface, resolved, addresses(), remedy)


def choose_address(
    name: str,
    interface: str | None,
    resolved: list[str],
    interfaces: dict[str, list[str]],
    remedy: str = BY_ADDRESS,
) -> str:
    """As `own_address`, of a host whose name resolves to these addresses and which has these interfaces."""
    others = {own: texts for own, texts in interfaces.items() if not all(map(_is_loopback, texts))}
    here = "; ".join(f"{own} {', '.join(texts)}" for own, texts in others.items()) or "none"
    # NCCL's names may be several, or begin with "=" for an exact one; "^" leaves some out.
    if interface and not interface.startswith("^"):
        wanted = interface.removeprefix("=").split(",")[0]
        found = interfaces.get(wanted) or next((own for key, own in interfaces.items() if key.startswith(wanted)), None)
        if found is None:
            raise UserError(f"--network-interface {interface}: {name} has no such interface; it has {here}")
        return found[0]
    if usable := [address for address in resolved if not _is_loopback(address)]:
        return usable[0]
    if len(others) == 1:
        (texts,) = others.values()
        return texts[0]
    what = f"resolves to {', '.join(dict.fromkeys(resolved))} only" if resolved else "does not resolve"
    raise UserError(
        f"the host name {name} {what}, and other hosts could not use that; its interfaces are {here}: {remedy}"
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
