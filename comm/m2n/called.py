"""What answers say of the calls that they are of: how many rows of others were in them. It only advises."""

_MOST = 1 << 20  # rows of a call; a number beyond it is nobody's


class CalledRows:
    """Of one attention node, by micro-batch: its rows that were answered, and all rows of their calls."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}

    def note_answer(self, micro_batch: int, rows: int, call: int) -> None:
        """An answer of `rows` rows; `call` is what its header says (`comm.transport.Header`)."""
        if rows <= 0 or call > _MOST:
            return
        own, whole = self._sums.get(micro_batch, (0, 0))
        self._sums[micro_batch] = own + rows, whole + max(call, rows)

    def take_others(self, micro_batch: int) -> float:
        """Rows of others beside each of its own, in the mean since the last call."""
        own, whole = self._sums.pop(micro_batch, (0, 0))
        return whole / own - 1.0 if own else 0.0
