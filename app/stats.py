"""`/stats`: what is going on now, as one JSON object. What is not known is null."""

from typing import Any

from app.gate import Gate
from app.metrics import Metrics
from app.monitor import Monitor
from app.status import EngineStatus


def snapshot(gate: Gate, metrics: Metrics, monitor: Monitor, status: EngineStatus, uptime_s: float) -> dict[str, Any]:
    """The object of the contract: `in_flight` counts slots, `total_requests` gated arrivals, refused ones too."""
    reading = monitor.reading if status.ready else None
    average = monitor.average_batch_size()
    return {
        "avg_batch_size": None if average is None else round(average, 3),
        "queue_depth": gate.queued,
        "total_requests": metrics.total_requests,
        "in_flight": gate.in_flight,
        "limit": gate.limit,
        "lanes": {name: {"in_flight": lane.in_flight, "queue_depth": lane.queued} for name, lane in gate.lanes.items()},
        "engine": {
            "state": str(status.state),
            "running": reading and round(reading.running),
            "waiting": reading and round(reading.waiting),
            "kv_cache_usage": reading and reading.kv_cache_usage,
            "restarts": sum(status.restarts.values()),
        },
        "uptime_s": round(uptime_s, 3),
    }
