"""Metrics for Prometheus, spans for OpenTelemetry and log lines.

`ServerMetrics` observes the engine client. `AccessLog` observes the HTTP requests.
"""
