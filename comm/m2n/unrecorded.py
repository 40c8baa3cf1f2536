"""What a link says whose host has a part in every layer of a step."""


class Unrecorded:
    """Its steps cannot be recorded, and none is to be run again."""

    def held(self, micro_batch: int, *, done: bool = False) -> bool:
        return True

    def prepare(self, micro_batch: int) -> object | None:
        return None

    def replayed(self, micro_batch: int) -> None:
        """Nothing was sent."""
