"""A fleet whose processes reach each other and the store through proxies, one for each pair of processes."""

from collections.abc import Sequence

from allspark.launcher import Fleet, FleetOptions
from allspark.launcher.process import Report

from tests.network.proxy import Network, Proxy

PEERS = {"--broker=": "broker", "--redis=": "store"}


class CutFleet(Fleet):
    """Faults are named by a pair of kinds, `worker-broker`, and a number, see `links`."""

    def __init__(self, options: FleetOptions, report: Report) -> None:
        super().__init__(options, report)
        self._network = Network()

    def start(self) -> None:
        self._network.start()
        super().start()

    def stop(self, *, drain: bool = True) -> None:
        super().stop(drain=drain)
        self._network.stop()

    def command_line(self, kind: str, index: int, ready_fd: int) -> Sequence[str]:
        """The command of the process, with addresses of proxies of its own."""
        return [self._through(kind, index, word) for word in super().command_line(kind, index, ready_fd)]

    def _through(self, kind: str, index: int, word: str) -> str:
        for flag, peer in PEERS.items():
            if word.startswith(flag):
                return flag + self._network.through(_name(kind, index, peer), word.removeprefix(flag))
        return word

    def client_addresses(self) -> list[str]:
        """The gateways as clients reach them."""
        return [self._network.proxy(_name("client", 0, "gateway"), a).address for a in self.addresses]

    def num_links(self) -> dict[str, int]:
        """How many numbers `links` takes, for each pair."""
        sizes = {"worker": self.options.workers, "broker": self.options.brokers} | {
            "gateway": self.options.gateways
        }
        return {
            "worker-broker": sizes["worker"] * (sizes["broker"] + 1),
            "worker-store": sizes["worker"],
            "gateway-broker": sizes["gateway"] * (sizes["broker"] + 1),
            "gateway-store": sizes["gateway"],
            "broker-store": sizes["broker"],
            "client-gateway": sizes["gateway"],
        }

    def all_links(self, pair: str) -> list[Proxy]:
        """Between the first process of the first kind and all its peers; of clients, to the first gateway."""
        kind, _, peer = pair.partition("-")
        proxies = self._network.of(_name(kind, 0, peer))
        return proxies[:1] if kind == "client" else proxies

    def around_broker(self, index: int) -> list[Proxy]:
        """Between all workers and one broker."""
        return [self._network.of(_name("worker", i, "broker"))[index] for i in range(self.options.workers)]

    def links(self, pair: str, number: int) -> list[Proxy]:
        """Between one process and one of its peers, or (the last numbers of a process) all of its brokers."""
        kind, _, peer = pair.partition("-")
        per_process = self.num_links()[pair] // {
            "worker": self.options.workers, "gateway": self.options.gateways,
            "broker": self.options.brokers, "client": 1,
        }[kind]  # fmt: skip
        index, which = divmod(number, per_process)
        proxies = self._network.of(_name(kind, index, peer))
        return proxies if which >= len(proxies) else [proxies[which]]


def _name(kind: str, index: int, peer: str) -> str:
    return f"{kind}-{index} {peer}"
