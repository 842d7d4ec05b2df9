"""Serving: live translation over WebSockets, with a page to look at.

`messages` (what is said), `room` (one session), `pump` (decoding, sessions side by side), `app`
(HTTP), `page/` (what browsers show).
"""
