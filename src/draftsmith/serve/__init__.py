"""The server of live translation.

`app` has the HTTP routes and the server process, `scheduler` the decoding thread, `live/` the
sessions and the protocol, `metrics` the numbers for Prometheus, `static/` the page.
"""
