"""Traces: the set-up of the SDK in each process, and the gateway's span of a request."""
