"""Whether the arrows of a merged trace go where time goes."""

import json
from itertools import pairwise
from pathlib import Path

_ROUNDING = 0.5  # microseconds: times are sums of floats


def backwards(file: Path) -> list[str]:
    """What is wrong with the arrows of a merged trace: rows or blocks that arrive before they were sent, or out of
    nothing.

    All times of one machine are of one clock, so an arrow that runs backwards was stamped in the wrong place.
    """
    arrows: dict[str, dict[str, float]] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    found: list[str] = []
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    for event in events:
        if event["ph"] == "X":
            where = slices.setdefault((event["pid"], event["tid"]), [])
            where.append((event["ts"], event["ts"] + event["dur"]))
    for event in (e for e in events if e["ph"] in ("s", "t", "f")):
        arrows.setdefault(event["id"], {})[event["ph"]] = event["ts"]
        track = slices.get((event["pid"], event["tid"]), [])
        if not any(start - _ROUNDING <= event["ts"] <= end + _ROUNDING for start, end in track):
            found.append(f"{event['id']}: its {event['ph']} at {event['ts']:.1f} us lies in no slice")
    for identity, times in arrows.items():
        order = [times[kind] for kind in ("s", "t", "f") if kind in times]
        if "s" not in times or any(later < earlier - _ROUNDING for earlier, later in pairwise(order)):
            found.append(f"{identity}: {times} us run backwards")
    return found
