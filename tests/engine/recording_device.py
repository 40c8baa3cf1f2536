"""A device that records, without one: what is recorded is done again, over the same memory, when it is replayed."""

from collections.abc import Callable, Sequence

import torch

from afserve.kernels.devices.host import HostDevice


class RecordingDevice(HostDevice):
    """A CPU that keeps count. `refuses` is what recording fails with."""

    records = True

    def __init__(self, where: torch.device, refuses: str = "") -> None:
        super().__init__(where)
        self.recorded = self.replayed = 0
        self.refuses = refuses

    def record_launch(
        self, launch: Callable[[], None], further: Sequence[torch.device] = ()
    ) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            launch()

        return replay
