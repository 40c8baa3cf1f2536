"""A simulated timeline as Chrome trace events, which https://ui.perfetto.dev opens."""

import json
from collections.abc import Sequence

from afserve.placement.planner.simulate.layers import StationSpan


def perfetto_json(spans: Sequence[StationSpan]) -> str:
    """One track per station, one slice per micro-batch and layer; microseconds from the first slice."""
    stations = sorted({span.station for span in spans})
    origin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": place, "args": {"name": station}}
        for place, station in enumerate(stations)
    ]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": f"m{span.micro_batch} layer {span.layer}",
                "cat": span.station.split()[0],
                "pid": 1,
                "tid": stations.index(span.station),
                "ts": round((span.start - origin) * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "args": {"micro_batch": span.micro_batch, "layer": span.layer},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
