"""The links of a plan, by the user's numbers, the doctor's, the known ones of a device, or defaults."""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_pp.cli.plan import numbers
from lightning_pp.cli.problems import UserError
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.hardware.links import Links, LinkSpeed, links_measured, named_node_bandwidth

_USUAL_DEVICES_PER_NODE = 8
_MAKERS = ("nvidia", "geforce", "tesla")


def find_links(config: DictConfig, num_devices: int, num_ranks: int) -> Links:
    """What messages take between the ranks that are planned for.

    Args:
        config: The config of the plan.
        num_devices: All devices.
        num_ranks: Ranks of a pipeline.

    Raises:
        UserError: A number is not what it has to be, or the doctor's file cannot be read.
    """
    names = ("link_gb_per_s", "link_latency_us", "node_link_gb_per_s", "node_link_latency_us", "devices_per_node")
    for name in names:
        value, least = config[name], "0 or more" if "latency" in name else "above 0"
        if value is not None and not (0 < value < float("inf") or (value == 0 and "latency" in name)):
            raise UserError(f"{name}={value} must be a number {least}")
    try:
        inside, between = (None, None) if config.links is None else links_measured(config.links)
    except ConfigurationError as error:
        raise UserError(f"links={error}") from error
    known = None if config.device is None else named_node_bandwidth(device_name(config.device))
    # without any number for the links within a node they are as fast as those between nodes
    return Links(
        _link(config.node_link_gb_per_s, config.node_link_latency_us, inside, known or 1e9 * config.link_gb_per_s),
        _link(config.link_gb_per_s, config.link_latency_us, between, None),
        _ranks_per_node(config, num_devices),
        max(1, num_devices // num_ranks),
    )


def _link(gb_per_s: float | None, latency_us: float, measured: LinkSpeed | None, known: float | None) -> LinkSpeed:
    """One kind of link: what was measured, else the number of the config, else what is known."""
    if measured is not None:
        return measured
    speed = 1e9 * gb_per_s if gb_per_s is not None else known
    assert speed is not None
    return LinkSpeed(speed, 1e-3 * latency_us)


def _ranks_per_node(config: DictConfig, num_devices: int) -> int | None:
    """Devices of a node; None where all are on one."""
    if config.devices_per_node is not None:
        return int(config.devices_per_node)
    if config.trainer.num_nodes == 1:  # trainer.devices says for how many to plan, which need not be on one node
        return None if num_devices <= _USUAL_DEVICES_PER_NODE else _USUAL_DEVICES_PER_NODE
    return max(1, num_devices // int(config.trainer.num_nodes))


def about_links(links: Links) -> str:
    """The speeds of the links, for people: one of them where only one is there."""

    def of(link: LinkSpeed) -> str:
        return (
            f"{numbers.three_digits(link.bytes_per_s / 1e9)} GB/s and {numbers.three_digits(1e3 * link.latency_ms)} µs"
        )

    if links.ranks_per_node is None:
        return f"transfers at {of(links.inside)}"
    return f"transfers at {of(links.inside)} in a node of {links.ranks_per_node}, {of(links.between)} between nodes"


def device_name(device: str) -> str:
    """The name of a device as Lightning has it."""
    words = device.lower().replace("-", " ").replace("_", " ").split()
    return " ".join(word for word in words if word not in _MAKERS)
