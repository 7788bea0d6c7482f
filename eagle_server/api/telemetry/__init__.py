"""Metrics for Prometheus, spans for OpenTelemetry and log lines.

`Telemetry` observes the engine client. `AccessLog` observes the HTTP requests.
"""
