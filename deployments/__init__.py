"""The Ray Serve application: HTTP gateway and engine workers."""
