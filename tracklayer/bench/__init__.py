"""`tracklayer bench`: throughput, latency and the cost of recording, offline and against a server."""
