"""Traces of requests, by the OpenTelemetry API alone: whoever runs the engine sets up the SDK."""
