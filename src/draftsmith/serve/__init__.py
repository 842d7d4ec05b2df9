"""Serving: live translation over WebSockets, with a page to look at.

`messages` (what is said), `room` (one session) with `hearing` (what waits there), `pump` (decoding,
sessions side by side), `hall` (all sessions), `app` (HTTP), `running` (the process), `page/` (what
browsers show).
"""
