"""HTTP to our own server: past any proxy, whose owner would read the key and which does not know our loopback."""

import urllib.request

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
