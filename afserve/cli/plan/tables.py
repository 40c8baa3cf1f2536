"""What a plan says of a look-up table, which is in no device's memory."""

from afserve.placement.planner.perf.shape import ModelShape

_GIB = 1 << 30


def table_notes(shape: ModelShape) -> list[str]:
    if not shape.table_elems:
        return []
    size = f"{shape.table_elems / 1e9:.1f}B numbers, {2 * shape.table_elems / _GIB:,.0f} GiB in 16 bits"
    return [
        f"{shape.name} has a look-up table of {size}: hosts of experts read its rows from the checkpoint's file, which "
        "their memory keeps as far as there is room, or from an NVMe disk. No device's memory is counted for it, and "
        "no time"
    ]
