"""What the server counts and measures, in Prometheus' terms.

What starts with `vllm:` has vLLM's names, labels and buckets, so that dashboards made for it show this server; it
counts requests to the engine, of which one HTTP request may make several. Ours start with `longreach:`: the same
latencies by the prompt's length (a mean over 1K and 1M prompts says nothing of either), pages, and how each HTTP
request ended.
"""

from longreach.metrics.names import CONTENT_TYPE, band
from longreach.metrics.path_class import QUIET, path_class
from longreach.metrics.server_collector import ServerState
from longreach.metrics.server_metrics import Metrics
from longreach.metrics.timeline import Timeline

__all__ = ["CONTENT_TYPE", "QUIET", "Metrics", "ServerState", "Timeline", "band", "path_class"]
