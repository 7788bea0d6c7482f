"""What the server tells about itself: metrics for Prometheus, spans for OpenTelemetry, lines for the log.

`Telemetry` hears what passes between API and engine, `Access` what passes between clients and API.
"""
