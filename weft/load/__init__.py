"""The load generator: builds requests from a plan, sends them from client processes, reports the latencies."""
