"""What `--rebalance` and the keyword `rebalance` mean, as rules for whoever balances."""

from afserve.control.membership.balancing import BalanceRules
from afserve.errors import ConfigError
from afserve.settings import in_range


def balance_rules(when: str | None, redundant_experts: int) -> BalanceRules:
    """`when` is auto, off or a number of seconds; without it auto where there are redundant experts.

    Copies, hosts and spare slots are the topology's (`Topology.keeping`). Raises ConfigError for anything else.
    """
    when = when or ("auto" if redundant_experts else "off")
    if when in ("auto", "off"):
        return BalanceRules(act=when == "auto")
    try:
        seconds = float(when)
    except ValueError:
        raise ConfigError(f"--rebalance: {when!r} is not auto, off or a number of seconds") from None
    in_range("--rebalance", seconds, 0.1, 86_400)
    return BalanceRules(act=True, every=seconds)
