"""What all measurements on a device share: the groups of ops, the status of a lost device, and where a row is from.

It imports no Triton before it is asked, so that the command can say that there is no device.
"""

from datetime import UTC, datetime

import torch

from bench.origin import commit

GROUPS = ("mla", "experts", "gqa", "prefill", "small")
LOST = 3  # exit status of a process whose device answers no more


def stamp(device: torch.device) -> dict[str, object]:
    import triton

    return {
        "machine": torch.cuda.get_device_name(device), "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
        "triton": triton.__version__,
    }  # fmt: skip
